"""Launchers of the rational kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fastkron_py.rational.config import BACKWARD, FORWARD, Preference, Runs, Walk, find_runs, walk
from fastkron_py.rational.kernels.elementwise import _rational_bwd_kernel, _rational_coefficients_kernel, _rational_fwd_kernel
from fastkron_py.runtime.device import has_approximations, multiprocessor_count, on_device
from fastkron_py.runtime.launch import LaunchConfig, Launcher
from fastkron_py.runtime.program import Replay, Tape

SUM_BLOCK: Final = 4096  # partial sums that a program of the second stage loads at once: few waits for memory


def is_approximate(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU's one-instruction reciprocal does, whose error is one unit in the last place of float32."""
    return dtype != torch.float64 and has_approximations(device)


class Coefficients(NamedTuple):
    """What a launch depends on of a rational function, but for the addresses."""

    a_shape: tuple[int, ...]
    a_strides: tuple[int, ...]
    b_shape: tuple[int, ...]
    b_strides: tuple[int, ...]
    version: str
    dtype: torch.dtype  # that it is computed in
    device: torch.device

    @property
    def terms(self) -> int:
        """Coefficients of a group."""
        return self.a_shape[1] + self.b_shape[1]

    def arguments(self) -> dict[str, Any]:
        """What every kernel takes that evaluates the function, by name."""
        return {
            "stride_ag": self.a_strides[0] if self.a_shape[0] > 1 else 0,
            "stride_ai": self.a_strides[1],
            "stride_bg": self.b_strides[0] if self.b_shape[0] > 1 else 0,
            "stride_bj": self.b_strides[1],
            "A_COUNT": self.a_shape[1],
            "B_COUNT": self.b_shape[1],
            "VERSION": self.version,
            "APPROXIMATE": is_approximate(self.dtype, self.device),
            "DTYPE": tl.float64 if self.dtype == torch.float64 else tl.float32,
        }

    def sums(self, count: int, block: int, num_warps: int) -> Launcher:
        """The second stage of the coefficients' gradients: count partial sums of each, block of them at a time."""
        arguments = {
            "stride_bg": self.b_strides[0],
            "stride_bj": self.b_strides[1],
            "count": count,
            "A_GROUPS": self.a_shape[0],
            "B_GROUPS": self.b_shape[0],
            "A_COUNT": self.a_shape[1],
            "B_COUNT": self.b_shape[1],
            "VERSION": self.version,
            "BLOCK": block,
            "num_warps": num_warps,
        }
        grid = (self.a_shape[0] * self.a_shape[1] + self.b_shape[0] * self.b_shape[1],)
        return Launcher([LaunchConfig(_rational_coefficients_kernel, grid, arguments)])


def coefficients(a: Tensor, b: Tensor, version: str, dtypes: Sequence[torch.dtype]) -> Coefficients:
    """Those of a and b, computed in float64 where any operand has it."""
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return Coefficients(tuple(a.shape), a.stride(), tuple(b.shape), b.stride(), version, dtype, a.device)


class _Kind(NamedTuple):
    """All that a launch depends on, but for the addresses."""

    runs: Runs
    function: Coefficients
    dtypes: tuple[torch.dtype, ...]  # of tensors of x's shape, and of the coefficients
    need_x: bool = True
    need_coefficients: bool = True


def common_arguments(kind: _Kind, chosen: Walk) -> dict[str, Any]:
    """The arguments that the forward and the backward kernel share, by name."""
    step = chosen.phases * chosen.block
    return {
        **kind.function.arguments(),
        "total": chosen.total,
        "per_run": chosen.per_run,
        "phases": chosen.phases,
        "iterations": chosen.iterations,
        "short": chosen.short,
        "long_chunks": chosen.long_chunks,
        "rows_per_period": 0 if chosen.mode == "flat" else step // chosen.per_run,
        "GROUPS": kind.runs.groups,
        "VECTOR": chosen.vector,
        "BLOCK": chosen.block,
        "MODE": chosen.mode,
        "MASKED": chosen.masked,
        "num_warps": chosen.num_warps,
    }


def _chosen(kind: _Kind, preference: Preference) -> Walk:
    itemsize = max(d.itemsize for d in kind.dtypes[: len(kind.runs.row_strides)])
    return walk(kind.runs, itemsize, multiprocessor_count(kind.function.device), preference)


