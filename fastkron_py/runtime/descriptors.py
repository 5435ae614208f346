"""Tensor descriptors for the copy engine, made again from fields that Triton checked once."""

from __future__ import annotations

from typing import Any, Final

Template = dict[str, Any]  # the fields of a descriptor besides the matrix
FARTHEST: Final = 1 << 40  # bytes from one index of a dimension to the next, which are fewer
_new: Final = object.__new__


def order_of(distance: int) -> int:
    """The sign of a number of bytes from one matrix to another, 0 if one descriptor cannot reach both."""
    if abs(distance) >= FARTHEST:
        return 0
    return (distance > 0) - (distance < 0)


class Place:
    """Memory that is no tensor's first element."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """As of a tensor: all that a launch asks of a descriptor's memory."""
        return self._address


def template_of(descriptor: Any) -> Template:
    """The fields of a checked descriptor besides the matrix."""
    return {name: value for name, value in vars(descriptor).items() if name != "base"}


def remade(cls: Any, template: Template, base: Any) -> Any:
    """A descriptor of this class, equal to one that is made of the same and checked; base begins at a 16-byte boundary."""
    made = _new(cls)
    made.__dict__ = {**template, "base": base}
    return made
