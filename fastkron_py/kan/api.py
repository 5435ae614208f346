"""`poly_kan`: the layer of a polynomial Kolmogorov-Arnold network."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastkron_py.kan import operator
from fastkron_py.kan.bases.registry import MOST_DEGREE, Basis, find_basis
from fastkron_py.runtime.arrays import through_bridge
from fastkron_py.runtime.backend import backend_of_call
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import check_choice, check_finite, check_integer, check_precision, check_real_dtype, check_tensor
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.precision import autocast_dtype, cast, wide

ArrayT = TypeVar("ArrayT")

NORMALIZATIONS: Final = ("tanh", "clamp", "minmax", "layer_norm", "none")
EVALUATIONS: Final = ("recurrence", "lut")
LUT_SIZE: Final = 4096
MOST_LUT_SIZE: Final = 1 << 20
# What the kernel still applies, after torch did the reductions.
_ELEMENTWISE: Final = {"tanh": "tanh", "clamp": "clamp", "minmax": "clamp", "layer_norm": "tanh", "none": "none"}
_CACHED: Final = ("tanh", "clamp", "none")  # normalisations that leave x to the kernel, so that guards on it are guards on its operand


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
        coefficients: ``[degree + 1, out, in]``, of x's array type, dtype and device; degree from 1 to 64. Not a power of the basis but one
            number for each of its functions, so B-splines and radial functions have degree + 1 of them.
        basis: ``"chebyshev"`` (first kind), ``"chebyshev_u"``, ``"legendre"``, ``"hermite"`` (H_n / sqrt(2^n n!)), ``"jacobi"``,
            ``"gegenbauer"``, ``"fourier"`` (1, sin pi t, cos pi t, sin 2 pi t, ...), ``"bspline"``, ``"rbf"``, or one that was registered.
        bias: ``[out]``.
        basis_parameters: by name: ``a`` and ``b`` above -1 (Jacobi, default 0), ``alpha`` above -0.5 and not 0 (Gegenbauer, 1), ``order``
            1 to 3 (B-spline, 3), ``width`` in distances of centres (rbf, 1).
        normalization: brings x to [-1, 1]: ``"tanh"``; ``"clamp"``; ``"minmax"``, the range given by bounds, then clamped;
            ``"layer_norm"``, each row to mean 0 and variance 1, then tanh; or ``"none"``.
        bounds: (lowest, highest) for ``"minmax"``, numbers, or tensors or arrays of x's array type that broadcast to ``[in]``. They are
            constants: no gradient. None takes x's own, for each input over the finite numbers of all rows.
        evaluation: ``"recurrence"``, or ``"lut"``: lines between lut_size samples on [-1, 1], which err by h^2 / 8 max |B_d''|,
            h = 2 / (lut_size - 1); gradients are those of the lines. Not with ``"none"``.
        lut_size: samples, from 2 to 2^20.
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        ``[..., out]``, of x's array type and dtype (under autocast, of autocast's dtype). A NaN of x makes its row NaN, and no other;
        infinities count as -1 and 1 under ``"tanh"``, ``"clamp"`` and ``"minmax"``.

    Raises:
        TypeError: an argument of the wrong type or dtype, or array types or dtypes that differ.
        ValueError: shapes that do not fit, an unknown basis, normalisation or evaluation, parameters that the basis does not
            have, bounds that are not finite or fall.

    Example:
        >>> x, coefficients = torch.randn(100, 8), torch.randn(5, 3, 8)
        >>> poly_kan(x, coefficients, basis="legendre").shape
        torch.Size([100, 3])
    """
    key: tuple[Any, ...] | None = None
    # Dynamo has no use for a cache of calls.
    if normalization in _CACHED and bounds is None and basis_parameters is None and not torch.compiler.is_compiling():
        key = "poly_kan", basis, normalization, evaluation, type(lut_size), lut_size, precision, bias is None
        given: Any = (x, coefficients) if bias is None else (x, coefficients, bias)
        entry = CACHE.find(key, given)
        if entry is not None:
            return entry.call(given, entry.options)
    check_precision(precision)
    if isinstance(x, Tensor):
        checked = _checked(basis, basis_parameters, normalization, bounds, evaluation, lut_size)
        return _poly_kan(x, coefficients, bias, checked, precision, key)  # type: ignore[arg-type,return-value]
    arrays = {"x": x, "coefficients": coefficients} | ({} if bias is None else {"bias": bias})
    if isinstance(bounds, tuple | list):
        arrays |= {f"bounds[{i}]": b for i, b in enumerate(bounds) if not isinstance(b, numbers.Real)}

    def call(loaded: dict[str, Tensor]) -> Tensor:
        given = tuple(loaded.get(f"bounds[{i}]", b) for i, b in enumerate(bounds)) if isinstance(bounds, tuple | list) else bounds
        checked = _checked(basis, basis_parameters, normalization, given, evaluation, lut_size)
        return _poly_kan(loaded["x"], loaded["coefficients"], loaded.get("bias"), checked, precision, None)

    return through_bridge(arrays, call)


