"""Kernels as plans name them: those in Gluon, which not every Triton can compile, and configurations of launches. Plain Python."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any, NamedTuple

logger = logging.getLogger("fastkron_py")


class LaunchConfig(NamedTuple):
    """A kernel, its grid, and its arguments but for the first ones, which each launch gives."""

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]


@cache
def gluon_kernel(module: str, name: str) -> Any:
    """A kernel, or None where this Triton lacks a part of Gluon, which it calls experimental, that it is written in.

    Args:
        module: below the package, such as "kron.hopper.multiply".
        name: of the kernel.
    """
    try:
        return getattr(importlib.import_module(f"..{module}", __package__), name)
    except (ImportError, AttributeError) as error:
        logger.warning("this version of Triton has no Gluon as %s for Hopper GPUs needs it (%s): slower kernels are used", module, error)
        return None
