"""Layers of polynomial Kolmogorov-Arnold networks."""
