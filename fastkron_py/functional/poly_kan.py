"""`poly_kan`: the layer of a polynomial Kolmogorov-Arnold network."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from fastkron_py.arrays import find_bridge
from fastkron_py.errors import type_error, type_name, value_error
from fastkron_py.functional.autocast import cast
from fastkron_py.functional.checks import check_integer, check_precision, check_tensor
from fastkron_py.ops import poly_kan as operator
from fastkron_py.ops import recorded_poly_kan as recorded
from fastkron_py.ops.backend import requested_backend

ArrayT = TypeVar("ArrayT")

NORMALIZATIONS: Final = ("tanh", "clamp", "minmax", "layer_norm", "none")
EVALUATIONS: Final = ("recurrence", "lut")
LUT_SIZE: Final = 4096
MOST_LUT_SIZE: Final = 1 << 20
_REAL: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What a kernel does to x once it has been brought here, by torch, as far as it takes more than one element at a time.
_ELEMENTWISE: Final = {"tanh": "tanh", "clamp": "clamp", "minmax": "clamp", "layer_norm": "tanh", "none": "none"}
_RECORDED: Final = ("tanh", "clamp", "none")


def poly_kan(
    x: ArrayT,
    coefficients: ArrayT,
    *,
    basis: str = "chebyshev",
    bias: ArrayT | None = None,
    basis_parameters: Mapping[str, float] | None = None,
    normalization: str = "tanh",
    bounds: tuple[Any, Any] | None = None,
    evaluation: str = "recurrence",
    lut_size: int = LUT_SIZE,
    precision: str | None = None,
) -> ArrayT:
    """Sum learned functions of every input: ``y[..., o] = bias[o] + sum_j sum_d coefficients[d, o, j] * B_d(norm(x[..., j]))``.

    On a GPU this is one matrix product whose left operand, the basis, is made in registers: neither this function nor its gradients store
    a tensor of the basis's size. Second derivatives do.

    Chebyshev networks: Sidharth et al., "Chebyshev Polynomial-Based Kolmogorov-Arnold Networks", 2024; fused kernels: Yu et al., "PolyKAN".

    Args:
        x: ``[..., in]``. A torch tensor, or a NumPy or CuPy array; float16, bfloat16, float32 or float64.
        coefficients: ``[degree + 1, out, in]``, of x's kind, dtype and device; degree from 1 to 64. Not a power of the basis but one
            number for each of its functions, so B-splines and radial functions have degree + 1 of them.
        basis: ``"chebyshev"`` (first kind), ``"chebyshev_u"``, ``"legendre"``, ``"hermite"`` (H_n / sqrt(2^n n!)), ``"jacobi"``,
            ``"gegenbauer"``, ``"fourier"`` (1, sin pi t, cos pi t, sin 2 pi t, ...), ``"bspline"``, ``"rbf"``, or one that was registered.
        bias: ``[out]``.
        basis_parameters: by name: ``a`` and ``b`` above -1 (Jacobi, default 0), ``alpha`` above -0.5 and not 0 (Gegenbauer, 1), ``order``
            1 to 3 (B-spline, 3), ``width`` in distances of centres (rbf, 1).
        normalization: brings x to [-1, 1]: ``"tanh"``; ``"clamp"``; ``"minmax"``, the range given by bounds, then clamped;
            ``"layer_norm"``, each row to mean 0 and variance 1, then tanh; or ``"none"``.
        bounds: (lowest, highest) for ``"minmax"``, numbers or tensors that broadcast to ``[in]``. They are constants: no gradient.
            None takes x's own, for each input over all rows.
        evaluation: ``"recurrence"``, or ``"lut"``: lines between lut_size samples on [-1, 1], which err by h^2 / 8 max |B_d''|,
            h = 2 / (lut_size - 1); gradients are those of the lines. Not with ``"none"``.
        lut_size: samples, from 2 to 2^20.
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        ``[..., out]``, of x's kind and dtype (under autocast, of autocast's dtype). A NaN of x makes its row NaN, and no other.

    Raises:
        TypeError: an argument of the wrong kind or dtype, or kinds or dtypes that differ.
        ValueError: shapes that do not fit, an unknown basis, normalisation or evaluation, parameters that the basis does not have.

    Example:
        >>> x, coefficients = torch.randn(100, 8), torch.randn(5, 3, 8)
        >>> poly_kan(x, coefficients, basis="legendre").shape
        torch.Size([100, 3])
    """
    # Layers that were computed before, with what needs no look at x first. Dynamo has no use for that.
    recordable = normalization in _RECORDED and bounds is None and basis_parameters is None and not torch.compiler.is_compiling()
    key = (basis, normalization, evaluation, lut_size)
    if recordable:
        y = recorded.replay(x, coefficients, bias, key, precision)
        if y is not None:
            return y  # type: ignore[return-value]
    check_precision(precision)
    described = _described(basis, basis_parameters, normalization, bounds, evaluation, lut_size)
    if isinstance(x, Tensor):
        return _poly_kan(x, coefficients, bias, described, precision, key if recordable else None)  # type: ignore[arg-type,return-value]
    arrays = [x, coefficients] if bias is None else [x, coefficients, bias]
    labels = ["x", "coefficients", "bias"][: len(arrays)]
    bridge = find_bridge(arrays, labels)
    with bridge.context():
        loaded = [bridge.load(a, label) for a, label in zip(arrays, labels, strict=True)]
        y = _poly_kan(loaded[0], loaded[1], loaded[2] if bias is not None else None, described, precision, None)
        return bridge.give_back(y)  # type: ignore[no-any-return]


class _Described:
    """Arguments that are no tensors of the product, checked."""

    def __init__(
        self, basis: Any, parameters: tuple[float, ...], description: str, normalization: str, bounds: Any, table_size: int
    ) -> None:
        self.basis = basis
        self.parameters = parameters
        self.description = description
        self.normalization = normalization
        self.bounds = bounds
        self.table_size = table_size


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise type_error(name, f"one of {', '.join(known)}", type_name(value))
    if value not in known:
        raise value_error(name, f"one of {', '.join(known)}", repr(value))


def _described(basis: Any, parameters: Any, normalization: Any, bounds: Any, evaluation: Any, lut_size: Any) -> _Described:
    from fastkron_py.kernels.poly_kan.bases import find_basis
    from fastkron_py.kernels.poly_kan.spec import describe

    found = find_basis(basis)
    _one_of("normalization", normalization, NORMALIZATIONS)
    _one_of("evaluation", evaluation, EVALUATIONS)
    if bounds is not None and normalization != "minmax":
        raise value_error("bounds", "None, since normalization is not 'minmax'", type_name(bounds))
    if bounds is not None and not (isinstance(bounds, tuple | list) and len(bounds) == 2):
        raise type_error("bounds", "a pair (lowest, highest)", type_name(bounds))
    size = 0
    if evaluation == "lut":
        size = check_integer("lut_size", lut_size)
        if not 2 <= size <= MOST_LUT_SIZE:
            raise value_error("lut_size", f"2 to {MOST_LUT_SIZE}", size)
        if normalization == "none":
            raise value_error("evaluation", "'recurrence', since a table covers [-1, 1] and normalization is 'none'", "'lut'")
    checked = check_parameters(found, parameters)
    return _Described(found, checked, describe(found.name, checked), normalization, bounds, size)


def check_described(basis: Any, parameters: Any, normalization: Any, evaluation: Any, lut_size: Any, terms: int) -> None:
    """Refuse what `poly_kan` would refuse of a layer that has no tensors yet."""
    described = _described(basis, parameters, normalization, None, evaluation, lut_size)
    _check_terms(terms, described)


def _check_terms(terms: int, described: _Described) -> None:
    from fastkron_py.kernels.poly_kan.bases import MOST_DEGREE

    if not 2 <= terms <= MOST_DEGREE + 1:
        raise value_error("degree", f"1 to {MOST_DEGREE}", terms - 1)
    described.basis.check(terms, described.parameters)


def check_parameters(basis: Any, given: Any) -> tuple[float, ...]:
    """The basis's parameters in its order, given by name or by default."""
    if given is None:
        return tuple(basis.parameters.values())
    if not isinstance(given, Mapping):
        raise type_error("basis_parameters", "a mapping of names to numbers", type_name(given))
    unknown = [name for name in given if name not in basis.parameters]
    if unknown:
        names = ", ".join(basis.parameters) or "no parameters"
        raise value_error("basis_parameters", f"{names}, for basis {basis.name}", repr(unknown[0]))
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise type_error(f"basis_parameters[{name!r}]", "a number", type_name(value))
        if not math.isfinite(value):
            raise value_error(f"basis_parameters[{name!r}]", "a finite number", value)
    return tuple(float(given.get(name, default)) for name, default in basis.parameters.items())


