"""What rational calls launch on a machine without a GPU, as if it had an H100, as JSON: at first, cached, and with another Triton.

Run in a process of its own, without TRITON_INTERPRET: Triton decides at import. The argument is the version that Triton says it is.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver


def other_launcher(self: CompiledKernel, grid: Any) -> Any:
    """Triton's way to launch a compiled kernel, with its arguments in another order."""
    return lambda *operands, stream: self.run(self.function, *grid, stream, self.packed_metadata, *operands)


def main() -> None:
    triton.__version__ = sys.argv[1]
    from launch_without_gpu import H100, launched

    import fastkron_py
    from fastkron_py.runtime import backend, launch
    from fastkron_py.runtime import device as devices
    from fastkron_py.runtime.call_cache import CACHE
    from fastkron_py.runtime.gpu import HOPPER

    driver.set_active(H100())
    devices.gpu_of = lambda device: HOPPER  # type: ignore[assignment]
    backend.triton_obstacle = lambda x: None  # a tensor on the CPU stands for one on the GPU
    x, dy = torch.randn(4, 33, 192, dtype=torch.bfloat16, requires_grad=True), torch.randn(4, 33, 192, dtype=torch.bfloat16)
    act = fastkron_py.nn.GroupRational(192)
    operands = [x, act.numerator, act.denominator]
    found: dict[str, Any] = {"operands": [t.data_ptr() for t in (dy, *operands)]}

    def take(name: str) -> None:
        results: list[torch.Tensor] = []
        forward = launched(lambda: results.append(act(x)))
        found[name] = forward + launched(functools.partial(torch.autograd.grad, results[0], operands, dy))

    with fastkron_py.backend("triton"):
        take("first")
        take("cached")
        CompiledKernel.__getitem__ = other_launcher
        launch._obstacles.clear()
        CACHE.forget()
        take("another launcher, first")
        take("another launcher")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
