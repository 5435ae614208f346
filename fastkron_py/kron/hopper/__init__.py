"""Register-resident kernels for Hopper GPUs, and their launch configurations."""
