"""Constants: tensors that are made once and are right in every later call, whatever mode the first call was in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.eager import takes_fast_path


def constants(make: Callable[..., Sequence[Any]], arguments: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """The tensors, among other values, that a function makes on the CPU, on this device.

    They are made in no mode and kept. A call inside of a mode gets them as tensors of that mode: fake ones, functional ones.

    Args:
        make: names the dtype of each tensor that it makes, and depends on nothing but its arguments.
        arguments: of make; they can be hashed.
        device: of the result.
    """
    kept = _kept(make, arguments, device)
    if takes_fast_path(()):
        return kept
    # By this operation torch.tensor, too, takes what it has made into a mode.
    return tuple([torch.ops.aten.lift_fresh(value).to(device) if isinstance(value, Tensor) else value for value in kept])


@lru_cache(maxsize=512)
def _kept(make: Callable[..., Sequence[Any]], arguments: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    # The GPU of a fake tensor need not be there.
    home = torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device

    def made() -> tuple[Any, ...]:
        with torch.device("cpu"):
            return tuple([value.to(home) if isinstance(value, Tensor) else value for value in make(*arguments)])

    return torch_internals.apart(made)
