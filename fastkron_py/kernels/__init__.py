"""Device code and its launchers, one module per backend and operator.

Importing this package imports neither Triton nor CUDA; `kernels.triton_backend` does, on first use.
"""
