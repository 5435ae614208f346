"""Bases of polynomial KAN layers, by name: values and derivatives, on the device and in torch; their tables."""