def _poly_kan(
    x: Tensor, coefficients: Tensor, bias: Tensor | None, described: _Described, precision: str | None, key: tuple[Any, ...] | None
) -> Tensor:
    """The layer's result, recorded by this key if there is one."""
    device_type = x.device.type
    if device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x, coefficients, bias = (cast(t, dtype) for t in (x, coefficients, bias))
    _check_shapes(x, coefficients, bias, described)
    normalization = described.normalization
    if normalization == "minmax":
        x = _to_unit_range(x, described.bounds)
    elif normalization == "layer_norm":
        x = torch.nn.functional.layer_norm(x, x.shape[-1:])
    # Dynamo cannot read a context variable: a compiled graph asks for the backend when it runs.
    backend = "" if torch.compiler.is_compiling() else requested_backend()
    options = (described.description, _ELEMENTWISE[normalization], described.table_size, precision, backend)
    y = None if key is None else recorded.record(x, coefficients, bias, key, precision, options)
    return operator.poly_kan(x, coefficients, bias, *options) if y is None else y


def _check_shapes(x: Tensor, coefficients: Any, bias: Any, described: _Described) -> None:
    check_tensor("x", x, x, "x")
    if x.dtype not in _REAL:
        raise type_error("x", "a real dtype among " + ", ".join(str(d).removeprefix("torch.") for d in _REAL), x.dtype)
    check_tensor("coefficients", coefficients, x, "x")
    if x.ndim == 0:
        raise value_error("x", "at least one dimension [..., in]", "a 0-dimensional tensor")
    if coefficients.ndim != 3:
        raise value_error("coefficients", "a tensor [degree + 1, out, in]", f"shape {tuple(coefficients.shape)}")
    terms, num_out, num_in = coefficients.shape
    _check_terms(terms, described)
    if num_in != x.shape[-1]:
        raise value_error("coefficients", f"a last dimension of x's {x.shape[-1]} inputs", f"shape {tuple(coefficients.shape)}")
    if bias is not None:
        check_tensor("bias", bias, x, "x")
        if tuple(bias.shape) != (num_out,):
            raise value_error("bias", f"shape ({num_out},), the coefficients' outputs", f"shape {tuple(bias.shape)}")


