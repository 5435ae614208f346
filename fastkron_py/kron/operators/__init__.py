"""Lazy linear operators of Kronecker structure, and their linear algebra."""
