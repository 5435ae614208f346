"""Device code for every GPU."""
