"""Kronecker multiplies and their gradients: kernels, launchers, the torch backend, and the search for faster choices."""
