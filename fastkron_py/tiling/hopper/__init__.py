"""Device code that large products on Hopper GPUs share, in Gluon."""
