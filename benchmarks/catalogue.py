"""All benchmarks there are: import the modules that register them here."""

import benchmarks.adapters.batched
import benchmarks.adapters.lokr
import benchmarks.adapters.models
import benchmarks.distributed.jobs
import benchmarks.eager.calls
import benchmarks.eager.row_counts
import benchmarks.gated.layers
import benchmarks.gated.llama
import benchmarks.gated.models
import benchmarks.gaussian_processes.botorch_models
import benchmarks.gaussian_processes.steps
import benchmarks.kan.layers
import benchmarks.kron.drawn
import benchmarks.kron.first_call
import benchmarks.kron.function
import benchmarks.kron.hadamard
import benchmarks.kron.identity
import benchmarks.kron.modes
import benchmarks.kron.products
import benchmarks.kron.quantize
import benchmarks.kron.quantum
import benchmarks.kron.rotate
import benchmarks.kron.solve
import benchmarks.rational.activations
import benchmarks.rational.cpu
import benchmarks.rational.kat
import benchmarks.rational.layers  # noqa: F401
from benchmarks.registry import Benchmark, registered


def all_benchmarks() -> dict[str, Benchmark]:
    """Every benchmark by name."""
    return registered()
