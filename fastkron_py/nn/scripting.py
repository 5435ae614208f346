"""Layers that TorchScript cannot compile raise an error that names alternatives."""

from __future__ import annotations

from typing import NoReturn

from fastkron_py.runtime.errors import type_error


class NotScriptable:
    """A module whose forward pass calls operators with arguments that TorchScript has no types for."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Called first by `torch.jit.script`, for every module of a model.

        Raises:
            TypeError: always.
        """
        alternatives = "a module for torch.jit.trace, torch.export.export or torch.compile, since TorchScript cannot compile it"
        raise type_error("torch.jit.script", alternatives, type(self).__name__)
