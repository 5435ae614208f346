"""A process that imports the library and makes its first call: ``python -m benchmarks.kron.first_call_child PARAMETERS DEVICE``.

PARAMETERS is JSON; one line of JSON comes back, in seconds. Nothing here may import the library before its import is timed.
"""

from __future__ import annotations

import json
import sys
import time

import torch


def main(parameters: str, device_name: str) -> dict[str, float]:
    """Seconds of importing the library after torch, and of the first two calls, results waited for."""
    start = time.perf_counter()
    import fastkron_py

    imported = time.perf_counter() - start
    from benchmarks.kron.problems import check, inputs

    device = torch.device(device_name)
    problem = inputs(json.loads(parameters), device)

    def call() -> tuple[torch.Tensor, float]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        y = fastkron_py.kron_matmul(problem.x, problem.factors)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return y, time.perf_counter() - start

    y, first = call()
    _, second = call()
    return {"import": imported, "first": first, "second": second, "error": check(problem, y)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
