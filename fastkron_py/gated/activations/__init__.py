"""Activations of gates, by name: each with its derivative, on the device and in torch."""
