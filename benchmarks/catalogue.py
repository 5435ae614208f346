"""All benchmarks there are: import the modules that register them here."""

from benchmarks import distributed, first_call, gated, gated_llama, gaussian_processes, kan, kat, kron, rational, rational_layers  # noqa: F401
from benchmarks.registry import Benchmark, registered


def all_benchmarks() -> dict[str, Benchmark]:
    """Every benchmark by name."""
    return registered()
