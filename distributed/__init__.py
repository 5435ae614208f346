"""Kronecker products over many GPUs. Imported as ``fastkron_py.distributed``."""

if __name__ != "fastkron_py.distributed":
    raise ImportError(f"import this package as fastkron_py.distributed, not as {__name__}")
