"""What gated and rational linear layers hand to the driver on a machine without a GPU, as if it had an H100, as JSON.

Triton's own launcher takes descriptors apart; what it would encode and launch is written down.
Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import triton.backends.nvidia.driver as nvidia
from launch_without_gpu import H100, LAUNCHES, has_tensors, launched, plain
from triton import knobs
from triton.runtime import driver

import fastkron_py
from fastkron_py.functional import gated_mlp
from fastkron_py.rational import operator as rational_operator
from fastkron_py.rational.api import linear_rational
from fastkron_py.runtime import backend
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.call_cache import CACHE, CallCache, Entry
from fastkron_py.runtime.gpu import HOPPER
from fastkron_py.runtime.operator import Differentiable, Operator

ENCODED: list[Any] = []
SERVED: list[Any] = []  # calls that were found in the cache


def encode(*arguments: Any) -> str:
    """Stands for the driver's encoding of a descriptor."""
    ENCODED.append(plain(tuple([tuple(a) if isinstance(a, list) else a for a in arguments])))
    return "descriptor"


class Driver(H100):
    """With Triton's own handling of descriptors."""

    class utils(H100.utils):
        fill_tma_descriptor = staticmethod(encode)
        fill_tma_descriptor_tiled = staticmethod(encode)

    class launcher_cls:
        def __init__(self, src: Any, metadata: Any) -> None:
            self.launch = nvidia.wrap_handle_tensordesc(self.write_down, dict(src.signature), getattr(metadata, "tensordesc_meta", None))
            # How many arguments come before the kernel's own, and whether those are one tuple.
            self.ahead = getattr(nvidia, "_BASE_ARGS_FORMAT_LEN", None)
            self.early = metadata.launch_pdl

        def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            metadata, arguments = rest[:4], rest[4:]
            grid = (x, y, z, stream)
            if self.ahead is None:
                self.launch(*grid, function, *metadata, arguments)
            else:
                self.launch(*grid, function, *metadata, *(None,) * (self.ahead - 9), *arguments)

        def write_down(self, *given: Any) -> None:
            arguments = given[-1] if self.ahead is None else given[self.ahead :]
            launch = {"grid": given[:4], "arguments": plain(tuple(arguments)), "encoded": list(ENCODED), "early": self.early}
            LAUNCHES.append(launch | {"tensors": has_tensors(tuple(arguments))})
            ENCODED.clear()


def count_served() -> None:
    """Write down the entries of the cache that serve calls, and the backward passes that run an earlier one's program."""
    inner, look_up, reverse = CallCache.find, Operator.entry, Differentiable.reverse

    def find(cache: CallCache, *arguments: Any) -> Entry | None:
        entry = inner(cache, *arguments)
        if entry is not None:
            SERVED.append(entry)
        return entry

    def looked_up(*arguments: Any) -> Entry | None:  # makes no call
        before = list(SERVED)
        entry = look_up(*arguments)
        SERVED[:] = before
        return entry

    def reversed_by(call: Differentiable, *arguments: Any) -> Any:
        found = reverse(call, *arguments)
        if found is not None:
            SERVED.append(found)
        return found

    CallCache.find, Operator.entry = find, looked_up  # type: ignore[method-assign]
    Differentiable.reverse = reversed_by  # type: ignore[method-assign]


