"""Rational activations, and transformers with them."""
