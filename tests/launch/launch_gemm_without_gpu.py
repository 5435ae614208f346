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
from launch_without_gpu import H100, LAUNCHES, launched, plain
from triton import knobs
from triton.runtime import driver

import fastkron_py
from fastkron_py.functional import gated_mlp
from fastkron_py.gated import cached as recorded_gated
from fastkron_py.rational import cached_linear as recorded_linear_rational
from fastkron_py.rational import gemm_launch as rational_gemm_launch
from fastkron_py.rational import launches as triton_rational
from fastkron_py.rational import operator_linear_rational as rational_operator
from fastkron_py.rational.api import linear_rational
from fastkron_py.runtime import backend
from fastkron_py.tiling import gemm_launch
from fastkron_py.tiling import gemm_problem as gemm_kind

ENCODED: list[Any] = []
SERVED: list[bool] = []  # of the calls that were looked up


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
            LAUNCHES.append({"grid": given[:4], "arguments": plain(tuple(arguments)), "encoded": list(ENCODED), "early": self.early})
            ENCODED.clear()


def seen(module: Any) -> None:
    """Write down whether a record serves a call."""
    inner = module.replay

    def replay(*arguments: Any) -> Any:
        y = inner(*arguments)
        SERVED.append(y is not None)
        return y

    module.replay = replay


def ways(call: Callable[[], Any]) -> dict[str, Any]:
    """Launches through the JIT function, the long way with the compiled kernel, and repeated."""
    found: dict[str, Any] = {"served": []}
    for way in ("first", "compiled", "repeated"):
        if way != "repeated":
            recorded_gated.RECORDS.forget()
            recorded_linear_rational.RECORDS.forget()
        SERVED.clear()
        found[way] = launched(call)
        found["served"].append(any(SERVED))
    return found


def gradients(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Any]:
    """Launches of a backward pass that multiplies once more: the long way, when it is recorded, and repeated."""
    dy = torch.randn(*x.shape[:-1], weight.shape[0] // 2, dtype=x.dtype)
    recorded: list[bool] = []
    inner = recorded_gated._Pass._first

    def first(*arguments: Any) -> Any:
        recorded.append(True)
        return inner(*arguments)

    recorded_gated._Pass._first = first  # type: ignore[method-assign]
    recorded_gated.RECORDS.forget()
    found: dict[str, Any] = {"served": []}
    for way in ("first", "compiled", "repeated"):
        y = fastkron_py.gated_linear(x, weight, backward="recompute")
        recorded.clear()
        found[way] = launched(lambda y=y: torch.autograd.grad(y, weight, dy))
        found["served"].append(way == "repeated" and not recorded)
    recorded_gated._Pass._first = inner  # type: ignore[method-assign]
    return found


def direct() -> dict[str, int]:
    """How many launches go past Triton's front door: of repeated ones, and where that must not be."""
    x, weight = torch.randn(33, 64, dtype=torch.bfloat16), torch.randn(256, 64, dtype=torch.bfloat16)
    biases = torch.randn(260, dtype=torch.bfloat16)
    count = [0]
    inner = gemm_launch.Plan._again

    def again(*arguments: Any) -> bool:
        done = inner(*arguments)
        count[0] += done
        return done

    def counted(first: int) -> int:
        count[0] = 0
        LAUNCHES.clear()
        fastkron_py.gated_linear(x, weight, bias=biases[first : first + 256])
        assert len(LAUNCHES) == 1
        return count[0]

    gemm_launch.Plan._again = again  # type: ignore[method-assign]
    try:
        counted(0)
        found = {"repeated": counted(0), "unaligned bias": counted(1)}
        hook = knobs.runtime.launch_enter_hook
        if hasattr(hook, "add"):
            hook.add(print_nothing)
            found["watched"] = counted(0)
            hook.remove(print_nothing)
        return found | {"repeated again": counted(0)}
    finally:
        gemm_launch.Plan._again = inner  # type: ignore[method-assign]


def print_nothing(metadata: Any) -> None:
    """A profiler."""


def main() -> None:
    driver.set_active(Driver())  # type: ignore[no-untyped-call]
    for module in (gemm_kind, rational_gemm_launch, triton_rational):
        module.multiprocessor_count = lambda device: 132  # type: ignore[attr-defined]
    gemm_kind.has_overlap = lambda device: True  # type: ignore[assignment]
    backend.triton_obstacle = lambda x: None  # a tensor on the CPU stands for one on the GPU
    for module in (recorded_gated, recorded_linear_rational):
        seen(module)
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
        found = {name: ways(call) for name, call in calls.items()} | {"gradients": gradients(x, learned)}
        print(json.dumps({"given": given, "calls": found, "direct": direct()}))


if __name__ == "__main__":
    main()
