"""Kronecker multiplies on CPUs by one fused kernel, which numba compiles."""
