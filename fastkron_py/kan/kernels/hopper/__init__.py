"""Device code for Hopper GPUs, in Gluon."""
