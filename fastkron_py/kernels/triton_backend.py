"""Launchers of the Triton kernels: canonical operands in, a plan carried out, canonical results out."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.errors import OutOfResources

from fastkron_py.kernels.factor_gradient import _factor_gradient_kernel
from fastkron_py.kernels.sliced_multiply import (
    _fused_multiply_fwd_kernel,
    _sliced_multiply_fwd_kernel,
    finish_axpby,
    finish_plain,
    finish_scale,
)
from fastkron_py.tuning.launch import chain_configs, gradient_config, single_configs
from fastkron_py.tuning.plan import Launch, plan

_TYPES: Final = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
# Programs to start on a device without multiprocessors: Triton's interpreter.
_INTERPRETED_PROGRAMS: Final = 2


_Strides = tuple[int, int, int, int, int]


class _Arithmetic(NamedTuple):
    """The types and the product's precision inside a kernel."""

    compute: Any  # operands of the products
    acc: Any  # sums, and what the finisher sees
    precision: str  # tl.dot's name


def _arithmetic(dtype: torch.dtype, precision: str | None, exact_operands: bool) -> _Arithmetic:
    """Arithmetic for tensors of dtype.

    exact_operands: both operands of every product are given numbers, not results of earlier steps.
    """
    if dtype == torch.float64:
        return _Arithmetic(tl.float64, tl.float64, "ieee")
    if dtype == torch.float32:
        asked = precision or torch.get_float32_matmul_precision()
        return _Arithmetic(tl.float32, tl.float32, "tf32x3" if asked == "highest" else "tf32")
    if dtype == torch.float16 and not exact_operands:
        # TF32 has float16's mantissa and float32's range: nothing between two steps overflows.
        return _Arithmetic(tl.float32, tl.float32, "tf32")
    emulated = dtype == torch.bfloat16 and knobs.runtime.interpret
    return _Arithmetic(_TYPES[dtype], tl.float32, "emulated" if emulated else "ieee")


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
    """t ``[B, L, n, R]`` itself if (n, R) is one run of memory, else a copy."""
    _, _, n, columns = t.shape
    inner = columns == 1 or t.stride(3) == 1
    outer = n == 1 or t.stride(2) == columns
    return t if inner and outer else t.contiguous()


class _Modes(NamedTuple):
    """An operand ``[B, L, n, R]`` whose last two dimensions are one run of memory with a constant stride."""

    tensor: Tensor
    batch_stride: int
    row_stride: int
    unit: int  # stride of neighbours within a row

    def in_place(self, mode: int, after: int, merged: bool) -> _Strides:
        """Strides of (batch, l, j, mode, a) in ``[B, L, before, mode, after]``; merged: l counts rows and modes before."""
        step = mode * after * self.unit
        return (self.batch_stride, step if merged else self.row_stride, 0 if merged else step, after * self.unit, self.unit)

    def turned(self, others: int) -> _Strides:
        """Strides of (batch, l, j, mode, a) in ``[B, L, mode, others]``, where j counts the others."""
        return (self.batch_stride, self.row_stride, self.unit, others * self.unit, 0)


def _modes(t: Tensor) -> _Modes:
    return _Modes(t, t.stride(0), t.stride(1), 1)


def _z_modes(z: Tensor) -> _Modes:
    """z with any strides: broadcast rows and columns are read in place where (n, R) stays linear."""
    _, _, n, columns = z.shape
    if columns == 1:
        return _Modes(z, z.stride(0), z.stride(1), z.stride(2) if n > 1 else 0)
    if n == 1 or z.stride(2) == columns * z.stride(3):
        return _Modes(z, z.stride(0), z.stride(1), z.stride(3))
    return _modes(z.contiguous())


