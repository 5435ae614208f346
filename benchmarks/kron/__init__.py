"""Kronecker products."""