class _Checked(NamedTuple):
    """Arguments that are no tensors of the product; description: of the basis and its parameters, for operators."""

    basis: Basis
    parameters: tuple[float, ...]
    description: str
    normalization: str
    bounds: Any
    table_size: int


def _checked(basis: Any, parameters: Any, normalization: Any, bounds: Any, evaluation: Any, lut_size: Any) -> _Checked:
    from fastkron_py.kan.layer_config import describe

    found = find_basis(basis)
    check_choice("normalization", normalization, NORMALIZATIONS)
    check_choice("evaluation", evaluation, EVALUATIONS)
    if bounds is not None and normalization != "minmax":
        raise value_error("bounds", "None, since normalization is not 'minmax'", type_name(bounds))
    bounds = None if bounds is None else _checked_bounds(bounds)
    size = 0
    if evaluation == "lut":
        size = check_integer("lut_size", lut_size)
        if not 2 <= size <= MOST_LUT_SIZE:
            raise value_error("lut_size", f"2 to {MOST_LUT_SIZE}", size)
        if normalization == "none":
            raise value_error("evaluation", "'recurrence', since a table covers [-1, 1] and normalization is 'none'", "'lut'")
    numbers_of_basis = check_parameters(found, parameters)
    return _Checked(found, numbers_of_basis, describe(found.name, numbers_of_basis), normalization, bounds, size)


def _checked_bounds(bounds: Any) -> tuple[Any, Any]:
    """A pair of tensors, whose numbers are not looked at, and of finite numbers, which do not fall."""
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise type_error("bounds", "a pair (lowest, highest)", type_name(bounds))
    low, high = (b if isinstance(b, Tensor) else check_finite(f"bounds[{i}]", b, "a number or a tensor") for i, b in enumerate(bounds))
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and low > high:
        raise value_error("bounds", "the lowest number not above the highest", (low, high))
    return low, high


def check_arguments(basis: Any, parameters: Any, normalization: Any, evaluation: Any, lut_size: Any, terms: int) -> None:
    """Refuse arguments that `poly_kan` would refuse of a layer that has no tensors yet."""
    _check_terms(terms, _checked(basis, parameters, normalization, None, evaluation, lut_size))


def _check_terms(terms: int, checked: _Checked) -> None:
    if not 2 <= terms <= MOST_DEGREE + 1:
        raise value_error("degree", f"1 to {MOST_DEGREE}", terms - 1)
    checked.basis.check(terms, checked.parameters)


