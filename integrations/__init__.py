"""Adapters to other libraries, one module each. Imported as ``fastkron_py.integrations``."""

if __name__ != "fastkron_py.integrations":
    raise ImportError(f"import this package as fastkron_py.integrations, not as {__name__}")
