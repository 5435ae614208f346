"""Launchers of the Triton kernels: canonical operands in, a plan carried out, canonical results out."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from fastkron_py.kernels.factor_gradient import _factor_gradient_kernel
from fastkron_py.kernels.precision import resolved
from fastkron_py.kernels.recipes import Case, Rows, arithmetic, recipes
from fastkron_py.tuning.launch import gradient_config
from fastkron_py.tuning.plan import Launch, plan

# Programs to start where there are no multiprocessors: Triton's interpreter.
_INTERPRETED_PROGRAMS: Final = 2

# Which of a case's recipes its device has room for, once one has not fitted.
_fitting: dict[tuple[Case, torch.device], int] = {}


def _bits(value: float) -> int:
    """The float64 pattern of a scalar, as the kernels' int64 argument."""
    pattern: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return pattern


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on_device(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device; make it the tensor's."""
    if t.device.type != "cuda" or t.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(t.device)


def _mergeable(t: Tensor) -> Tensor:
    """Return t ``[B, L, n, R]`` itself if (n, R) is one run of memory, else a copy."""
    _, _, n, columns = t.shape
    inner = columns == 1 or t.stride(3) == 1
    outer = n == 1 or t.stride(2) == columns
    return t if inner and outer else t.contiguous()


class _Operand(NamedTuple):
    """An operand ``[B, L, n, R]`` and its strides."""

    tensor: Tensor
    rows: Rows


def _operand(t: Tensor) -> _Operand:
    """A tensor of which (n, R) is one run of memory."""
    return _Operand(t, Rows(t.stride(0), t.stride(1), 1))


def _addend(z: Tensor) -> _Operand:
    """Describe z, of any strides: broadcast rows and columns are read in place where (n, R) has a constant stride."""
    _, _, n, columns = z.shape
    if columns == 1:
        return _Operand(z, Rows(z.stride(0), z.stride(1), z.stride(2) if n > 1 else 0))
    if n == 1 or z.stride(2) == columns * z.stride(3):
        return _Operand(z, Rows(z.stride(0), z.stride(1), z.stride(3)))
    return _operand(z.contiguous())


def _run(
    launch: Launch,
    x: _Operand,
    factors: Sequence[Tensor],
    y: _Operand,
    z: _Operand | None,
    shape: tuple[int, int, int, int],
    turn: bool,
    alpha: float,
    beta: float,
    precision: str,
) -> None:
    """Carry out one launch; shape and turn as in `recipes.Case`."""
    mine = factors[launch.start : launch.stop]
    addend = y if z is None else z
    device = x.tensor.device
    case = Case(
        launch,
        x.tensor.dtype,
        precision,
        "axpby" if z is not None else "plain" if alpha == 1 else "scale",
        shape,
        turn,
        x.rows,
        y.rows,
        addend.rows,
        tuple((f.shape[1], f.shape[2]) for f in mine),
        tuple((f.stride(0) if shape[0] > 1 else 0, f.stride(1), f.stride(2)) for f in mine),
        _multiprocessors(device),
    )
    ways = recipes(case)
    first = _fitting.get((case, device), 0) if _fitting else 0
    for i, (kernel, grid, arguments) in enumerate(ways[first:], start=first):
        try:
            kernel[grid](
                x_ptr=x.tensor,
                factor_ptrs=tuple(mine),
                z_ptr=addend.tensor,
                y_ptr=y.tensor,
                alpha=_bits(alpha),
                beta=_bits(beta),
                **arguments,
            )
        except OutOfResources:
            if i + 1 == len(ways):
                raise
            _fitting[case, device] = i + 1
        else:
            return


def _carry_out(
    launches: Sequence[Launch],
    x: Tensor,
    factors: Sequence[Tensor],
    z: Tensor | None,
    alpha: float,
    beta: float,
    precision: str,
    sizes: list[int],
) -> Tensor:
    """Run launches over x ``[B, L, K, R]``; sizes, the current width of each mode, is updated.

    A run over all modes from last to first turns each launch's modes to the front, which reads whole runs of
    memory and leaves them in order at the end; other runs multiply in place.
    """
    groups, rows, _, columns = x.shape
    turn = columns == 1 and _covers_backwards(launches, len(factors))
    current = _operand(_mergeable(x))
    for i, launch in enumerate(launches):
        before = math.prod(sizes[: launch.start])
        after = math.prod(sizes[launch.stop :]) * columns
        if turn:
            before, after = before * after, 1
        y = torch.empty((groups, rows, before * launch.q * after // columns, columns), dtype=x.dtype, device=x.device)
        final = i == len(launches) - 1
        _run(
            launch,
            current,
            factors,
            _operand(y),
            _addend(z) if final and z is not None else None,
            (groups, rows, before, after),
            turn and before > 1,
            alpha if final else 1.0,
            beta if final else 0.0,
            precision,
        )
        for s in launch.steps:
            sizes[s.start : s.stop] = [f.shape[2] for f in factors[s.start : s.stop]]
        current = _operand(y)
    return current.tensor


def _covers_backwards(launches: Sequence[Launch], count: int) -> bool:
    """Whether launches run through all of count factors from the last to the first."""
    for launch in launches:
        if launch.stop != count:
            return False
        count = launch.start
    return count == 0


def _plan_for(x: Tensor, factors: Sequence[Tensor]) -> tuple[Launch, ...]:
    ps = tuple(f.shape[1] for f in factors)
    qs = tuple(f.shape[2] for f in factors)
    return plan(ps, qs, x.element_size(), x.shape[0] * x.shape[1], x.shape[3])


def multiply(x: Tensor, factors: Sequence[Tensor], z: Tensor | None, alpha: float, beta: float, precision: str | None) -> Tensor:
    """``alpha * x (F1 (x) ... (x) FN) + beta * z`` on the GPU (or interpreted).

    Args:
        x: ``[B, L, K, R]``, not empty.
        factors: ``[B, P_i, Q_i]``, any strides.
        z: ``[B, L, N, R]``, any strides, or None.
        alpha: scales the product.
        beta: scales z.
        precision: ``"highest"``, ``"high"``, ``"medium"`` or None for torch's setting.

    Returns:
        ``[B, L, N, R]``, contiguous.
    """
    with _on_device(x):
        return _carry_out(_plan_for(x, factors), x, factors, z, alpha, beta, resolved(precision), [f.shape[1] for f in factors])


def _factor_gradient(u: Tensor, v: Tensor, p: int, q: int, before: int, after: int, alpha: float, precision: str) -> Tensor:
    """``[B, p, q]``: alpha times the sum over rows, before and after of u ``[B, L, before * p * after]`` and v alike."""
    groups, rows = u.shape[:2]
    um, vm = _operand(_mergeable(u)), _operand(_mergeable(v))
    merged = before != 1 and um.rows.row == before * p * after and vm.rows.row == before * q * after
    num_slices = rows * before * after
    compute, acc, dot_precision = arithmetic(u.dtype, precision, True)
    config = gradient_config(p, q, u.element_size(), num_slices, groups, _multiprocessors(u.device))
    partial = torch.empty((config.splits, groups, p, q), dtype=torch.promote_types(u.dtype, torch.float32), device=u.device)
    blocks = math.ceil(p / config.block_p) * math.ceil(q / config.block_q)
    grid = (blocks * groups * config.splits,)
    for num_stages in (config.num_stages, 1):
        try:
            _factor_gradient_kernel[grid](
                um.tensor,
                vm.tensor,
                partial,
                um.rows.in_place(p, after, merged),
                vm.rows.in_place(q, after, merged),
                num_slices,
                config.slices_per_split,
                groups,
                before,
                after,
                P=p,
                Q=q,
                BLOCK_S=config.block_s,
                BLOCK_P=config.block_p,
                BLOCK_Q=config.block_q,
                HEAD=not merged and before != 1,
                TAIL=after != 1,
                ALIGNED=after % config.block_s == 0,
                EVEN=num_slices % config.slices_per_split == 0,
                COMPUTE=compute,
                ACC=acc,
                PRECISION=dot_precision,
                num_warps=config.num_warps,
                num_stages=num_stages,
            )
        except OutOfResources:
            if num_stages == 1:
                raise
        else:
            break
    total = partial[0] if config.splits == 1 else partial.sum(0)
    return (total if alpha == 1 else total * alpha).to(u.dtype)


def backward(
    dy: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    alpha: float,
    need_x: bool,
    need_factors: Sequence[bool],
    precision: str | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of ``alpha * x (F1 (x) ... (x) FN)``.

    Args:
        dy: ``[B, L, N, R]``.
        x: ``[B, L, K, R]``.
        factors: ``[B, P_i, Q_i]``.
        alpha: scale of the product.
        need_x: whether dx is wanted.
        need_factors: which factor gradients are wanted.
        precision: as in `multiply`.

    Returns:
        dx ``[B, L, K, R]`` or None, and each dF_i ``[B, P_i, Q_i]`` or None.
    """
    with _on_device(x):
        precision = resolved(precision)
        gradients: list[Tensor | None] = [None] * len(factors)
        wanted = [i for i, need in enumerate(need_factors) if need]
        transposed = [f.mT for f in factors]
        if not wanted:
            return (multiply(dy, transposed, None, alpha, 0.0, precision) if need_x else None), gradients
        inputs = _inputs(x, factors, wanted, precision)
        ps = [f.shape[1] for f in factors]
        sizes = [f.shape[2] for f in factors]
        g = dy
        done = 0  # modes of g before this one have been multiplied back
        for i in wanted:
            if i > done:
                g = _carry_out(_segment(g, transposed, done, i), g, transposed, None, 1.0, 0.0, precision, sizes)
                done = i
            before, after = math.prod(ps[:i]), math.prod(sizes[i + 1 :]) * x.shape[3]
            gradients[i] = _factor_gradient(inputs.pop(i), g, ps[i], sizes[i], before, after, alpha, precision)
        if need_x:
            g = _carry_out(_segment(g, transposed, done, len(factors)), g, transposed, None, alpha, 0.0, precision, sizes)
        return (g if need_x else None), gradients


def _inputs(x: Tensor, factors: Sequence[Tensor], wanted: Sequence[int], precision: str) -> dict[int, Tensor]:
    """For each wanted i, x with the factors after i applied."""
    inputs: dict[int, Tensor] = {}
    sizes = [f.shape[1] for f in factors]
    u, done = x, len(factors)
    for i in reversed(wanted):
        if i + 1 < done:
            u = _carry_out(_segment(u, factors, i + 1, done), u, factors, None, 1.0, 0.0, precision, sizes)
            done = i + 1
        inputs[i] = u
    return inputs


def _segment(x: Tensor, factors: Sequence[Tensor], start: int, stop: int) -> tuple[Launch, ...]:
    """A plan for factors start to stop only, in the numbering of all."""
    ps = tuple(f.shape[1] for f in factors[start:stop])
    qs = tuple(f.shape[2] for f in factors[start:stop])
    tail = math.prod(f.shape[1] for f in factors[stop:]) * x.shape[3]
    return tuple(launch.shifted(start) for launch in plan(ps, qs, x.element_size(), x.shape[0] * x.shape[1], tail))
