"""Group-wise rational functions, by themselves and fused with a norm or a linear layer: kernels, launchers, and the same in torch."""
