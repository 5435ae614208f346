"""Device code of rational functions."""
