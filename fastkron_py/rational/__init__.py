"""Group-wise rational activations, and linear layers and layer norms before or after them."""
