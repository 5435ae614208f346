"""`kron_quantize`: a product with a Kronecker product, rounded to small numbers with a scale for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron import rotate, torch_backend
from fastkron_py.kron.api import kron_matmul
from fastkron_py.kron.canonical import Canonical, canonical
from fastkron_py.kron.checks import Factor, check_tensors, factors_and_identities, is_identity, result_shape, shape_of
from fastkron_py.kron.families import slice_pair
from fastkron_py.kron.hadamard_orders import Hadamard, factor_sizes, matrices, with_matrices
from fastkron_py.kron.plan.steps import Launch
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.backend import backend_of_call, choose_backend, is_interpreting
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import HALF_DTYPES, check_integer, check_precision, check_scalar
from fastkron_py.runtime.eager import constants
from fastkron_py.runtime.errors import type_error, value_error
from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.operator import Operator
from fastkron_py.runtime.precision import autocast_dtype, autocasted, resolved, torch_products
from fastkron_py.runtime.program import Program, Scalar, bits

if TYPE_CHECKING:
    from fastkron_py.runtime.launch import Launcher

INT4: Final = "int4"
LARGEST: Final = {"int8": 127, "float8_e4m3fn": 448, INT4: 7}
"""The largest number of each format; the smallest one in use is its negative."""
STORED: Final = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, INT4: torch.uint8}

_MATRIX: Final = 2  # dimensions
_NIBBLE: Final = 4  # bits
_WIDEST: Final = 2048  # elements of a row that a program takes at a time
_FLOAT8: Final = (8, 9)  # compute capability


class Quantized(NamedTuple):
    """Rows of small numbers: ``scales * values`` is about the product.

    Attributes:
        values: ``[*, N]`` of int8 or float8_e4m3fn; of int4 ``[*, N / 2]`` of uint8, an even column's value in the low four bits and
            the next one's in the high four, in two's complement.
        scales: ``[*, 1]`` of float32; with groups of columns ``[*, N / group_size]``.
    """

    values: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """The product again, ``[*, N]`` of float32, with an error of at most half a step of the format."""
        values = self.values
        if values.dtype == torch.uint8:
            signed = values.view(torch.int8)
            values = torch.stack([(signed << _NIBBLE) >> _NIBBLE, signed >> _NIBBLE], -1).flatten(-2)
        groups = self.scales.shape[-1]
        split: Tensor = values.float().unflatten(-1, (groups, values.shape[-1] // groups))
        return (split * self.scales[..., None]).flatten(-2)


def kron_quantize(
    x: Tensor,
    factors: Sequence[Factor | Hadamard],
    dtype: torch.dtype | str,
    *,
    group_size: int | None = None,
    clip_ratio: float = 1.0,
    precision: str | None = None,
) -> Quantized:
    """Multiply with a Kronecker product and round each row: ``x @ (F1 (x) ... (x) FN)`` as ``scales * values``.

    This is the transform and the per-token quantisation in front of a linear layer with weights in four or eight bits (FlatQuant:
    Sun et al., 2025). A row's scale is ``clip_ratio * max|y| / largest``, with the largest number of the format: 127 of int8, 448 of
    float8_e4m3fn, 7 of int4. Values beyond are clipped; ties are rounded to even. Two factors of up to 256 and 128 rows and columns
    in half types are multiplied, and their rows rounded, in one launch on GPUs with warpgroup products (Hopper); so are groups of a row,
    ``[n, Hadamard(256)]`` or ``[n, *[F] * 4]``, on NVIDIA's GPUs from sm_80 on (orders that are powers of two, to 1024; rows to 32768).
    Elsewhere rounding takes a launch of its own. A row of zeros has scale 1. A row with an infinity or a NaN has a scale of NaN, and
    undefined values; so does a row of float64 whose scale is too large for float32. There are no gradients.

    Args:
        x: ``[*, K]``, a torch tensor of float16, bfloat16, float32 or float64; under autocast of its dtype, as in `kron_matmul`.
        factors: matrices ``[P_i, Q_i]`` of x's dtype and device; ``K = prod P_i``, ``N = prod Q_i``. An integer n stands for the identity
            I_n, as in `kron_matmul`: ``[n, F]`` multiplies each of n groups of a row. `Hadamard` stands for a Hadamard matrix.
        dtype: torch.int8, torch.float8_e4m3fn or "int4".
        group_size: how many neighbouring columns have a scale of their own, a divisor of N; None for one scale of each row. A group that
            holds whole groups of ``[n, F]`` is rounded as a row is; others are rounded by a launch of their own.
        clip_ratio: a number above 0, at most 1: the share of a row's largest absolute value that is the format's largest number.
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        `Quantized`: values and scales, and `Quantized.dequantize`.

    Raises:
        TypeError: x or a factor is no torch tensor, dtypes that differ or are complex, or another format.
        ValueError: shapes that do not chain, factors that are no matrices, an odd N with "int4", or a clip_ratio or group_size out of
            range.

    Example:
        >>> x, factors = torch.randn(16, 4096), [torch.randn(64, 64) / 8 for _ in range(2)]
        >>> y = kron_quantize(x, factors, "int4")
        >>> y.values.shape, y.scales.shape
        (torch.Size([16, 2048]), torch.Size([16, 1]))
        >>> bool((y.dequantize() - kron_matmul(x, factors)).abs().max() <= 0.5 * y.scales.max() + 1e-3)
        True
    """
    if group_size is not None:
        return _in_groups(x, factors, dtype, group_size, {"clip_ratio": clip_ratio, "precision": precision})
    key: Any = None
    given: tuple[Any, ...] = (x,)
    if type(factors) in (list, tuple) and type(clip_ratio) is float and not torch.compiler.is_compiling():
        given = (x, *[f for f in factors if type(f) not in (int, Hadamard)])
        places = [f if type(f) in (int, Hadamard) else None for f in factors]
        key = "kron_quantize", dtype, clip_ratio, precision, *places
        entry = CACHE.find(key, given)
        if entry is not None:
            return Quantized(*entry.call(given, entry.options))
    kind = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if kind not in LARGEST or (kind == INT4) is not isinstance(dtype, str):
        raise type_error("dtype", 'torch.int8, torch.float8_e4m3fn or "int4"', dtype)
    listed = factors_and_identities(factors)
    check_tensors(x, [], None, ("x", "factors", ""))
    if autocast_dtype(x) is not None:
        x, listed, _ = autocasted(x, listed, None)
        key = None  # which does not tell autocast's dtype
    groups, order, unit, listed = _rotation(x, listed)
    check_tensors(x, listed, None, ("x", "factors", ""), identities=True)
    if x.is_complex():
        raise type_error("x", "a real dtype", x.dtype)
    check_precision(precision)
    _check_matrices(factors, listed)
    shape = result_shape(tuple(x.shape), [(groups, groups), (order, order), *[shape_of(f) for f in listed]])
    if kind == INT4 and shape[-1] % 2:
        raise value_error("factors", 'an even number of columns in all for "int4", which has two in a byte', shape[-1])
    ratio = check_scalar("clip_ratio", clip_ratio, x)
    if isinstance(ratio, Tensor | complex):
        raise type_error("clip_ratio", "a number", clip_ratio)
    if not 0 < ratio <= 1:
        raise value_error("clip_ratio", "a number above 0, at most 1", clip_ratio)
    with torch.no_grad():
        # Others stay the tensors that were given: one that comes twice is found in the cache as such.
        x, *listed = [t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in (x, *listed)]
        if any([is_identity(f) for f in listed]):  # between matrices: a product of its own
            x, groups, listed, key = _product(x, [groups, *listed], precision), shape[-1], [], None
        key = key if len(given) == 1 + len(listed) else None  # a Hadamard matrix beside others is made
        options = float(ratio) / LARGEST[kind], unit, groups, order, kind, precision, backend_of_call()
        return Quantized(*operator(x, listed, *options, key=key))


def _check_matrices(factors: Sequence[Any], listed: Sequence[Any]) -> None:
    """The last ones of the factors are matrices or identities."""
    for i, f in enumerate(listed, start=len(factors) - len(listed)):
        if isinstance(f, Tensor) and f.ndim != _MATRIX:
            raise value_error(f"factors[{i}]", "a matrix", f"shape {tuple(f.shape)}")


def _product(x: Tensor, factors: Sequence[Any], precision: str | None) -> Tensor:
    """In float32 for half types, so that it is rounded once."""
    wide, precision = (torch.float32, "high") if x.dtype in HALF_DTYPES else (x.dtype, precision)
    y: Tensor = kron_matmul(x.to(wide), [f if is_identity(f) else f.to(wide) for f in factors], precision=precision)
    return y


def _in_groups(x: Tensor, factors: Sequence[Any], dtype: Any, group_size: int, options: dict[str, Any]) -> Quantized:
    """With a scale for each group of columns, which are rows of a product that ends there; options are clip_ratio and precision."""
    listed = factors_and_identities(factors)
    check_tensors(x, [], None, ("x", "factors", ""))
    _check_matrices(factors, listed)
    sizes = [f.shape if isinstance(f, Hadamard) else shape_of(f) for f in listed]
    n = result_shape(tuple(x.shape), sizes)[-1]
    size = check_integer("group_size", group_size, "None or an integer")
    if size < 1 or n < 1 or n % size:
        raise value_error("group_size", f"a divisor of the product's {n} columns", size)
    if dtype == INT4 and size % 2:
        raise value_error("group_size", 'an even number for "int4", which has two columns in a byte', size)
    first = next((i for i, f in enumerate(listed) if not is_identity(f)), len(listed))
    columns = math.prod([q for _, q in sizes[first:]])
    if size % columns == 0:
        groups = kron_quantize(x.unflatten(-1, (n // size, -1)), [size // columns, *listed[first:]], dtype, **options)
    else:
        if autocast_dtype(x) is not None:
            x, listed, _ = autocasted(x, listed, None)
        listed = with_matrices(listed, x)
        check_tensors(x, listed, None, ("x", "factors", ""), identities=True)
        with torch.no_grad():
            y = _product(x, listed, options["precision"])
        groups = kron_quantize(y.unflatten(-1, (n // size, size)), [size], dtype, **options)
    return Quantized(groups.values.flatten(-2), groups.scales.squeeze(-1))


def _rotation(x: Tensor, factors: list[Any]) -> tuple[int, int, float, list[Any]]:
    """(groups of a row, the order of Sylvester's matrix, its scale, the other factors): the first matrices of the product, 1 if none."""
    groups, rest = 1, list(factors)
    while rest and is_identity(rest[0]):
        groups *= rest.pop(0)
    if rest and all([isinstance(f, Hadamard) and f.is_sylvester for f in rest]):
        return groups, math.prod([f.order for f in rest]), math.prod([f.scale for f in rest]), []
    return groups, 1, 1.0, with_matrices(rest, x)


# ---- the program: a product, rounded row by row as it is stored, or by a launch of its own ---------


def values_shape(x: Sequence[int], n: int, kind: str) -> tuple[int, ...]:
    """The values' shape, of x's and of the product's columns."""
    return (*x[:-1], n // 2 if kind == INT4 else n)


def program(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """Tensors are x and the factors behind an identity and a Hadamard matrix.

    Options are the scale over the largest value, that of the Hadamard matrix, the orders of both, the format, precision and backend.
    """
    _, unit, groups, order, kind, precision, backend = options
    build = Builder(tensors)
    x, *factors = build.inputs
    n = groups * order * math.prod([f.shape[1] for f in factors])
    values, scales = describe(values_shape(x.shape, n, kind), STORED[kind]), describe((*x.shape[:-1], 1), torch.float32)
    if x.numel() == 0 or n == 0:

        def of_nothing(x: Tensor) -> tuple[Tensor, Tensor]:
            return x.new_zeros(values.shape, dtype=torch.uint8).view(values.dtype), x.new_ones(scales.shape, dtype=torch.float32)

        return build.program(build.call(of_nothing, (x,), values, scales))
    is_wide = x.dtype not in HALF_DTYPES
    if choose_backend(backend, tensors[0]) == "torch":

        def by_torch(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
            *factors, step = given
            y, *factors = _widened(order, unit, x.reshape(-1, x.shape[-1] // groups), *factors)
            if factors:
                with torch_products(x, precision):
                    problem = canonical(y, factors, False)
                    y = problem.unpack(torch_backend.multiply(problem.x, problem.factors))
            return rounded(y.view(*x.shape[:-1], n), step, kind)

        return build.program(build.call(by_torch, (x, *factors), values, scales, scalars=(Scalar(0),)))
    from fastkron_py.kron.forward import add_multiply, mergeable

    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    targets = build.empty((rows, values.shape[-1]), values.dtype), build.empty((rows,), torch.float32)
    shapes = [tuple(values.shape), tuple(scales.shape)]
    matrix, precision = build.reshape(x, (rows, width)), resolved(precision)
    rotation = one_rotation(matrix, factors, order, kind, build.device)
    launcher: Launcher | None
    if rotation is not None:
        matrix = matrix if matrix.stride(1) == 1 else build.contiguous(matrix)
        launcher = rotate.launcher(rotation, matrix, factors)
        build.launch(launcher, (matrix, tuple(factors) or (matrix,), targets[1], targets[0]), (Scalar(0), bits(unit)))
        return build.program(targets, shapes)
    if factors and order == groups == 1:
        problem = canonical(matrix, factors, False, build.reshape)
        problem = problem._replace(x=mergeable(build, problem.x))
        launcher = quantizing_launch(problem, precision, kind, build.device)
        if launcher is not None:
            build.launch(launcher, (problem.x, tuple(problem.factors), targets[1], targets[0]), (Scalar(0), bits(0.0)))
            return build.program(targets, shapes)
    y = build.reshape(matrix, (rows * groups, width // groups))
    if not is_wide or order > 1:  # a row is rounded once, and far below 1 float16 has few bits; for these operands TF32 is exact
        wide = x.dtype if is_wide else torch.float32
        sizes = [(f, f) for f in factor_sizes(order)] if order > 1 else []
        described = [describe(t, wide) for t in (y.shape, *sizes, *[f.shape for f in factors])]
        made = build.call(lambda *given: _widened(order, unit, *given), (y, *factors), *described)
        y, *factors = [made] if isinstance(made, Tensor) else made
        precision = precision if is_wide else "high"
    if factors:
        problem = canonical(y, factors, False, build.reshape)
        y = add_multiply(build, problem.x, problem.factors, precision)
    launcher = rounding_launch(rows, n, kind, build.device) if y.dtype == torch.float32 else None  # float64 has rows beyond float32
    if launcher is not None:
        build.launch(launcher, (build.contiguous(y), targets[1], targets[0]), (Scalar(0),))
        return build.program(targets, shapes)
    y = build.reshape(y, (*x.shape[:-1], n))
    return build.program(build.call(lambda y, step: rounded(y, step, kind), (y,), values, scales, scalars=(Scalar(0),)))


def _widened(order: int, unit: float, *tensors: Tensor) -> list[Tensor]:
    """x, the factors of the Hadamard matrix of this order and scale, and the others: in float32 for half types."""
    dtype = torch.float32 if tensors[0].dtype in HALF_DTYPES else tensors[0].dtype
    x, *factors = [t.to(dtype).contiguous() for t in tensors]  # a memory format copies nothing of the same dtype
    made = constants(matrices, (factor_sizes(order), dtype), x.device) if order > 1 else ()
    return [x, *[t * unit if i == 0 else t for i, t in enumerate(made)], *factors]


def rounded(y: Tensor, step: float, kind: str) -> tuple[Tensor, Tensor]:
    """(Values, scales) of rows of float32 or float64, by torch's operations; ties go to even."""
    largest = y.abs().amax(-1, keepdim=True) + (y * 0.0).sum(-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, (largest * step).clamp(min=torch.finfo(torch.float32).tiny)).float()
    scales = scales.masked_fill(scales.isinf(), math.nan)
    v = (y / scales).clamp(-LARGEST[kind], LARGEST[kind])
    if kind == "float8_e4m3fn":
        return v.to(torch.float8_e4m3fn), scales
    whole = v.nan_to_num(0.0).round().to(torch.int8)
    if kind == "int8":
        return whole, scales
    low, high = whole.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return (low & 15) | (high << 4), scales


# ---- launches: two steps whose slices are rows, and a pass over rows of any length -----------------


def _converts_to(kind: str, device: torch.device) -> bool:
    """Whether Triton has the conversion to a format; its interpreter loses carries of float8's."""
    if kind != "float8_e4m3fn":
        return True
    return not is_interpreting() and (devices.gpu_of(device).capability or (0, 0)) >= _FLOAT8


def one_rotation(x: Tensor, factors: Sequence[Tensor], order: int, kind: str, device: torch.device) -> rotate.Rotation | None:
    """The launch that rotates the groups of rows, and rounds; None where the kernel does not take them.

    Args:
        x: ``[rows, width]``.
        factors: of a group, behind the Hadamard matrix.
        order: of this matrix.
        kind: of the values.
        device: of all tensors.
    """
    has_cores = is_interpreting() or (devices.gpu_of(device).capability or (0, 0)) >= rotate.CAPABILITY
    if x.dtype not in HALF_DTYPES or not has_cores or not _converts_to(kind, device):
        return None
    return rotate.rotation(x.shape[1], order, [f.shape for f in factors], x.dtype == torch.bfloat16)


def quantizing_launch(problem: Canonical, precision: str, kind: str, device: torch.device) -> Launcher | None:
    """The launch that multiplies and rounds; None where no launch has whole rows on chip.

    Args:
        problem: the multiply, of one matrix of each factor and no columns.
        precision: of float32 products.
        kind: of the values.
        device: of all tensors.
    """
    from fastkron_py.kron.forward import multiply_problem
    from fastkron_py.kron.kernels.epilogues import TO_FLOAT8, TO_INTEGERS
    from fastkron_py.kron.problem import LaunchProblem, Rows

    x, factors = problem.x, problem.factors
    ps, qs = ([f.shape[i] for f in factors] for i in (1, 2))
    whole = multiply_problem(x, factors, device, precision)
    if (whole.families and slice_pair.name not in whole.families) or slice_pair.refusal(whole) or not _converts_to(kind, device):
        return None
    # A byte has two columns of int4, of one row of a slice.
    pairs = [pair for pair in slice_pair.slice_pairs(ps, qs) if kind != "int4" or pair[1].q % 2 == 0]
    if not pairs:
        return None
    mode = whole.mode_of((*whole.shape[:2], 1, 1), math.prod(ps), math.prod(qs))
    launch = Launch(min(pairs, key=lambda pair: slice_pair.seconds(mode, pair)), slice_pair.name)
    rows, width = x.shape[1], launch.q // (2 if kind == "int4" else 1)
    made = LaunchProblem(
        x.dtype,
        precision,
        whole.gpu,
        (1, rows, 1, 1),
        launch,
        TO_FLOAT8 if kind == "float8_e4m3fn" else TO_INTEGERS,
        0,
        1,
        whole.x,
        Rows(0, width, 1),
        Rows(0, 1, 1),
        tuple([(f.shape[1], f.shape[2]) for f in factors]),
        tuple([(0, f.stride(1), f.stride(2)) for f in factors]),
    )
    return made.launcher


def rounding_launch(rows: int, n: int, kind: str, device: torch.device) -> Launcher | None:
    """The launch that rounds rows of n elements; None where Triton does not know the format on this GPU.

    Args:
        rows: of the product.
        n: its columns.
        kind: of the values.
        device: of all tensors.
    """
    if not _converts_to(kind, device):
        return None
    from fastkron_py.kron.kernels.quantize import _quantize_rows_kernel
    from fastkron_py.runtime.launch import LaunchConfig, Launcher

    block = min(_WIDEST, max(32, next_power_of_two(n)))
    arguments = {"N": n, "BLOCK": block, "num_warps": 4 if block <= _WIDEST // 2 else 8}
    return Launcher([LaunchConfig(_quantize_rows_kernel, (rows,), arguments)])


# ---- the operator ----------------------------------------------------------------------------------


def _fake(
    x: Tensor, factors: Sequence[Tensor], step: float, unit: float, groups: int, order: int, kind: str, *_: Any
) -> tuple[Tensor, Tensor]:
    n = groups * order * math.prod([f.shape[1] for f in factors])
    return x.new_empty(values_shape(x.shape, n, kind), dtype=STORED[kind]), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    if dims[0] is None or any([dim is not None for dim in dims[1:]]):
        raise value_error("factors", "factors without a batch dimension inside vmap, and an x with one", f"in_dims {tuple(dims)}")
    return tuple(operator(tensors[0].movedim(dims[0], 0), list(tensors[1:]), *options)), (0, 0)


operator = Operator(
    "kron_quantize(Tensor x, Tensor[] factors, float step, float unit, int groups, int order, str kind, str? precision, str backend)"
    " -> (Tensor, Tensor)",
    program=program,
    fake=_fake,
    vmap=_vmap,
    scalars=(0,),
)
