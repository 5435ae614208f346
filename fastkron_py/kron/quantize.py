"""`kron_quantize`: a product with a Kronecker product, rounded to small numbers with a scale for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron import rotate
from fastkron_py.kron.api import kron_matmul
from fastkron_py.kron.canonical import Canonical, canonical
from fastkron_py.kron.checks import Factor, check_tensors, factors_and_identities, is_identity, result_shape, shape_of
from fastkron_py.kron.families import slice_pair
from fastkron_py.kron.hadamard_orders import Hadamard, factor_sizes, matrices, with_matrices
from fastkron_py.kron.multiply import Multiply
from fastkron_py.kron.plan.steps import Launch
from fastkron_py.kron.problem import Rows
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.backend import backend_of_call, choose_backend, is_interpreting
from fastkron_py.runtime.batching import viewed
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import HALF_DTYPES, check_integer, check_precision, check_scalar, check_tensor
from fastkron_py.runtime.eager import constants, without_autocast
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.gpu import next_power_of_two
from fastkron_py.runtime.operator import Operator
from fastkron_py.runtime.precision import autocast_dtype, autocasted, resolved, wide
from fastkron_py.runtime.program import Program, Scalar, bits
from fastkron_py.tiling.torch_products import row_slices

if TYPE_CHECKING:
    from fastkron_py.runtime.launch import Launcher

INT4: Final = "int4"
FLOAT4: Final = "float4_e2m1fn_x2"
LARGEST: Final = {"int8": 127, "float8_e4m3fn": 448, INT4: 7, FLOAT4: 6}
"""The largest number of each format; the smallest one in use is its negative."""
STORED: Final = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, INT4: torch.uint8, FLOAT4: torch.uint8}
SCALES: Final = {"float32": torch.float32, "e8m0": torch.uint8}  # as a program stores them

_FORMATS: Final = 'torch.int8, torch.float8_e4m3fn, torch.float4_e2m1fn_x2 or "int4"'
_PROLOGUES: Final = 'None, ("swiglu",) or ("rms_norm", weight, eps)'
_FLOATS: Final = {"float8_e4m3fn": (3, -9), FLOAT4: (1, -1)}  # bits of a mantissa, and the exponent of the smallest number
_MATRIX: Final = 2  # dimensions
_NIBBLE: Final = 4  # bits
_INTERMEDIATES: Final = 4  # of a row's size, that rounding by torch has at a time
_WIDEST: Final = 2048  # elements of a row that a program takes at a time
_FLOAT8: Final = (8, 9)  # compute capability


class Quantized(NamedTuple):
    """Rows of small numbers: ``scales * values`` is about the product.

    Attributes:
        values: ``[*, N]`` of int8 or float8_e4m3fn; of int4 ``[*, N / 2]`` of uint8, an even column's value in the low four bits and
            the next one's in the high four, in two's complement; of float4_e2m1fn_x2 likewise ``[*, N / 2]``, the even column's low.
        scales: ``[*, 1]`` of float32 or float8_e8m0fnu; with groups of columns ``[*, N / group_size]``.
    """

    values: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """The product again, ``[*, N]`` of float32, with an error of at most half a step of the format."""
        values: Tensor = self.values
        if values.dtype in (torch.uint8, torch.float4_e2m1fn_x2):
            signed = viewed(values, torch.int8)
            values = torch.stack([(signed << _NIBBLE) >> _NIBBLE, signed >> _NIBBLE], -1).flatten(-2)
        if self.values.dtype == torch.float4_e2m1fn_x2:
            code = (values & 7).float()  # steps of 1/2 to 2, of 1 to 4, of 2 to 6
            size = torch.maximum(torch.maximum(code / 2, code - 2), 2 * code - 8)
            values = torch.where(values < 0, -size, size)
        groups = self.scales.shape[-1]
        split: Tensor = values.float().unflatten(-1, (groups, values.shape[-1] // groups))
        return (split * self.scales.float()[..., None]).flatten(-2)


def kron_quantize(
    x: Tensor,
    factors: Sequence[Factor | Hadamard],
    dtype: torch.dtype | str,
    *,
    group_size: int | None = None,
    scale_format: str = "float32",
    prologue: tuple[Any, ...] | None = None,
    clip_ratio: float = 1.0,
    precision: str | None = None,
    generator: torch.Generator | None = None,
) -> Quantized:
    """Multiply with a Kronecker product and round each row: ``x @ (F1 (x) ... (x) FN)`` as ``scales * values``.

    This is the transform and the per-token quantisation in front of a linear layer with weights in four or eight bits (FlatQuant:
    Sun et al., 2025). A row's scale is ``clip_ratio * max|y| / largest``, with the largest number of the format: 127 of int8, 448 of
    float8_e4m3fn, 7 of int4, 6 of float4. Values beyond are clipped; ties are rounded to even. Two factors of up to 256 and 128 rows and
    columns in half types are multiplied, and their rows rounded, in one launch on GPUs with warpgroup products (Hopper); so are groups of a
    row, ``[n, Hadamard(256)]`` or ``[n, *[F] * 4]``, on NVIDIA's GPUs from sm_80 on (orders that are powers of two, to 1024; rows to 32768,
    and of any width if groups of 16 to 1024 columns, a power of two, have scales of their own).
    Elsewhere rounding takes a launch of its own. A row of zeros has scale 1. A row with an infinity or a NaN has a scale of NaN, and
    undefined values; so does a row of float64 whose scale is too large for float32. There are no gradients.

    Args:
        x: ``[*, K]``, a torch tensor of float16, bfloat16, float32 or float64; under autocast of its dtype, as in `kron_matmul`.
        factors: matrices ``[P_i, Q_i]`` of x's dtype and device; ``K = prod P_i``, ``N = prod Q_i``. An integer n stands for the identity
            I_n, as in `kron_matmul`: ``[n, F]`` multiplies each of n groups of a row. `Hadamard` stands for a Hadamard matrix.
        dtype: torch.int8, torch.float8_e4m3fn, torch.float4_e2m1fn_x2 or "int4"; the last two have two values in a byte.
        group_size: how many neighbouring columns have a scale of their own, a divisor of N; None for one scale of each row. Rotations in
            one launch round groups as well; other products are rounded by a launch of their own.
        scale_format: "float32", or "e8m0" for scales that are powers of two, in torch.float8_e8m0fnu: ``2 ** (floor(log2(m)) - e)`` with
            ``m = clip_ratio * max|y|``, at least 2^-126, and 2^e the largest power of two of the format (6 of int8, 8 of float8_e4m3fn,
            2 of others). With groups of 32 these are the MX formats of the Open Compute Project; values up to twice 2^e are clipped.
        prologue: what x is before the product, rounded to x's dtype: ``("swiglu",)``, for ``x = [gate | up]`` of 2 K columns, is
            ``silu(gate) * up``, and ``("rms_norm", weight, eps)`` is ``x / sqrt(mean(x^2) + eps) * weight``, weight ``[K]`` of x's dtype. A
            rotation in one launch with a scale for each row computes it on chip; elsewhere torch does.
        clip_ratio: a number above 0, at most 1: the share of a row's largest absolute value that is the format's largest number.
        precision: of float32 products, as in `kron_matmul`.
        generator: of x's device, for stochastic rounding: up or down with probabilities that make the mean exact, but for clipped values.
            Generators in equal states give equal bits. Rounding is then by torch's operations.

    Returns:
        `Quantized`: values and scales, and `Quantized.dequantize`.

    Raises:
        TypeError: x or a factor is no torch tensor, dtypes that differ or are complex, another format, no generator.
        ValueError: shapes that do not chain, factors that are no matrices, an odd N with two values in a byte, or a clip_ratio,
            group_size, scale_format or prologue out of range.

    Example:
        >>> x, factors = torch.randn(16, 4096), [torch.randn(64, 64) / 8 for _ in range(2)]
        >>> y = kron_quantize(x, factors, "int4")
        >>> y.values.shape, y.scales.shape
        (torch.Size([16, 2048]), torch.Size([16, 1]))
        >>> bool((y.dequantize() - kron_matmul(x, factors)).abs().max() <= 0.5 * y.scales.max() + 1e-3)
        True
    """
    key: Any = None
    given: tuple[Any, ...] = (x,)
    weight: Any
    before, eps, weight = ("", 0.0, None) if prologue is None else _prologue(prologue)
    if type(factors) in (list, tuple) and type(clip_ratio) is float and generator is None and not torch.compiler.is_compiling():
        given = _detached([x, *[f for f in factors if type(f) not in (int, Hadamard)], *_present(weight)])
        places = [f if type(f) in (int, Hadamard) else None for f in factors]
        key = "kron_quantize", dtype, type(group_size), group_size, scale_format, before, eps, clip_ratio, precision, *places
        entry = CACHE.find(key, given)
        if entry is not None:
            return _quantized(entry.call(given, entry.options), dtype, scale_format)
    kind = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if kind not in LARGEST or (kind == INT4) is not isinstance(dtype, str):
        raise type_error("dtype", _FORMATS, repr(dtype))
    if scale_format not in SCALES:
        raise value_error("scale_format", '"float32" or "e8m0"', repr(scale_format))
    listed = factors_and_identities(factors)
    check_tensors(x, [], None, ("x", "factors", ""))
    if not isinstance(generator, torch.Generator | None):
        raise type_error("generator", "None or a torch.Generator", type_name(generator))
    if generator is not None and generator.device.type != x.device.type:
        raise value_error("generator", f"a generator of x's device {x.device}", generator.device)
    if autocast_dtype(x) is not None:
        x, listed, weight = autocasted(x, listed, weight)
        key = None  # which does not tell autocast's dtype
    groups, order, unit, listed = _rotation(x, listed)
    check_tensors(x, listed, None, ("x", "factors", ""), identities=True)
    if x.is_complex():
        raise type_error("x", "a real dtype", x.dtype)
    check_precision(precision)
    for i, f in enumerate(listed, start=len(factors) - len(listed)):
        if isinstance(f, Tensor) and f.ndim != _MATRIX:
            raise value_error(f"factors[{i}]", "a matrix", f"shape {tuple(f.shape)}")
    shape = tuple(x.shape)
    if before == "swiglu":
        if x.ndim == 0 or shape[-1] % 2:
            raise value_error("x", 'an even last dimension for "swiglu", which has [gate | up] there', f"shape {shape}")
        shape = (*shape[:-1], shape[-1] // 2)
    elif before:
        check_tensor("prologue[1]", weight, x, "x")
        if weight.shape != shape[-1:]:
            raise value_error("prologue[1]", f"shape {shape[-1:]}, one for each column of x", f"shape {tuple(weight.shape)}")
    shape = result_shape(shape, [(groups, groups), (order, order), *[shape_of(f) for f in listed]])
    size = _group_size(group_size, shape[-1], kind)
    ratio = check_scalar("clip_ratio", clip_ratio, x)
    if isinstance(ratio, Tensor | complex):
        raise type_error("clip_ratio", "a number", clip_ratio)
    if not 0 < ratio <= 1:
        raise value_error("clip_ratio", "a number above 0, at most 1", clip_ratio)
    step = float(ratio) / (LARGEST[kind] if scale_format == "float32" else 2.0 ** math.floor(math.log2(LARGEST[kind])))
    with torch.no_grad(), without_autocast(x.device):
        # Others stay the tensors that were given: one that comes twice is found in the cache as such.
        x, weight, *listed = _detached([x, weight, *listed])
        if generator is not None or any([is_identity(f) for f in listed]):  # between matrices: a product of its own
            matrices = [Hadamard(order, unit)] if order > 1 else listed
            x = _product(_prepared(before, eps, x, weight), [groups, *matrices], precision)
            groups, order, unit, listed, weight, before, key = shape[-1], 1, 1.0, [], None, "", None
        if generator is not None:
            return _quantized(_of_columns(x, size or shape[-1], step, kind, scale_format, generator), dtype, scale_format)
        listed = [*listed, *_present(weight)]
        key = key if len(given) == 1 + len(listed) else None  # a Hadamard matrix beside others is made
        options = step, unit, groups, order, size, kind, scale_format, before, eps, precision, backend_of_call()
        return _quantized(operator(x, listed, *options, key=key), dtype, scale_format)


def _quantized(found: Sequence[Tensor], dtype: Any, scale_format: str) -> Quantized:
    """Values and scales as their dtypes, of bytes that a program stores."""
    values, scales = found
    if dtype is torch.float4_e2m1fn_x2:
        values = viewed(values, dtype)
    return Quantized(values, viewed(scales, torch.float8_e8m0fnu) if scale_format == "e8m0" else scales)


def _detached(given: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in given])


def _present(weight: Any) -> list[Any]:
    return [] if weight is None else [weight]


def _prologue(prologue: Any) -> tuple[str, float, Any]:
    """(Its name, eps, its weight) of one that is well formed."""
    if isinstance(prologue, tuple) and prologue == ("swiglu",):
        return "swiglu", 0.0, None
    if isinstance(prologue, tuple) and prologue[:1] == ("rms_norm",) and len(prologue) == 3:
        _, weight, eps = prologue
        if isinstance(eps, Real) and float(eps) >= 0:
            return "rms_norm", float(eps), weight
    raise value_error("prologue", _PROLOGUES, repr(prologue))


def _group_size(size: int | None, n: int, kind: str) -> int:
    """Columns with a scale of their own, 0 for all."""
    is_packed = STORED[kind] == torch.uint8
    if size is None:
        if is_packed and n % 2:
            raise value_error("factors", f'an even number of columns in all for "{kind}", which has two in a byte', n)
        return 0
    size = check_integer("group_size", size, "None or an integer")
    if size < 1 or n < 1 or n % size:
        raise value_error("group_size", f"a divisor of the product's {n} columns", size)
    if is_packed and size % 2:
        raise value_error("group_size", f'an even number for "{kind}", which has two columns in a byte', size)
    return size


def _product(x: Tensor, factors: Sequence[Any], precision: str | None) -> Tensor:
    """In float32 for half types, so that it is rounded once."""
    wide, precision = (torch.float32, "high") if x.dtype in HALF_DTYPES else (x.dtype, precision)
    y: Tensor = kron_matmul(x.to(wide), [f.to(wide) if isinstance(f, Tensor) else f for f in factors], precision=precision)
    return y


def _rotation(x: Tensor, factors: list[Any]) -> tuple[int, int, float, list[Any]]:
    """(groups of a row, the order of Sylvester's matrix, its scale, the other factors): the first matrices of the product, 1 if none."""
    groups, rest = 1, list(factors)
    while rest and is_identity(rest[0]):
        groups *= rest.pop(0)
    if all([isinstance(f, Hadamard) and f.is_sylvester for f in rest]) and any([f.order > 1 for f in rest]):
        return groups, math.prod([index(f.order) for f in rest]), math.prod([f.scale for f in rest]), []
    return groups, 1, 1.0, with_matrices(rest, x)


# ---- the program: a product, rounded row by row as it is stored, or by a launch of its own ---------


def _shapes(x: Sequence[int], n: int, size: int, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of values and scales, of x's shape, the product's columns, and those with a scale of their own."""
    return (*x[:-1], n // 2 if STORED[kind] == torch.uint8 else n), (*x[:-1], n // size if size else 1)


def program(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """Tensors are x, the factors behind an identity and a Hadamard matrix, and the weight of "rms_norm".

    Options are the scale over the largest value, that of the Hadamard matrix, the orders of both, the columns with a scale of their own (0:
    all), the formats of values and scales, the prologue and its eps, precision and backend.
    """
    _, unit, groups, order, size, kind, scale_format, prologue, eps, precision, backend = options
    build = Builder(tensors)
    x, *factors = build.inputs
    weight = factors.pop() if prologue == "rms_norm" else None
    columns = order * math.prod([f.shape[1] for f in factors])  # of a group
    n = groups * columns
    shapes = _shapes(x.shape, n, size, kind)
    values, scales = describe(shapes[0], STORED[kind]), describe(shapes[1], SCALES[scale_format])
    if x.numel() == 0 or n == 0:
        one = 1 if scale_format == "float32" else 127

        def of_nothing(x: Tensor) -> tuple[Tensor, Tensor]:
            return x.new_zeros(values.shape, dtype=torch.uint8).view(values.dtype), x.new_full(scales.shape, one, dtype=scales.dtype)

        return build.program(build.call(of_nothing, (x,), values, scales))
    size, is_wide, by_torch = size or n, x.dtype not in HALF_DTYPES, choose_backend(backend, tensors[0]) == "torch"
    rows, width = x.numel() // x.shape[-1], x.shape[-1] // (2 if prologue == "swiglu" else 1)
    parts = n // size if size % columns == 0 else 1  # of a row: products of their own
    targets = (values, scales) if by_torch else (build.empty(values.shape, values.dtype), build.empty(scales.shape, scales.dtype))
    segment = 0 if prologue and size == n else size
    described = describe((rows * parts, width // parts), x.dtype)
    rotation = None if by_torch else one_rotation(described, factors, order, segment, kind, build.device)
    fused = prologue if rotation is not None and size == n else ""
    if prologue and not fused:
        made = describe((*x.shape[:-1], width), x.dtype)
        x = build.call(lambda *given: _prepared(prologue, eps, *given), (x, *_present(weight)), made)
    matrix = build.reshape(x, (rows * parts, -1))
    launcher: Launcher | None = None
    if rotation is not None:
        matrix = matrix if matrix.stride(1) == 1 and not rotation.segment else build.contiguous(matrix)
        of_rows = {} if rotation.segment else {"N": width // parts, "PROLOGUE": fused, "EPS": eps}
        launcher = rotate.launcher(rotation, matrix, factors, FLOAT4=kind == FLOAT4, **of_rows)
        others = (*factors, *[build.contiguous(w) for w in _present(weight) if fused]) or (matrix,)
    elif factors and order == groups == 1 and size == n and kind != FLOAT4 and scale_format == "float32" and not by_torch:
        from fastkron_py.kron.forward import mergeable

        problem = canonical(matrix, factors, False, build.reshape)
        problem = problem._replace(x=mergeable(build, problem.x))
        launcher = quantizing_launch(problem, resolved(precision), kind, build.device)
        matrix, others = (matrix, ()) if launcher is None else (problem.x, tuple(problem.factors))
    if launcher is not None:
        build.launch(launcher, (matrix, others, targets[1], targets[0]), (Scalar(0), bits(0.0 if rotation is None else unit)))
        return build.program(targets)
    y = build.reshape(matrix, (rows * groups, width // groups))
    if not is_wide or order > 1:
        wide = x.dtype if is_wide else torch.float32
        sizes = [(f, f) for f in factor_sizes(order, build.device.type)] if order > 1 else []
        results = [describe(t, wide) for t in (y.shape, *sizes, *[f.shape for f in factors])]
        made = build.call(lambda *given: _widened(order, unit, *given), (y, *factors), *results)
        y, *factors = [made] if isinstance(made, Tensor) else made
    if factors:
        # A row is rounded once, and far below 1 float16 has few bits; for these operands TF32 is exact.
        precision = precision if is_wide or by_torch else "high"
        y, _ = Multiply(factors, "torch" if by_torch else "triton", precision).add(build, y, None)
    if not by_torch and y.dtype != torch.float64:  # rows beyond float32
        launcher = rounding_launch(scales.numel(), size, kind, build.device)
    if launcher is not None:
        build.launch(launcher, (build.contiguous(y), targets[1], targets[0]), (Scalar(0),))
        return build.program(targets)
    y = build.reshape(y, (*x.shape[:-1], n))
    return build.program(
        build.call(lambda y, step: _of_columns(y, size, step, kind, scale_format), (y,), values, scales, scalars=(Scalar(0),))
    )


def _prepared(prologue: str, eps: float, x: Tensor, weight: Any = None) -> Tensor:
    """The prologue's result in x's dtype, contiguous, by torch's operations."""
    if not prologue:
        return x
    t = wide(x)
    if prologue == "swiglu":
        gate, up = t.chunk(2, -1)
        t = torch.nn.functional.silu(gate) * up
    else:
        t = t * torch.rsqrt(t.square().mean(-1, keepdim=True) + eps) * weight
    return t.to(x.dtype).contiguous()


def _widened(order: int, unit: float, *tensors: Tensor) -> list[Tensor]:
    """x, the factors of the Hadamard matrix of this order and scale, and the others: in float32 for half types."""
    dtype = torch.float32 if tensors[0].dtype in HALF_DTYPES else tensors[0].dtype
    x, *factors = [t.to(dtype).contiguous() for t in tensors]  # a memory format copies nothing of the same dtype
    made = constants(matrices, (factor_sizes(order, x.device.type), dtype), x.device) if order > 1 else ()
    return [x, *[t * unit if i == 0 else t for i, t in enumerate(made)], *factors]


def _of_columns(
    y: Tensor, size: int, step: float, kind: str, scale_format: str, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """`rounded`, with a scale for each group of so many columns; on a CPU in slices of rows that stay in cache through all operations."""
    if generator is None and y.is_cpu:
        rows = y.reshape(-1, size)
        found = zip(*[rounded(rows[part], step, kind, scale_format) for part in row_slices(rows, _INTERMEDIATES * size)], strict=True)
        values, scales = (torch.cat(parts).view(*y.shape[:-1], -1) for parts in found)
        return values, scales
    values, scales = rounded(y.unflatten(-1, (-1, size)), step, kind, scale_format, generator)
    return values.flatten(-2), scales.squeeze(-1)


def rounded(
    y: Tensor, step: float, kind: str, scale_format: str = "float32", generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """(Values, scales) of rows of float32 or float64, by torch's operations; ties go to even, or a generator rounds at random."""
    largest = y.abs().amax(-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, (largest * step).clamp(min=torch.finfo(torch.float32).tiny))
    if scale_format == "e8m0":  # without the mantissa
        number, exponent = (torch.int64, -1 << 52) if y.dtype == torch.float64 else (torch.int32, -1 << 23)
        scales = viewed(viewed(scales, number) & exponent, y.dtype)
    scales = scales.float()
    scales = scales.masked_fill(scales.isinf(), math.nan)
    v = (y / scales).clamp(-LARGEST[kind], LARGEST[kind])
    if scale_format == "e8m0":
        scales = (viewed(scales, torch.int32) >> 23).to(torch.uint8)
    if kind in _FLOATS:
        return _floats(v, kind, generator), scales
    whole = _integers(v.nan_to_num(0.0), generator).to(torch.int8)
    return whole if kind == "int8" else _packed(whole), scales


def _integers(v: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return v.round_()
    below = v.floor()  # floor(v + random) would be a number beyond v where the sum is rounded up: the largest one is, in some rows
    return below + (torch.rand(v.shape, generator=generator, dtype=v.dtype, device=v.device) >= 1 - (v - below))


def _floats(v: Tensor, kind: str, generator: torch.Generator | None) -> Tensor:
    """Numbers within the range of a floating-point format in that format."""
    if kind == "float8_e4m3fn" and generator is None:
        return v.to(torch.float8_e4m3fn)
    v = v.nan_to_num(0.0)
    mantissa, least = _FLOATS[kind]
    exponent = (torch.frexp(v).exponent - 1 - mantissa).clamp(min=least)  # of the distance of neighbouring numbers
    distance = viewed((exponent + 127) << 23, torch.float32)
    whole = _integers(v / distance, generator)
    if kind == "float8_e4m3fn":
        return (whole * distance).to(torch.float8_e4m3fn)
    # Codes of an exponent begin where those of the one before end.
    return _packed((whole.abs() + 2 * (exponent + 1) + torch.where(v < 0, 8, 0)).to(torch.int8))


def _packed(halves: Tensor) -> Tensor:
    """Two neighbours' low four bits in a byte."""
    low, high = viewed(halves, torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = (low & 15) | (high << 4)
    return packed


# ---- launches: two steps whose slices are rows, and a pass over rows of any length -----------------


def _converts_to(kind: str, device: torch.device) -> bool:
    """Whether Triton has the conversion to a format; its interpreter loses carries of float8's."""
    if kind != "float8_e4m3fn":
        return True
    return not is_interpreting() and (devices.gpu_of(device).capability or (0, 0)) >= _FLOAT8


def one_rotation(x: Tensor, factors: Sequence[Tensor], order: int, segment: int, kind: str, device: torch.device) -> rotate.Rotation | None:
    """The launch that rotates the groups of rows x ``[rows, width]``, and rounds; None where the kernels do not take them.

    A group has a Hadamard matrix of this order, or factors; a segment is the columns with a scale of their own, 0 a program's whole row.
    """
    has_cores = is_interpreting() or (devices.gpu_of(device).capability or (0, 0)) >= rotate.CAPABILITY
    if x.dtype not in HALF_DTYPES or not has_cores or not _converts_to(kind, device):
        return None
    return rotate.rotation(x.shape[1], order, [f.shape for f in factors], x.dtype == torch.bfloat16, segment)


def quantizing_launch(problem: Canonical, precision: str, kind: str, device: torch.device) -> Launcher | None:
    """The launch of a multiply, by one matrix of each factor, that rounds; None where no launch has whole rows on chip."""
    from fastkron_py.kron.forward import launch_problem, multiply_problem
    from fastkron_py.kron.kernels.epilogues import TO_FLOAT8, TO_INTEGERS

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
    made = launch_problem(whole, launch, (1, rows, 1, 1), 0, whole.x, Rows(0, width, 1), final=False)
    return replace(made, epilogue=TO_FLOAT8 if kind == "float8_e4m3fn" else TO_INTEGERS, z=Rows(0, 1, 1)).launcher


def rounding_launch(rows: int, n: int, kind: str, device: torch.device) -> Launcher | None:
    """The launch that rounds rows of n elements; None where Triton does not know the format on this GPU."""
    if not _converts_to(kind, device):
        return None
    from fastkron_py.kron.kernels.quantize import _quantize_rows_kernel
    from fastkron_py.runtime.kernels import LaunchConfig
    from fastkron_py.runtime.launch import Launcher

    block = min(_WIDEST, max(32, next_power_of_two(n)))
    at_once = max(1, _WIDEST // 2 // block)
    num_warps = 4 if block <= _WIDEST // 2 else 8
    arguments = {"rows": rows, "N": n, "BLOCK": block, "ROWS": at_once, "FLOAT4": kind == FLOAT4, "num_warps": num_warps}
    return Launcher([LaunchConfig(_quantize_rows_kernel, (math.ceil(rows / at_once),), arguments)])


# ---- the operator ----------------------------------------------------------------------------------


def _fake(x: Tensor, factors: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    _, _, groups, order, size, kind, scale_format, *_ = options
    n = groups * order * math.prod([f.shape[1] for f in factors if f.ndim > 1])
    values, scales = _shapes(x.shape, n, size, kind)
    return x.new_empty(values, dtype=STORED[kind]), x.new_empty(scales, dtype=SCALES[scale_format])


operator = Operator(
    "kron_quantize(Tensor x, Tensor[] factors, float step, float unit, int groups, int order, int group_size, str kind, str scale_format,"
    " str prologue, float eps, str? precision, str backend) -> (Tensor, Tensor)",
    program=program,
    fake=_fake,
    vmap="rows",
    scalars=(0,),
)
