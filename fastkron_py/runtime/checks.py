"""Argument checks that operators share. Every refusal names the argument, the expectation and the value given."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.runtime.eager import takes_fast_path, wants_gradient
from fastkron_py.runtime.errors import type_error, type_name, value_error

PRECISIONS: Final = ("highest", "high", "medium")
DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
HALF_DTYPES: Final = (torch.float16, torch.bfloat16)
REAL_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SCALAR: Final = "a number or a 0-dimensional floating-point tensor"


def check_scalar(name: str, value: Any, x: Any = None, x_name: str = "x") -> Any:
    """Accept a finite number (NumPy's too) or a 0-dimensional tensor, whose value is not read.

    Args:
        name: of the argument.
        value: the scalar.
        x: a tensor that it multiplies, whose dtype and device it must not change: no complex scalar for a real x. None for no such check.
        x_name: of x.

    Returns:
        A float, a complex, a symbolic number of a compiler, or the tensor.

    Raises:
        TypeError: it is no scalar, or complex where x is real.
        ValueError: it is not finite, has dimensions, or is on another device than x and the CPU.
    """
    if type(value) is float and -math.inf < value < math.inf and not torch.compiler.is_compiling():
        return value
    number = _number(name, value)
    if x is not None:
        _check_fits(name, number, x, x_name)
    return number


def _number(name: str, value: Any) -> Any:
    """The scalar as Python's number, or the tensor."""
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES:
            raise type_error(name, _SCALAR, f"a tensor of {value.dtype}")
        if value.ndim != 0:
            raise value_error(name, _SCALAR, f"a tensor of shape {tuple(value.shape)}")
        return value
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return value
    check_number(name, value, _SCALAR, numbers.Complex)
    try:
        number = float(value) if isinstance(value, numbers.Real) else complex(value)
    except OverflowError:
        raise value_error(name, "a finite number", "an integer too large for a float") from None
    # By comparison: Dynamo can follow that for a float whose value it does not know, math.isfinite it cannot.
    parts = [number.real, number.imag] if isinstance(number, complex) else [number]
    if not all([-math.inf < part < math.inf for part in parts]):
        raise value_error(name, "a finite number", number)
    return number


def _check_fits(name: str, value: Any, x: Tensor, x_name: str) -> None:
    """Refuse a scalar that would change the dtype or the device of x."""
    if isinstance(value, Tensor):
        if value.is_complex() and not x.is_complex():
            raise type_error(name, f"a real number, since {x_name} is of {x.dtype}", f"a tensor of {value.dtype}")
        if value.device not in (x.device, torch.device("cpu")):
            raise value_error(name, f"{x_name}'s device {x.device}" + (" or cpu" if x.device.type != "cpu" else ""), value.device)
    elif isinstance(value, complex) and not x.is_complex():
        raise type_error(name, f"a real number, since {x_name} is of {x.dtype}", value)


def check_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Accept instances of a class, or of one of several."""
    if not isinstance(value, kind):
        raise type_error(name, expected, type_name(value))


def check_number(name: str, value: Any, expected: str = "a number", kind: type = numbers.Real) -> Any:
    """Accept a number of this kind (NumPy's too), and no bool."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise type_error(name, expected, type_name(value))
    return value


def check_finite(name: str, value: Any, expected: str = "a number") -> Any:
    """Accept a finite real number, or a compiler's symbol of one; a float of it."""
    return check_scalar(name, check_number(name, value, expected))


def check_integer(name: str, value: Any, expected: str = "an integer") -> int:
    """Accept an integer (NumPy's too), and no bool."""
    return int(check_number(name, value, expected, numbers.Integral))


def check_positive(name: str, value: Any) -> int:
    """Accept an integer from 1 on."""
    number = check_integer(name, value, "a positive integer")
    if number < 1:
        raise value_error(name, "a positive integer", number)
    return number


def check_flag(name: str, value: Any) -> bool:
    """Accept True or False, and nothing that is merely true."""
    check_type(name, value, bool, "True or False")
    return value


def check_pair(name: str, value: Any, check: Callable[[str, Any], Any]) -> tuple[Any, Any]:
    """Accept one value, which is used twice, or a pair of them."""
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise type_error(name, "one value or a pair of them", value)
    return check(name, pair[0]), check(name, pair[1])


def check_interval(name: str, value: Any) -> tuple[float, float]:
    """Accept two finite numbers, the first below the second."""
    expected = "finite (low, high), low below high"
    pair = tuple(value) if isinstance(value, tuple | list) else ()
    if len(pair) != 2 or not all([isinstance(v, numbers.Real) and not isinstance(v, bool) for v in pair]):
        raise type_error(name, expected, value)
    low, high = map(float, pair)
    if not -math.inf < low < high < math.inf:
        raise value_error(name, expected, value)
    return low, high


def check_probability(name: str, value: Any, expected: str = "a probability") -> float:
    """Accept a number from 0 to 1."""
    if not 0 <= float(check_number(name, value, expected)) <= 1:
        raise value_error(name, expected, value)
    return float(value)


def check_choice(name: str, value: Any, known: Sequence[str], *, optional: bool = False) -> None:
    """Accept one of a few words, and if optional None."""
    if (value is None and optional) or (isinstance(value, str) and value in known):
        return
    expected = f"{'None or ' if optional else ''}one of {', '.join(known)}"
    raise value_error(name, expected, repr(value)) if isinstance(value, str) else type_error(name, expected, type_name(value))


def check_precision(precision: Any) -> None:
    """Accept None or one of `PRECISIONS`."""
    check_choice("precision", precision, PRECISIONS, optional=True)


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    """The dtypes in an error's words."""
    return ", ".join([str(dtype).removeprefix("torch.") for dtype in dtypes])


def check_real_dtype(name: str, dtype: Any, expected: str = "one of") -> None:
    """Accept one of `REAL_DTYPES`; expected: the words before them in the error."""
    if dtype not in REAL_DTYPES:
        raise type_error(name, f"{expected} {dtype_names(REAL_DTYPES)}", dtype)


def check_dense(name: str, t: Any, expected: str, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Accept a dense tensor of one of these dtypes; expected: what the argument is, if it is no tensor."""
    check_type(name, t, Tensor, expected)
    if t.layout != torch.strided or t.is_nested:
        raise type_error(name, "a dense (strided) tensor", "a nested tensor" if t.is_nested else t.layout)
    if t.dtype not in dtypes:
        raise type_error(name, f"a dtype among {dtype_names(dtypes)}", t.dtype)


def check_tensor(name: str, t: Any, like: Any, like_name: str, or_float32: bool = False) -> None:
    """A dense floating-point tensor of another one's dtype and on its device; or_float32: or of float32 beside a half dtype."""
    check_dense(name, t, f"a torch tensor, like {like_name}")
    or_float32 = or_float32 and like.dtype in HALF_DTYPES
    if t.dtype != like.dtype and not (or_float32 and t.dtype == torch.float32):
        raise type_error(name, f"{like_name}'s dtype {like.dtype}{' or torch.float32' if or_float32 else ''}", t.dtype)
    if t.device != like.device:
        raise value_error(name, f"{like_name}'s device {like.device}", t.device)


# ---- results written to a tensor that the caller gives: out= ------------------------------------------


def check_out(out: Any, shape: Sequence[int], like: Tensor, tensors: Sequence[Tensor | None]) -> None:
    """A tensor of the result's shape, and of x's dtype and device; no gradient is recorded of writing to it.

    Args:
        out: the argument.
        shape: of the result.
        like: x.
        tensors: all operands.

    Raises:
        TypeError: no dense tensor, or another dtype.
        ValueError: another shape or device, or an argument whose gradient autograd would record.
    """
    check_tensor("out", out, like, "x")
    if tuple(out.shape) != tuple(shape):
        raise value_error("out", f"the result's shape {tuple(shape)}", f"shape {tuple(out.shape)}")
    if wants_gradient([*tensors, out]):
        raise value_error("out", "torch.no_grad(), or arguments that require no gradient", "one that requires a gradient")


def can_write(tensors: Sequence[Tensor], out: Tensor, in_place: bool) -> bool:
    """Whether a program may write to out: contiguous memory that it does not read, but for the last operand, element by element.

    Args:
        tensors: the operands.
        out: see above.
        in_place: whether out may be the last operand.
    """
    if torch.compiler.is_compiling() or not out.is_contiguous() or not takes_fast_path([*tensors, out]):
        return False
    return are_apart(tensors[:-1] if in_place and is_same(tensors[-1], out) else tensors, out)


def is_same(t: Tensor, out: Tensor) -> bool:
    """Whether two tensors of one shape have their elements at the same places."""
    return t.data_ptr() == out.data_ptr() and t.stride() == out.stride()


def are_apart(tensors: Sequence[Tensor], out: Tensor) -> bool:
    """Whether none of the tensors shares memory with out."""
    memory = out.untyped_storage().data_ptr()
    return all([t.untyped_storage().data_ptr() != memory for t in tensors])
