"""Calls that are to be refused, and what the error says.

Helper of several test files: no tests here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

Refusal = tuple[Callable[[], object], type[Exception], str]
"""A call, the error that it raises, and the error's text."""

# Texts that messages of products and of lazy operators share.
ARRAY = "a torch tensor, a NumPy array or a CuPy array"
BATCHES = "expected batch dimensions that broadcast"
COLUMNS = "dimension -2 of size 6 = 3 * 2, the product of the columns of factors"
DTYPES = "float16, bfloat16, float32, float64, complex64, complex128"
LIST = "a list or tuple of matrices"
MATRIX = "a matrix [P, Q] or a batch [*batch, P, Q]"
NUMBER = "a number or a 0-dimensional floating-point tensor"
ROWS = "dimension -1 of size 6 = 2 * 3, the product of the rows of factors"


def value(call: Callable[[], object], message: str) -> Refusal:
    return call, ValueError, message


def wrong_type(call: Callable[[], object], message: str) -> Refusal:
    return call, TypeError, message


def assert_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    """The call raises this error, and its text is this one."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == message, f"{caught.value!r} instead of {message!r}"


def assert_all_refused(refusals: Mapping[str, Refusal]) -> None:
    """Each of them; a failure tells its name."""
    for name, refusal in refusals.items():
        try:
            assert_refused(*refusal)
        except BaseException as failure:
            failure.add_note(name)
            raise
