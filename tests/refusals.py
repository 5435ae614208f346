"""Calls that are to be refused, and what the error says.

Helper of several test files: no tests here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

Refusal = tuple[Callable[[], object], type[Exception], str]
"""A call, the error that it raises, and the error's text."""


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
