"""What rational calls launch on a machine without a GPU, as if it had an H100, as JSON: unrecorded, recorded and replayed.

Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from launch_without_gpu import H100, launched
from triton.runtime import driver

import fastkron_py
from fastkron_py.rational import launches as triton_rational
from fastkron_py.runtime import backend


def main() -> None:
    driver.set_active(H100())
    triton_rational.multiprocessor_count = lambda device: 132
    backend.triton_obstacle = lambda x: None  # a tensor on the CPU stands for one on the GPU
    x, dy = torch.randn(4, 33, 192, dtype=torch.bfloat16, requires_grad=True), torch.randn(4, 33, 192, dtype=torch.bfloat16)
    act = fastkron_py.nn.GroupRational(192)
    operands = [x, act.numerator, act.denominator]
    found: dict[str, Any] = {"operands": [t.data_ptr() for t in (dy, *operands)]}
    with fastkron_py.backend("triton"):
        for way in ("unrecorded", "recorded", "replayed"):
            results: list[torch.Tensor] = []
            forward = launched(lambda results=results: results.append(act(x)))
            found[way] = forward + launched(functools.partial(torch.autograd.grad, results[0], operands, dy))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
