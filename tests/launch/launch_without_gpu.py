"""Make calls on a machine without a GPU, as if it had an H100, and print what would have been launched, as JSON.

Everything up to the driver is real: plan, compilation, the launcher's arguments. The driver writes down what it is given.
Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import fastkron_py
from fastkron_py.kron import operator
from fastkron_py.runtime import backend
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.gpu import HOPPER

LAUNCHES: list[dict[str, Any]] = []
BUILT: list[str] = []  # operators whose program was built
CURRENT = {"device": 0, "stream": 11}


def plain(argument: Any) -> Any:
    """A launcher's argument as the driver would see it: a tensor is its address."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, tuple):
        return [plain(a) for a in argument]
    return argument if isinstance(argument, int | str) else repr(argument)


class H100:
    """A driver that loads and launches nothing."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

        @staticmethod
        def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
            return 0, 1, 32, 0, 1024

    class launcher_cls:
        def __init__(self, src: Any, metadata: Any) -> None:
            self.names = src.fn.arg_names
            self.count = len(self.names)

        def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            arguments = rest[-self.count :]
            launch = {"grid": [x, y, z], "stream": stream, "tensors": has_tensors(arguments), "arguments": plain(arguments)}
            LAUNCHES.append(launch | {"names": self.names})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return CURRENT["device"]

    def get_current_stream(self, device: int) -> int:
        return CURRENT["stream"] + 100 * device


class Entered:
    """Stands for `torch.cuda.device`."""

    def __init__(self, device: int) -> None:
        self.other = device

    def __enter__(self) -> None:
        CURRENT["device"], self.other = self.other, CURRENT["device"]

    def __exit__(self, *_: object) -> None:
        CURRENT["device"] = self.other


def note_programs(declared: Any) -> None:
    """Let `BUILT` have an operator's name for each program that is built for it from now on."""
    build = declared._build

    def noted(*arguments: Any) -> Any:
        BUILT.append(declared.name)
        return build(*arguments)

    declared._build = noted


def has_tensors(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) or (isinstance(argument, tuple) and any(map(has_tensors, argument)))


def launched(call: Any) -> list[dict[str, Any]]:
    """The launches of a call."""
    LAUNCHES.clear()
    call()
    return list(LAUNCHES)


def main() -> None:
    driver.set_active(H100())
    torch.cuda.device = Entered  # type: ignore[assignment, misc]
    for declared in (operator.kron_matmul, operator.kron_matmul_backward):
        note_programs(declared)
    devices.gpu_of = lambda device: replace(HOPPER, has_wgmma=False)
    backend.triton_obstacle = lambda x: None  # a tensor on the CPU stands for one on the GPU
    x, factors = torch.randn(1, 32**4), [torch.randn(32, 32) for _ in range(4)]
    operands = [x.data_ptr(), *(f.data_ptr() for f in factors)]
    shifted = torch.randn(32**4 + 1)[1:].view(1, 32**4)
    found: dict[str, Any] = {"operands": operands}
    with fastkron_py.backend("triton"):
        found["first"] = launched(lambda: fastkron_py.kron_matmul(x, factors))
        CACHE.forget()
        found["built again"] = launched(lambda: fastkron_py.kron_matmul(x, factors))
        found["cached"] = launched(lambda: fastkron_py.kron_matmul(x, factors))
        found["programs"] = len(BUILT)
        CURRENT["stream"] = 12
        found["on another stream"] = launched(lambda: fastkron_py.kron_matmul(x, factors))
        found["unaligned"] = launched(lambda: fastkron_py.kron_matmul(shifted, factors))
        found["shifted"] = shifted.data_ptr()
        CURRENT["device"] = 1
        found["on another current device"] = launched(lambda: fastkron_py.kron_matmul(x, factors))
        found["current device"] = CURRENT["device"]
        CURRENT["device"] = 0
        found["scaled"] = launched(lambda: fastkron_py.kron_matmul(x, factors, alpha=3.0))
        found["scaled again"] = launched(lambda: fastkron_py.kron_matmul(x, factors, alpha=-5.0))
    found["backward"] = backward()
    print(json.dumps(found))


def backward() -> dict[str, Any]:
    """Launches of the same backward pass: the first one's, those of a program built again, and cached; for several problems."""
    found: dict[str, Any] = {}
    with fastkron_py.backend("triton"):
        for rows, sizes in ((512, (64, 64)), (20, (8, 8, 8)), (300, (32, 32, 32)), (64, (128, 16))):
            width = math.prod(sizes)
            x, dy = torch.randn(rows, width, requires_grad=True), torch.randn(rows, width)
            factors = [torch.randn(p, p, requires_grad=True) for p in sizes]
            ways: dict[str, Any] = {}
            BUILT.clear()
            for way in ("first", "built again", "cached"):
                y = fastkron_py.kron_matmul(x, factors)
                ways[way] = launched(functools.partial(torch.autograd.grad, y, [x, *factors], dy))
                if way == "first":
                    CACHE.forget()
            ways["programs"] = BUILT.count("kron_matmul_backward")
            ways["operands"] = [t.data_ptr() for t in (dy, x, *factors)]
            found[f"{rows} x {sizes}"] = ways
    return found


if __name__ == "__main__":
    main()
