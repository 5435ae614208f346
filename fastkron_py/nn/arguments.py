"""Argument checks that layers share. Every error names the argument, the expectation and the value given."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from fastkron_py.runtime.checks import check_integer
from fastkron_py.runtime.errors import type_error, type_name, value_error


def check_positive(name: str, value: Any) -> int:
    """Accept an integer from 1 on."""
    number = check_integer(name, value, "a positive integer")
    if number < 1:
        raise value_error(name, "a positive integer", number)
    return number


def check_flag(name: str, value: Any) -> bool:
    """Accept True or False, and nothing that is merely true."""
    if not isinstance(value, bool):
        raise type_error(name, "True or False", type_name(value))
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