def ways(call: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    """Launches of a program's first run, of another program's, and of that one's again; call: what is to be launched, made anew."""
    found: dict[str, Any] = {"served": []}
    for way in ("first", "again", "repeated"):
        if way != "repeated":
            CACHE.forget()
        step = call()
        SERVED.clear()
        found[way] = launched(step)
        found["served"].append(bool(SERVED))
    return found


def gradients(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    """A backward pass that multiplies once more."""
    dy = torch.randn(*x.shape[:-1], weight.shape[0] // 2, dtype=x.dtype)
    y = fastkron_py.gated_linear(x, weight, backward="recompute")
    return lambda: torch.autograd.grad(y, weight, dy)


def direct() -> dict[str, bool]:
    """Whether launches go past Triton's front door, by addresses: of repeated ones, and where that must not be."""
    x, weight = torch.randn(33, 64, dtype=torch.bfloat16), torch.randn(256, 64, dtype=torch.bfloat16)
    biases = torch.randn(260, dtype=torch.bfloat16)

    def by_addresses(first: int) -> bool:
        (launch,) = launched(lambda: fastkron_py.gated_linear(x, weight, bias=biases[first : first + 256]))
        assert len(launch["encoded"]) >= 3, "x, the weight and the result have descriptors, wherever the bias begins"
        return not launch["tensors"]

    found = {"first": by_addresses(0), "repeated": by_addresses(0), "unaligned bias": by_addresses(1)}
    hook = knobs.runtime.launch_enter_hook
    if hasattr(hook, "add"):
        hook.add(print_nothing)
        found["watched"] = by_addresses(0)
        hook.remove(print_nothing)
    return found | {"repeated again": by_addresses(0)}


def print_nothing(metadata: Any) -> None:
    """A profiler."""


def main() -> None:
    driver.set_active(Driver())  # type: ignore[no-untyped-call]
    devices.gpu_of = lambda device: HOPPER  # type: ignore[assignment]
    backend.triton_obstacle = lambda x: None  # a tensor on the CPU stands for one on the GPU
    count_served()
    rational_operator.fuses = lambda *sizes: True
    x, weight = torch.randn(2, 33, 64, dtype=torch.bfloat16), torch.randn(256, 64, dtype=torch.bfloat16)
    bias, down = torch.randn(256, dtype=torch.bfloat16), torch.randn(64, 128, dtype=torch.bfloat16)
    a, b = torch.randn(8, 6), torch.randn(8, 4)
    learned = weight.clone().requires_grad_()
    long_x, long_weight = torch.empty(512, 4096, dtype=torch.bfloat16), torch.empty(28672, 4096, dtype=torch.bfloat16)
    rest = long_weight[25344:]  # what the second launch does, by the closed form
    first, second = sorted([weight[:128].clone(), weight[128:].clone()], key=torch.Tensor.data_ptr)
    calls = {
        "interleaved": lambda: fastkron_py.gated_linear(x, weight),
        "interleaved, with bias": lambda: fastkron_py.gated_linear(x, weight, bias=bias),
        "saving": lambda: fastkron_py.gated_linear(x, learned),
        "saving, stacked": lambda: fastkron_py.gated_linear(x, learned.view(2, 128, 64), layout="stacked"),
        "recomputing": lambda: fastkron_py.gated_linear(x, learned, backward="recompute"),
        "two launches": lambda: fastkron_py.gated_linear(long_x, long_weight),
        "two launches, stacked": lambda: fastkron_py.gated_linear(long_x, long_weight.view(2, 14336, 4096), layout="stacked"),
        "two weights": lambda: fastkron_py.gated_linear(x, (first, second)),
        "two weights, the second one ahead": lambda: fastkron_py.gated_linear(x, (second, first)),
        "two launches, two weights": lambda: fastkron_py.gated_linear(long_x, (long_weight[:14336], long_weight[14336:])),
        "whole": lambda: gated_mlp(x, weight, down),
        "rational": lambda: linear_rational(x, weight, bias, a, b),
        "rational, kept": lambda: linear_rational(x, learned, None, a, b),
    }
    stacked_rest = long_weight[25344 // 2 :]
    given = [t.data_ptr() for t in (x, weight, bias, learned, a, b, first, second, long_x, long_weight, rest, stacked_rest)]
    with fastkron_py.backend("triton"):
        found = {name: ways(lambda call=call: call) for name, call in calls.items()}  # type: ignore[misc]
        found["gradients"] = ways(lambda: gradients(x, learned))
        print(json.dumps({"given": given, "calls": found, "direct": direct()}))


if __name__ == "__main__":
    main()
