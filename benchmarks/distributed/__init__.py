"""Products over all GPUs of a host."""
