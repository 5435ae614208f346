"""Gated layers, and models with them."""
