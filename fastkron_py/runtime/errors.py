"""One wording for every refused argument: the argument, the expectation, the value that came."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Final

_INSIDE: Final = ("fastkron_py", "torch")


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


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn of something at the line of the caller's that led to it: the innermost one outside of this package and of torch."""
    level, frame = 1, sys._getframe()
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
        if frame.f_back is None:  # a thread of autograd's
            level = 2
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
