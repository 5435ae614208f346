"""Register-chained kernels for Hopper GPUs, and their launch configurations."""
