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
_SUMS: Final = 128  # of a thread, at most, where 16 warps are enough for that: fewer warps wait for one another less
_WARPS: Final = (4, 8, 16)


class Rotation(NamedTuple):
    """A matrix of a group as ``A (x) B``, B with 16 rows.

    Attributes:
        cut: factors of A; those of B follow.
        orders: of A and B without the identities that widen them.
        p: rows of A.
        warps: of a program.
        rows: of a program.
        chunks: groups of a warp.
    """

    cut: int
    orders: tuple[int, int]
    p: int
    warps: int
    rows: int
    chunks: int


def rotation(width: int, order: int, shapes: Sequence[tuple[int, ...]]) -> Rotation | None:
    """The launch for rows of this width; None where the kernel does not take them.

    Args:
        width: of a row.
        order: of Sylvester's matrix, where there are no factors.
        shapes: of the factors of a group.
    """
    found = _split(order) if not shapes else _cut(shapes) if order == 1 else None
    if found is None or width > MOST or width % _VECTOR:
        return None
    cut, orders = found
    p = max(SIDE, orders[0])
    groups = math.ceil(width / (p * SIDE))
    sums = p * SIDE // 32
    warps = next((w for w in _WARPS if math.ceil(groups / w) * sums <= _SUMS), _WARPS[-1])
    rows = max(1, warps // next_power_of_two(groups))
    return Rotation(cut, orders, p, warps, rows, math.ceil(groups * rows / warps))


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

    a, b = made.cut, len(factors) - made.cut
    is_short = x.element_size() == 2 and str(x.dtype) == "torch.bfloat16"  # whose numbers are parts by themselves
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
        "A_PARTS": 1 if a == 0 or (a == 1 and is_short) else 2,
        "B_PARTS": 1 if b <= 1 else 2,
        "PRECISION": "emulated" if is_interpreting() else "ieee",
        "num_warps": made.warps,
    }
    return Launcher([LaunchConfig(_rotate_rows_kernel, (math.ceil(x.shape[0] / made.rows),), arguments)])
