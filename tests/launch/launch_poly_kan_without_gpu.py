"""What polynomial KAN layers hand to the driver on a machine without a GPU, as if it had an H100, as JSON.

Memory is never given back, so that an address stands for one tensor. Run in a process of its own, without TRITON_INTERPRET: Triton
decides at import.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from launch_gemm_without_gpu import Driver, print_nothing
from launch_without_gpu import BUILT, CURRENT, launched, note_programs
from triton import knobs
from triton.runtime import driver

import fastkron_py
from fastkron_py.kan import operator
from fastkron_py.runtime import backend, builder
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.gpu import HOPPER

KEPT: list[torch.Tensor] = []
_ADDRESS = 1 << 26  # integers from here on are places in memory, but for one; small tensors may lie low, in the heap
_ONE = 0x3FF0000000000000  # the number 1, as kernels get it


class H100(Driver):
    """Tensors are on the CPU, whose device has no number: they stand for some on the current GPU."""

    def get_current_stream(self, device: int) -> int:
        return super().get_current_stream(max(device, 0))


def keeping(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same, of tensors that stay."""

    def call(*arguments: Any, **options: Any) -> torch.Tensor:
        KEPT.append(make(*arguments, **options))
        return KEPT[-1]

    return call


def apart(buffers: Sequence[tuple[int, Any]]) -> tuple[list[int], int]:
    """Offsets for a program's buffers, which share no memory."""
    offsets = list(itertools.accumulate([-(-size // 512) * 512 for size, _ in buffers], initial=0))
    return offsets[:-1], offsets[-1]


def named(launches: list[dict[str, Any]], given: dict[str, torch.Tensor]) -> list[Any]:
    """Launches with names for places in memory: those given, and "0", "1", ... in the order in which they are first named."""
    names = {t.data_ptr(): name for name, t in given.items()}

    def name(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [name(v) for v in value]
        is_place = isinstance(value, int) and value >= _ADDRESS and value != _ONE
        return names.setdefault(value, str(len(names) - len(given))) if is_place else value

    return [[launch["grid"], name(launch["encoded"]), name(launch["arguments"])] for launch in launches]


def ways(case: tuple[Any, ...]) -> dict[str, Any]:
    """Launches of a forward and a backward pass: of the first call, of one whose programs are built again, and of cached calls."""
    rows, num_in, num_out, degree, dtype, precision, has_bias = case
    given = {
        "x": torch.empty(rows, num_in, dtype=dtype, requires_grad=True),
        "coefficients": torch.empty(degree + 1, num_out, num_in, dtype=dtype, requires_grad=True),
        "dy": torch.empty(rows, num_out, dtype=dtype),
    }
    if has_bias:
        given["bias"] = torch.empty(num_out, dtype=dtype, requires_grad=True)
    found: dict[str, Any] = {"built": {}}

    def both(way: str) -> None:
        x, c, bias, dy = (given.get(name) for name in ("x", "coefficients", "bias", "dy"))
        wanted = [t for t in (x, c, bias) if t is not None]
        BUILT.clear()
        forward = launched(lambda: KEPT.append(fastkron_py.poly_kan(x, c, bias=bias, precision=precision)))
        backward = launched(functools.partial(torch.autograd.grad, KEPT[-1], wanted, dy))
        found[way] = {"forward": named(forward, given), "backward": named(backward, given)}
        found["built"][way] = list(BUILT)

    both("through the JIT functions")
    CACHE.forget()
    both("built again")
    both("cached")
    CURRENT["stream"] = 12
    both("on another stream")
    CURRENT["stream"] = 11
    hook = knobs.runtime.launch_enter_hook
    if hasattr(hook, "add"):
        hook.add(print_nothing)
        both("watched")
        hook.remove(print_nothing)
    both("cached again")
    return found


CASES = {
    "bfloat16": (8448, 768, 512, 8, torch.bfloat16, None, False),
    "TF32, with bias": (8446, 768, 512, 8, torch.float32, "high", True),
    "three passes": (4098, 512, 512, 8, torch.float32, "highest", False),
    "small, with bias": (64, 256, 512, 15, torch.float32, "highest", True),
}


def main() -> None:
    driver.set_active(H100())  # type: ignore[no-untyped-call]
    devices.gpu_of = lambda device: HOPPER  # type: ignore[assignment]
    builder._places = apart  # type: ignore[assignment]
    backend.triton_obstacle = lambda x: None  # a tensor on the CPU stands for one on the GPU
    for declared in (operator.poly_kan, operator.poly_kan_backward):
        note_programs(declared)
    torch.empty, torch.empty_like, torch.Tensor.new_empty = map(keeping, (torch.empty, torch.empty_like, torch.Tensor.new_empty))  # type: ignore[assignment]
    with fastkron_py.backend("triton"):
        found = {name: ways(case) for name, case in CASES.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
