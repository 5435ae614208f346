"""Gated linear layers: what the linear layers' main loop does with pairs of sums, activations, launchers, and the same in torch."""