class _Forward:
    """The launch of one kind of forward pass."""

    def __init__(self, kind: _Kind, preference: Preference = FORWARD) -> None:
        chosen = _chosen(kind, preference)
        stride_x, stride_y = kind.runs.row_strides
        arguments = {"stride_x": stride_x, "stride_y": stride_y, **common_arguments(kind, chosen)}
        self.launch = Launcher([LaunchConfig(_rational_fwd_kernel, (chosen.programs * kind.runs.groups,), arguments)])

    def run(self, x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> None:
        """Write y."""
        self.launch(x, a, b, y)


class _Backward:
    """The launches of one kind of backward pass."""

    def __init__(self, kind: _Kind, preference: Preference = BACKWARD) -> None:
        chosen = _chosen(kind, preference)
        stride_x, stride_dy, stride_dx = kind.runs.row_strides
        arguments = {
            **{"stride_x": stride_x, "stride_dy": stride_dy, "stride_dx": stride_dx},
            **common_arguments(kind, chosen),
            "SAME_STRIDES": stride_x == stride_dy == stride_dx,
            "NEED_X": kind.need_x,
            "NEED_COEFFICIENTS": kind.need_coefficients,
            "WARPS": chosen.num_warps,
        }
        groups = kind.runs.groups
        self.launch = Launcher([LaunchConfig(_rational_bwd_kernel, (chosen.programs * groups,), arguments)])
        self.count = chosen.programs * groups * chosen.num_warps
        self.dtype = kind.function.dtype
        self.size = self.count * kind.function.terms
        self.sum = kind.function.sums(self.count, SUM_BLOCK, 8)

    def run(self, dy: Tensor, x: Tensor, a: Tensor, b: Tensor, dx: Tensor | None, sums: tuple[Tensor, Tensor] | None) -> None:
        """Write dx and (da, db), as far as they are given."""
        partial = x if sums is None else torch.empty(self.size, dtype=self.dtype, device=x.device)
        self.launch(x, dy, a, b, x if dx is None else dx, partial)
        if sums is not None:
            self.sum(partial, b, *sums)


_forward = lru_cache(maxsize=1024)(_Forward)
_backward = lru_cache(maxsize=1024)(_Backward)


def _kind(tensors: list[Tensor], a: Tensor, b: Tensor, version: str, *needs: bool) -> _Kind | None:
    """What a launch on tensors of x's shape depends on; None where they are not made of runs."""
    x = tensors[0]
    runs = find_runs(x.shape, [t.stride() for t in tensors], max(a.shape[0], b.shape[0]))
    if runs is None:
        return None
    dtypes = (*[t.dtype for t in tensors], a.dtype, b.dtype)
    return _Kind(runs, coefficients(a, b, version, dtypes), dtypes, *needs)


def forward(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype) -> Tensor:
    """``y = P(x) / Q(x)`` in this dtype, with x's strides where x has no gaps.

    Args:
        x: ``[..., C]``, not empty; copied where its strides are neither dense nor those of sliced rows.
        a: ``[G, m + 1]`` or ``[1, m + 1]``.
        b: ``[G, n]`` or ``[1, n]``; of version C with b_0 first.
        version: "A", "B", "C" or "N".
        dtype: of y.
    """
    y = torch.empty_like(x, dtype=dtype)
    kind = _kind([x, y], a, b, version)
    if kind is None:
        x = torch.empty_like(y, dtype=x.dtype).copy_(x)
        kind = _kind([x, y], a, b, version)
    if kind is None:  # dimensions of odd orders, such as channels between which others lie in part
        return torch.empty_like(y).copy_(forward(x.contiguous(), a, b, version, dtype))
    with on_device(x):
        _forward(kind).run(x, a, b, y)
    return y


def backward(
    dy: Tensor, x: Tensor, a: Tensor, b: Tensor, version: str, need_x: bool, need_coefficients: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, da, db) from one pass over x and dy, those that are needed; arguments as in `forward`, dy of y's shape and dtype."""
    dx = torch.empty_like(x) if need_x else None
    model = dx if dx is not None else torch.empty_like(x, device="meta")
    needs = need_x, need_coefficients
    kind = _kind([x, dy, model], a, b, version, *needs)
    if kind is None:
        # First of all as dx lies, which is without gaps.
        x, dy = (t if t.stride() == model.stride() else _like(model, t) for t in (x, dy))
        kind = _kind([x, dy, model], a, b, version, *needs)
    if kind is None:
        made, da, db = backward(dy.contiguous(), x.contiguous(), a, b, version, *needs)
        return (None if dx is None or made is None else dx.copy_(made)), da, db
    da = db = None
    if need_coefficients:
        da, db = torch.empty(a.shape, dtype=a.dtype, device=a.device), torch.empty(b.shape, dtype=b.dtype, device=b.device)
    with on_device(x):
        _backward(kind).run(dy, x, a, b, dx, None if da is None or db is None else (da, db))
    return dx, da, db


def replay(x: Tensor, a: Tensor, b: Tensor, version: str, dtype: torch.dtype) -> Replay | None:
    """`forward` on (x, a, b) like these, ready to be repeated; None where it copies, or y does not lie contiguously."""
    y = torch.empty_like(x, dtype=dtype, device="meta")
    kind = _kind([x, y], a, b, version)
    if kind is None or not y.is_contiguous():
        return None
    with on_device(x):
        tape = Tape((x, a, b))
        slot = tape.buffer(x.shape, dtype)
        tape.launch(_forward(kind).launch, (0, 1, 2, slot), ())
        return Replay(tape, [slot], [x.shape])


def replay_backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, version: str, need_x: bool, need_coefficients: bool) -> Replay | None:
    """`backward` on (dy, x, a, b) like these, ready to be repeated, with those results that are needed; None likewise."""
    dx = torch.empty_like(x, device="meta")
    kind = _kind([x, dy, dx], a, b, version, need_x, need_coefficients)
    if kind is None or not dx.is_contiguous():
        return None
    with on_device(x):
        launches = _backward(kind)
        tape = Tape((dy, x, a, b))
        results = [tape.buffer(x.shape, x.dtype)] if need_x else []
        of_dx = results[0] if need_x else 1
        if need_coefficients:
            partial = tape.buffer((launches.size,), launches.dtype)
            sums = [tape.buffer(c.shape, c.dtype) for c in (a, b)]
            tape.launch(launches.launch, (1, 0, 2, 3, of_dx, partial), ())
            tape.launch(launches.sum, (partial, 3, *sums), ())
            results += sums
        else:
            tape.launch(launches.launch, (1, 0, 2, 3, of_dx, 1), ())
        return Replay(tape, results, [tape.buffers[slot - tape.given].shape for slot in results])


def _like(model: Tensor, t: Tensor) -> Tensor:
    """A copy that lies as the model does."""
    return torch.empty_strided(model.shape, model.stride(), dtype=t.dtype, device=t.device).copy_(t)
