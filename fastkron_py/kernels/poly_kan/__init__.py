"""Polynomial KAN layers: bases, kernels, launchers, and the same in torch."""
