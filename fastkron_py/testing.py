"""`assert_close`: is a result as close to the truth as its dtype and its number of roundings allow?

Two errors are bounded, since each alone lets something through: the root mean square (relative Frobenius)
error averages a single wrong element away, and a largest error alone tolerates a small error everywhere.

========== ============== ======================================= ===========================================
dtype      unit roundoff  RMS error, relative to the reference    largest error, relative to the scale
========== ============== ======================================= ===========================================
float16    u = 2**-11     steps * u                               4 * steps * u
bfloat16   u = 2**-8      steps * u                               4 * steps * u
float32    u = 2**-24     1e-6 (about 17 u)                       4e-6
float64    u = 2**-53     1e-14 * sqrt(steps)  (about 90 u)       4e-14 * sqrt(steps)
========== ============== ======================================= ===========================================

complex64 and complex128 are judged as float32 and float64, by absolute values. ``steps`` counts how
often a result may have been rounded to its dtype: the number of factors, at most. 16-bit floats
accumulate in float32, so these roundings are their whole error; a float32 result has the same budget
however many factors it went through.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime.errors import value_error

_UNIT_ROUNDOFF: Final = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_REAL: Final = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_REFERENCE: Final = (torch.float64, torch.complex128)


def tolerances(dtype: torch.dtype, steps: int = 1) -> tuple[float, float]:
    """The table above: (bound of the RMS error, bound of the largest error) for results of a dtype.

    Raises:
        ValueError: a dtype that is not in the table, or steps below 1.

    Example:
        >>> tolerances(torch.float32)
        (1e-06, 4e-06)
    """
    if steps < 1:
        raise value_error("steps", "at least 1", steps)
    dtype = _REAL.get(dtype, dtype)
    if dtype in _UNIT_ROUNDOFF:
        rms = steps * _UNIT_ROUNDOFF[dtype]
    elif dtype == torch.float32:
        rms = 1e-6
    elif dtype == torch.float64:
        rms = 1e-14 * math.sqrt(steps)
    else:
        raise value_error("actual", "a floating-point or complex dtype", dtype)
    return rms, 4 * rms


def assert_close(
    actual: Any,
    expected: Any,
    *,
    magnitude: Any = None,
    steps: int = 1,
    rms_tol: float | None = None,
    max_tol: float | None = None,
    name: str = "result",
) -> None:
    """Assert that a result agrees with a reference within the tolerances of its dtype.

    NaN and infinities have to stand at the same places, infinities with the same sign; the other elements
    are compared in float64.

    Args:
        actual: the result, of any shape: a torch tensor or an array.
        expected: the reference, of the same shape, from the same (already rounded) inputs, in float64
            (complex128 for complex results), or of actual's own dtype.
        magnitude: scale of each element's error, broadcasts to the result: where cancellation makes elements
            small, pass ``|x| @ |K|``. Without it the scale is the largest finite ``|expected|``.
        steps: how often the result may have been rounded to its dtype.
        rms_tol: replaces the table's bound of ``norm(actual - expected) / norm(expected)``, whatever magnitude
            is; where all of a result cancels, ``math.inf`` leaves the judgement to the largest error.
        max_tol: replaces the table's bound of ``max(|actual - expected| / scale)``.
        name: how the error calls the result.

    Raises:
        AssertionError: shape, dtype, NaN, infinities or values differ; it shows the worst element, both
            errors and both bounds.
        ValueError: a dtype without tolerances, or steps below 1.

    Example:
        >>> x, factors = torch.randn(3, 6), [torch.randn(2, 2), torch.randn(3, 3)]
        >>> y = fastkron_py.kron_matmul(x, factors)
        >>> doubles = [f.double() for f in factors]
        >>> assert_close(y, fastkron_py.reference.kron_matmul(x.double(), doubles), steps=len(factors))
    """
    actual, expected = _tensor(actual), _tensor(expected)
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, but the reference has {tuple(expected.shape)}")
    if actual.is_complex() != expected.is_complex() or expected.dtype not in (actual.dtype, *_REFERENCE):
        raise AssertionError(f"{name}: dtype {actual.dtype} cannot be compared with a reference of {expected.dtype}")
    rms_bound, max_bound = tolerances(actual.dtype, steps)
    rms_bound = rms_bound if rms_tol is None else rms_tol
    max_bound = max_bound if max_tol is None else max_tol
    wide = torch.complex128 if actual.is_complex() else torch.float64
    a, e = actual.to(wide), expected.to(wide)
    _check_special("NaN", torch.isnan, a, e, name)
    _check_special("an infinity of this sign", _infinity_signs, a, e, name)

    finite = torch.isfinite(e)
    error = torch.where(finite, (a - e).abs(), 0.0)
    size = torch.where(finite, e.abs(), 0.0)
    if error.numel() == 0:
        return
    scale = size.max().expand_as(size)
    if magnitude is not None:
        scale = torch.where(finite, _tensor(magnitude).abs().double().expand_as(size), 0.0)
    # Below the smallest normal number a dtype's spacing no longer shrinks with the value.
    spacing = torch.finfo(_REAL.get(actual.dtype, actual.dtype)).smallest_normal * torch.finfo(actual.dtype).eps * steps
    allowed = max_bound * scale + spacing
    excess = error / allowed
    worst = int(excess.argmax())
    rms_error, rms_size = float(error.norm()), float(size.norm())
    if float(excess.flatten()[worst]) <= 1 and rms_error <= rms_bound * rms_size + spacing * math.sqrt(error.numel()):
        return

    def relative(part: float, whole: float) -> str:
        return f"{part / whole:.3g}" if whole else f"{part:.3g} (absolute: the reference is zero)"

    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    raise AssertionError(
        f"{name} of shape {tuple(actual.shape)}, {actual.dtype}, steps={steps}, is not close to its reference:\n"
        f"  largest error {relative(float(error[index]), float(scale[index]))}, allowed {max_bound:.3g}, at {index}:"
        f" {actual[index].item()} instead of {expected[index].item()}\n"
        f"  RMS error     {relative(rms_error, rms_size)}, allowed {rms_bound:.3g}\n"
        f"  {int((excess > 1).sum())} of {error.numel()} elements exceed the bound of the largest error"
    )


def _tensor(value: Any) -> Tensor:
    """A detached CPU tensor; an array is copied (torch warns of read-only ones)."""
    return value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value)


def _infinity_signs(t: Tensor) -> Tensor:
    """-1, 0 or 1 for minus infinity, finite or NaN, infinity; of complex numbers for each part."""
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return torch.isposinf(t).to(torch.int8) - torch.isneginf(t).to(torch.int8)


def _check_special(what: str, where: Any, actual: Tensor, expected: Tensor, name: str) -> None:
    differ = where(actual) != where(expected)
    if not bool(differ.any()):
        return
    if differ.ndim > actual.ndim:  # parts of complex numbers
        differ = differ.any(-1)
    index = tuple(int(i) for i in differ.nonzero()[0])
    raise AssertionError(
        f"{name}: only one of result and reference has {what} at {index}: {actual[index].item()} instead of "
        f"{expected[index].item()}; so it is at {int(differ.sum())} of {actual.numel()} elements"
    )
