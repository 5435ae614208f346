"""NumPy and CuPy arrays in, the same out: conversion to torch tensors and back without a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastkron_py.errors import type_error


class GiveBack:
    """Turns a torch result into an array of the caller's library, on the caller's stream."""

    def __call__(self, t: Tensor) -> Any:
        return t.numpy()

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


def as_torch(arrays: Sequence[Any], names: Sequence[str]) -> tuple[list[Any], GiveBack]:
    """View arrays of one library as torch tensors; None stays None."""
    import torch

    try:
        return [None if a is None else torch.from_numpy(a) for a in arrays], GiveBack()
    except TypeError as error:
        raise type_error(names[0], "torch tensors, NumPy arrays or CuPy arrays", error) from error
