"""Groups of rows times a small matrix, rounded row by row or in segments, in one launch: what the kernels take, and their launch.

Closed-form: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastkron_py.runtime.gpu import next_power_of_two

if TYPE_CHECKING:
    from torch import Tensor

    from fastkron_py.runtime.launch import Launcher

CAPABILITY: Final = (8, 0)  # of a GPU whose tensor cores take bfloat16
MOST: Final = 32768  # elements of a row, which a program has in its registers
SIDE: Final = 16  # columns of B, and at least of A
WIDEST: Final = 64  # columns of A
_VECTOR: Final = 16  # elements of a row, which begins at a multiple of their bytes
_HELD: Final = 152  # registers of a thread with sums and with A, at most: a program with more spills
_A_HELD: Final = 64  # of these with A, at most: the rest is read again
_SHARED: Final = 32768  # numbers of 16 bits, for each warp's A
_WARPS: Final = (4, 8)  # the fewer, the less they wait for one another


class Rotation(NamedTuple):
    """A matrix of a group as ``A (x) B``, B with 16 rows.

    Attributes:
        segment: elements with a scale of their own, of a launch whose warps have groups of any rows; 0 for whole rows in a program.
        cut: factors of A; those of B follow.
        orders: of A and B without the identities that widen them.
        p: rows of A: 16, 32 or 64.
        warps: of a program.
        rows: of a program.
        chunks: groups of a warp.
        parts: numbers of 16 bits whose sum is an entry of A, and of B.
    """

    segment: int
    cut: int
    orders: tuple[int, int]
    p: int
    warps: int
    rows: int
    chunks: int
    parts: tuple[int, int]


def rotation(width: int, order: int, shapes: Sequence[tuple[int, ...]], is_bfloat16: bool = True, segment: int = 0) -> Rotation | None:
    """The launch for rows of this width; None where the kernels do not take them.

    Without factors' shapes a group has Sylvester's matrix of this order. Numbers of bfloat16 are parts by themselves. A segment is the
    columns with a scale of their own, a divisor of the width; 0 is a program's whole row.
    """
    found = _split(order) if not shapes else _cut(shapes) if order == 1 else None
    if found is None or width % _VECTOR:
        return None
    cut, orders = found
    of_segment = segment // SIDE  # columns of A
    is_short = 0 < of_segment <= WIDEST and segment == SIDE * next_power_of_two(of_segment)
    if not is_short and (width > MOST or segment not in (0, width)):
        return None
    p = max(SIDE, orders[0], of_segment if is_short else 0)
    parts = 1 if cut == 0 or (cut == 1 and is_bfloat16) else 2, 1 if len(shapes) - cut <= 1 else 2
    groups = math.ceil(width / (p * SIDE))
    if is_short:
        return Rotation(segment, cut, orders, p, _WARPS[0], 1, WIDEST // p, parts)
    of_a = parts[0] * p * p
    most = (_HELD - min(_A_HELD, of_a // 64)) // (p * SIDE // 32)  # groups of a warp
    warps = next((w for w in _WARPS if math.ceil(groups / w) <= most and w * of_a <= _SHARED), None)
    if warps is None:
        return None
    rows = max(1, warps // next_power_of_two(groups))
    return Rotation(0, cut, orders, p, warps, rows, math.ceil(groups * rows / warps), parts)


def _split(order: int) -> tuple[int, tuple[int, int]] | None:
    """Sylvester's matrix as a product of two of them."""
    return (0, (max(1, order // SIDE), min(order, SIDE))) if 1 < order <= WIDEST * SIDE else None


def _cut(shapes: Sequence[tuple[int, ...]]) -> tuple[int, tuple[int, int]] | None:
    """Square factors of powers of two whose last ones are B: 16 columns, or fewer where there are no others."""
    sizes = [p for p, q in shapes if p == q and p > 0 and not p & (p - 1)]
    if len(sizes) < len(shapes):
        return None
    if (whole := math.prod(sizes)) <= SIDE:
        return 0, (1, whole)
    cut = next((i for i in range(len(sizes)) if math.prod(sizes[i:]) == SIDE), None)
    return None if cut is None or whole > WIDEST * SIDE else (cut, (whole // SIDE, SIDE))


def launcher(made: Rotation, x: Tensor, factors: Sequence[Tensor], **options: Any) -> Launcher:
    """The launch from x ``[rows, width]``, a group's factors or another tensor, scales and values, with two scalars.

    Neighbours of x lie side by side in memory; for segments it is contiguous. Options are FLOAT4, and of whole rows N, PROLOGUE and EPS: as
    the kernels have them.
    """
    from fastkron_py.kron.kernels.rotate import _rotate_rows_kernel, _rotate_segments_kernel
    from fastkron_py.runtime.backend import is_interpreting
    from fastkron_py.runtime.kernels import LaunchConfig
    from fastkron_py.runtime.launch import Launcher

    rows, groups = x.shape[0], made.warps * made.chunks
    strides = tuple([(0, *f.stride()) for f in factors]) or ((0, 0, 0),)
    if made.segment:
        kernel, programs = _rotate_segments_kernel, math.ceil(x.numel() / (groups * made.p * SIDE))
        arguments: dict[str, Any] = {"size": x.numel()}
    else:
        kernel, programs = _rotate_rows_kernel, math.ceil(rows / made.rows)
        arguments = {"rows": rows, "x_stride": x.stride(0)}
    arguments |= {
        "factor_strides": strides,
        "SHAPES": tuple([tuple(f.shape) for f in factors]),
        "PLAN": made,
        "PRECISION": "emulated" if is_interpreting() else "ieee",
        "num_warps": made.warps,
        **options,
    }
    return Launcher([LaunchConfig(kernel, (programs,), arguments)])
