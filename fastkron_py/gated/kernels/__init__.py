"""Device code of gated layers."""