def own_bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest number of each input over all rows of ``x [..., in]``, NaN left out: two ``[in]``."""
    rows = x.detach().reshape(-1, x.shape[-1])
    if rows.shape[0] == 0:
        return rows.new_zeros(x.shape[-1]), rows.new_zeros(x.shape[-1])
    absent = rows.isnan()
    return rows.masked_fill(absent, math.inf).amin(0), rows.masked_fill(absent, -math.inf).amax(0)


def _to_unit_range(x: Tensor, bounds: Any) -> Tensor:
    """X with the range between the bounds mapped to [-1, 1]; a range of width 0 to its middle."""
    low, high = own_bounds(x) if bounds is None else (_bound(i, b, x) for i, b in enumerate(bounds))
    span = high - low
    scale = 2 / torch.where(span > 0, span, 1)
    return (x - (low + high) / 2) * scale


def _bound(index: int, bound: Any, x: Tensor) -> Tensor:
    name = f"bounds[{index}]"
    if isinstance(bound, Tensor):
        if bound.ndim > 1 or (bound.ndim == 1 and bound.shape[0] not in (1, x.shape[-1])):
            raise value_error(name, f"a shape that broadcasts to ({x.shape[-1]},)", f"shape {tuple(bound.shape)}")
        if bound.device != x.device and bound.ndim:
            raise value_error(name, f"x's device {x.device}", bound.device)
        return bound.detach().to(x.dtype)
    if isinstance(bound, bool) or not isinstance(bound, numbers.Real):
        raise type_error(name, "a number or a tensor", type_name(bound))
    return x.new_full((), float(bound))
