"""Polynomial KAN layers."""
