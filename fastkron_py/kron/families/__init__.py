"""Families of kernels of a multiply: one file each, for what it takes, what that costs, and how it is launched."""
