"""Layers with low-rank Kronecker adapters."""
