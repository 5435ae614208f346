"""Products with Kronecker products."""
