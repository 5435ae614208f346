"""One wording for every refused argument: the argument, the expectation, the value that came."""

from __future__ import annotations

from typing import Any


def _message(argument: str, expected: str, got: Any) -> str:
    return f"{argument}: expected {expected}; got {got}"


def value_error(argument: str, expected: str, got: Any) -> ValueError:
    """Build (not raise) a ValueError that names the argument, the expectation and the value given."""
    return ValueError(_message(argument, expected, got))


def type_error(argument: str, expected: str, got: Any) -> TypeError:
    """Build (not raise) a TypeError that names the argument, the expectation and the value given."""
    return TypeError(_message(argument, expected, got))


def type_name(value: Any) -> str:
    """How errors call the type of a value: ``list``, ``numpy.ndarray``, ``None``."""
    kind = type(value)
    if value is None:
        return "None"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
