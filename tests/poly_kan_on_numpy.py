"""Large polynomial KAN layers as on a Hopper GPU, on a machine without one: its kernels on NumPy, the others interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gluon_on_numpy import launch

from fastkron_py.kan import launches, plan
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import INTERPRETER
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.program import remade, template_of


def pipelined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every product is large, on a device with Hopper's kernels and few multiprocessors; the names of those that are launched."""
    monkeypatch.setattr(plan, "MEASURED", plan.MEASURED._replace(large_products=1, large_rows=1))
    gpu = replace(INTERPRETER, multiprocessors=3)
    monkeypatch.setattr(devices, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(launches, "has_pipelined", lambda device, dtype: dtype != torch.float64)
    plain = Launcher.__call__

    def call(self: Launcher, *given: Any) -> None:
        config = self.configs[0]
        if "pipelined" not in config.kernel.__name__:
            plain(self, *given)
        else:
            launched.append(config.kernel.__name__)
            launch(config.kernel, config.grid[0], [_matrix(g) for g in given], config.arguments)

    launched: list[str] = []
    monkeypatch.setattr(Launcher, "__call__", call)
    return launched


def _matrix(given: Any) -> Any:
    """A tensor as it is, a descriptor of the matrix that it describes: a program's are made of all of a buffer."""
    if isinstance(given, torch.Tensor):
        return given
    return remade(type(given), template_of(given), given.base.as_strided(given.shape, given.strides))
