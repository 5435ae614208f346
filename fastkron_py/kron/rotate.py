"""Groups of rows times a small matrix, rounded row by row, in one launch: what the kernel takes, and its launch.

Closed-form: no timing, no device, no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

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
        cut: factors of A; those of B follow.
        orders: of A and B without the identities that widen them.
        p: rows of A.
        warps: of a program.
        rows: of a program.
        chunks: groups of a warp.
        parts: numbers of 16 bits whose sum is an entry of A, and of B.
    """

    cut: int
    orders: tuple[int, int]
    p: int
    warps: int
    rows: int
    chunks: int
    parts: tuple[int, int]


def rotation(width: int, order: int, shapes: Sequence[tuple[int, ...]], is_bfloat16: bool = True) -> Rotation | None:
    """The launch for rows of this width; None where the kernel does not take them.

    Args:
        width: of a row.
        order: of Sylvester's matrix, where there are no factors.
        shapes: of the factors of a group.
        is_bfloat16: whether they are of bfloat16, whose numbers are parts by themselves.
    """
    found = _split(order) if not shapes else _cut(shapes) if order == 1 else None
    if found is None or width > MOST or width % _VECTOR:
        return None
    cut, orders = found
    p = max(SIDE, orders[0])
    parts = 1 if cut == 0 or (cut == 1 and is_bfloat16) else 2, 1 if len(shapes) - cut <= 1 else 2
    groups = math.ceil(width / (p * SIDE))
    of_a = parts[0] * p * p
    most = (_HELD - min(_A_HELD, of_a // 64)) // (p * SIDE // 32)  # groups of a warp
    warps = next((w for w in _WARPS if math.ceil(groups / w) <= most and w * of_a <= _SHARED), None)
    if warps is None:
        return None
    rows = max(1, warps // next_power_of_two(groups))
    return Rotation(cut, orders, p, warps, rows, math.ceil(groups * rows / warps), parts)


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


def launcher(made: Rotation, x: Tensor, factors: Sequence[Tensor]) -> Launcher:
    """The launch from x, the factors or another tensor, scales and values, with two scalars.

    Args:
        made: see `rotation`.
        x: ``[rows, width]``, with neighbours in memory.
        factors: of a group.
    """
    from fastkron_py.kron.kernels.rotate import _rotate_rows_kernel
    from fastkron_py.runtime.backend import is_interpreting
    from fastkron_py.runtime.launch import LaunchConfig, Launcher

    arguments = {
        "rows": x.shape[0],
        "x_stride": x.stride(0),
        "factor_strides": tuple([(0, *f.stride()) for f in factors]) or ((0, 0, 0),),
        "N": x.shape[1],
        "SHAPES": tuple([tuple(f.shape) for f in factors]),
        "CUT": made.cut,
        "ORDERS": made.orders,
        "P": made.p,
        "C": made.warps,
        "ROWS": made.rows,
        "CHUNKS": made.chunks,
        "A_PARTS": made.parts[0],
        "B_PARTS": made.parts[1],
        "PRECISION": "emulated" if is_interpreting() else "ieee",
        "num_warps": made.warps,
    }
    return Launcher([LaunchConfig(_rotate_rows_kernel, (math.ceil(x.shape[0] / made.rows),), arguments)])