def _run(
    launch: Launch,
    x: _Modes,
    factors: Sequence[Tensor],
    y: _Modes,
    z: _Modes | None,
    shape: tuple[int, int, int, int],
    turn: bool,
    alpha: float,
    beta: float,
    precision: str | None,
) -> None:
    """Carry out one launch.

    shape: (B, L, before, after) around its modes. turn: the modes, which are the last ones, become the first.
    """
    groups, rows, before, after = shape
    finish = finish_axpby if z is not None else finish_plain if alpha == 1 else finish_scale
    z = y if z is None else z
    if turn:
        merged = False
        x_strides, y_strides, z_strides = x.in_place(launch.p, 1, False), y.turned(before), z.turned(before)
    else:
        pairs = ((x, launch.p), (y, launch.q), (z, launch.q))
        merged = before > 1 and all(m.row_stride == before * size * after * m.unit for m, size in pairs)
        x_strides = x.in_place(launch.p, after, merged)
        y_strides, z_strides = y.in_place(launch.q, after, merged), z.in_place(launch.q, after, merged)
    num_slices = rows * before * after
    fastest = after if after != 1 else before
    chain = len(launch.steps) > 1
    mine = factors[launch.start : launch.stop]
    compute, acc, dot_precision = _arithmetic(x.tensor.dtype, precision, not chain and len(mine) == 1)
    common = {
        "x_ptr": x.tensor,
        "factor_ptrs": tuple(mine),
        "z_ptr": z.tensor,
        "y_ptr": y.tensor,
        "x_strides": x_strides,
        "factor_strides": tuple((f.stride(0) if groups > 1 else 0, f.stride(1), f.stride(2)) for f in mine),
        "z_strides": z_strides,
        "y_strides": y_strides,
        "alpha": _bits(alpha),
        "beta": _bits(beta),
        "num_slices": num_slices,
        "before": before,
        "after": after,
        "SHAPES": tuple((f.shape[1], f.shape[2]) for f in mine),
        "HEAD": not merged and before != 1,
        "TAIL": after != 1,
        "COMPUTE": compute,
        "ACC": acc,
        "PRECISION": dot_precision,
        "FINISH": finish,
    }
    itemsize = x.tensor.element_size()
    programs = _multiprocessors(x.tensor.device)
    if chain:
        for config in chain_configs(launch, itemsize, num_slices, fastest):
            num_tiles = groups * math.ceil(num_slices / config.block_s)
            steps, rest = [], math.prod(s.p_pad for s in launch.steps)
            for s in reversed(launch.steps):
                rest //= s.p_pad
                steps.append((s.start - launch.start, s.stop - launch.start, s.p, s.p_pad, s.q_pad, rest))
                rest *= s.q_pad
            grid = (min(num_tiles, programs * config.programs_per_sm),)
            constants = {
                "STEPS": tuple(steps),
                "P_SIZES": tuple(s.p for s in launch.steps),
                "P_PADS": tuple(s.p_pad for s in launch.steps),
                "P_TOTAL": math.prod(s.p_pad for s in launch.steps),
                "Q_SIZES": tuple(s.q for s in launch.steps),
                "Q_PADS": tuple(s.q_pad for s in launch.steps),
                "Q_TOTAL": math.prod(s.q_pad for s in launch.steps),
                "BLOCK_S": config.block_s,
                "ALIGNED": fastest % config.block_s == 0,
                "EVEN": num_slices % config.block_s == 0,
            }
            if _launched(_fused_multiply_fwd_kernel, grid, common, num_tiles, constants, config):
                return
    else:
        for single in single_configs(launch.p, launch.q, itemsize, num_slices):
            num_tiles = groups * math.ceil(num_slices / single.block_s) * math.ceil(launch.q / single.block_q)
            grid = (min(num_tiles, programs * single.programs_per_sm),)
            constants = {
                "P": launch.p,
                "Q": launch.q,
                "BLOCK_S": single.block_s,
                "BLOCK_P": single.block_p,
                "BLOCK_Q": single.block_q,
                "RESIDENT": groups == 1 and launch.p <= single.block_p and launch.q <= single.block_q,
                "ALIGNED": fastest % single.block_s == 0,
                "EVEN": num_slices % single.block_s == 0,
            }
            if _launched(_sliced_multiply_fwd_kernel, grid, common, num_tiles, constants, single):
                return
    raise RuntimeError(f"no launch configuration of a {launch.p} x {launch.q} step fits on {x.tensor.device}")


def _launched(kernel: Any, grid: tuple[int], common: dict[str, Any], num_tiles: int, constants: dict[str, Any], config: Any) -> bool:
    """Launch; False where the device has too little shared memory for this configuration."""
    try:
        kernel[grid](**common, num_tiles=num_tiles, **constants, num_warps=config.num_warps, num_stages=config.num_stages)
    except OutOfResources:
        return False
    return True


def _carry_out(
    launches: Sequence[Launch],
    x: Tensor,
    factors: Sequence[Tensor],
    z: Tensor | None,
    alpha: float,
    beta: float,
    precision: str | None,
    sizes: list[int],
) -> Tensor:
    """Run launches over x ``[B, L, K, R]``; sizes, the current width of each mode, is updated.

    A run over all modes from last to first turns each launch's modes to the front, which reads whole runs of
    memory and leaves them in order at the end; other runs multiply in place.
    """
    groups, rows, _, columns = x.shape
    turn = columns == 1 and _covers_backwards(launches, len(factors))
    current = _modes(_mergeable(x))
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
            _modes(y),
            _z_modes(z) if final and z is not None else None,
            (groups, rows, before, after),
            turn and before > 1,
            alpha if final else 1.0,
            beta if final else 0.0,
            precision,
        )
        for s in launch.steps:
            sizes[s.start : s.stop] = [f.shape[2] for f in factors[s.start : s.stop]]
        current = _modes(y)
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
        return _carry_out(_plan_for(x, factors), x, factors, z, alpha, beta, precision, [f.shape[1] for f in factors])


def _factor_gradient(
    u: Tensor, v: Tensor, p: int, q: int, before: int, after: int, alpha: float, precision: str | None
) -> Tensor:
    """``[B, p, q]``: alpha times the sum over rows, before and after of u ``[B, L, before * p * after]`` and v alike."""
    groups, rows = u.shape[:2]
    um, vm = _modes(_mergeable(u)), _modes(_mergeable(v))
    merged = before != 1 and um.row_stride == before * p * after and vm.row_stride == before * q * after
    num_slices = rows * before * after
    compute, acc, dot_precision = _arithmetic(u.dtype, precision, True)
    config = gradient_config(p, q, u.element_size(), num_slices, groups, _multiprocessors(u.device))
    partial = torch.empty((config.splits, groups, p, q), dtype=torch.promote_types(u.dtype, torch.float32), device=u.device)
    blocks = math.ceil(p / config.block_p) * math.ceil(q / config.block_q)
    _factor_gradient_kernel[(blocks * groups * config.splits,)](
        um.tensor,
        vm.tensor,
        partial,
        um.in_place(p, after, merged),
        vm.in_place(q, after, merged),
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
        EVEN=num_slices % config.block_s == 0,
        COMPUTE=compute,
        ACC=acc,
        PRECISION=dot_precision,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
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


def _inputs(x: Tensor, factors: Sequence[Tensor], wanted: Sequence[int], precision: str | None) -> dict[int, Tensor]:
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