def check_parameters(basis: Any, given: Any) -> tuple[float, ...]:
    """The basis's parameters in its order, given by name or by default."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise type_error("basis_parameters", "a mapping of names to numbers", type_name(given))
    unknown = [name for name in given if name not in basis.parameters]
    if unknown:
        names = ", ".join(basis.parameters) or "no parameters"
        raise value_error("basis_parameters", f"{names}, for basis {basis.name}", repr(unknown[0]))
    return tuple(_constant(f"basis_parameters[{name!r}]", given.get(name, default)) for name, default in basis.parameters.items())


def _constant(name: str, value: Any) -> float:
    """A finite float. A graph is compiled for its value, which kernels have for a constant: Dynamo makes a symbol of a float else."""
    number = check_finite(name, value)
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        number = guard_scalar(number)
    return float(number)


def _poly_kan(
    x: Tensor, coefficients: Tensor, bias: Tensor | None, checked: _Checked, precision: str | None, key: tuple[Any, ...] | None
) -> Tensor:
    """The layer's result; the call is found by this key from now on, if there is one."""
    check_tensor("x", x, x, "x")
    dtype, normalization = autocast_dtype(x), checked.normalization
    like = x
    if dtype is not None:
        like, coefficients, bias = (cast(t, dtype) for t in (x.new_empty(0), coefficients, bias))
    _check_shapes(x, like, coefficients, bias, checked)
    # Operations on many numbers of x are done before x is rounded, in float32 at least, as autocast does it for torch's norms.
    if normalization == "minmax":
        x = _to_unit_range(wide(x), checked.bounds)
    elif normalization == "layer_norm":
        x = torch.nn.functional.layer_norm(wide(x), x.shape[-1:])
    x = x.to(like.dtype)
    options = checked.description, _ELEMENTWISE[normalization], checked.table_size, precision, backend_of_call()
    return operator.poly_kan(x, coefficients, bias, *options, key=None if dtype is not None else key)


def _check_shapes(x: Tensor, like: Tensor, coefficients: Any, bias: Any, checked: _Checked) -> None:
    """Check the shapes of x and the parameters; like has the dtype that x is multiplied in."""
    check_real_dtype("x", like.dtype, "a real dtype among")
    check_tensor("coefficients", coefficients, like, "x")
    if x.ndim == 0:
        raise value_error("x", "at least one dimension [..., in]", "a 0-dimensional tensor")
    if coefficients.ndim != 3:
        raise value_error("coefficients", "a tensor [degree + 1, out, in]", f"shape {tuple(coefficients.shape)}")
    terms, num_out, num_in = coefficients.shape
    _check_terms(terms, checked)
    if num_in != x.shape[-1]:
        raise value_error("coefficients", f"a last dimension of x's {x.shape[-1]} inputs", f"shape {tuple(coefficients.shape)}")
    if bias is not None:
        check_tensor("bias", bias, like, "x")
        if bias.ndim != 1 or bias.shape[0] != num_out:
            raise value_error("bias", f"shape ({num_out},), the coefficients' outputs", f"shape {tuple(bias.shape)}")


def own_bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest finite number of each input over all rows of ``x [..., in]``: two ``[in]``; of none, inf and -inf."""
    rows = x.detach().reshape(-1, x.shape[-1])
    if rows.shape[0] == 0:
        return rows.new_full(x.shape[-1:], math.inf), rows.new_full(x.shape[-1:], -math.inf)
    absent = ~(rows.abs() < math.inf)  # isfinite() is two launches more on a GPU
    return rows.masked_fill(absent, math.inf).amin(0), rows.masked_fill(absent, -math.inf).amax(0)


def usable_bounds(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds, where low is above high -1 and 1: of an x without numbers."""
    absent = low > high
    return torch.where(absent, -1.0, low), torch.where(absent, 1.0, high)


def _to_unit_range(x: Tensor, bounds: Any) -> Tensor:
    """X with the range between the bounds mapped to [-1, 1]; a range of width 0 to its middle. By halves, whose sums are finite."""
    if bounds is None:
        low, high = usable_bounds(*own_bounds(x))
    else:
        low, high = (_bound(i, b, x) for i, b in enumerate(bounds))
    half = high / 2 - low / 2
    return (x - (low / 2 + high / 2)) / torch.where(half > 0, half, 0.5)


def _bound(index: int, bound: Any, x: Tensor) -> Tensor:
    """One of the bounds, in the dtype of x."""
    name = f"bounds[{index}]"
    if not isinstance(bound, Tensor):
        return x.new_full((), bound)
    num_in = x.shape[-1]
    # No tuple of both: Dynamo takes a symbol in it for none of them.
    if bound.ndim > 1 or (bound.ndim == 1 and bound.shape[0] != 1 and bound.shape[0] != num_in):
        raise value_error(name, f"a shape that broadcasts to ({num_in},)", f"shape {tuple(bound.shape)}")
    if bound.is_complex():
        raise type_error(name, "a real dtype", bound.dtype)
    if bound.device != x.device and bound.ndim:
        raise value_error(name, f"x's device {x.device}", bound.device)
    return bound.detach().to(x.dtype)
