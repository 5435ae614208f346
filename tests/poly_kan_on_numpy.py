"""Large polynomial KAN layers as on a Hopper GPU, on a machine without one: its kernels on NumPy, the others interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gluon_on_numpy import launch

from fastkron_py.kan import config as tuning
from fastkron_py.kan import problem as poly_kan_kind
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.launch import RECORDING, Launcher


def stage(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every product is large, on a device with Hopper's kernels and few multiprocessors; the names of those that are launched."""
    monkeypatch.setattr(tuning, "LARGE_PRODUCTS", 1)
    monkeypatch.setattr(tuning, "LARGE_ROWS", 1)
    monkeypatch.setattr(poly_kan_kind, "multiprocessor_count", lambda device: 3)
    monkeypatch.setattr(devices, "has_staged", lambda device, dtype: dtype != torch.float64)
    plain = Launcher.__call__

    def call(self: Launcher, *given: Any) -> None:
        way = self._configs[0]
        if "staged" not in way.kernel.__name__ or RECORDING.recorder is not None:
            plain(self, *given)
        else:
            launched.append(way.kernel.__name__)
            launch(way.kernel, way.grid[0], given, way.arguments)

    launched: list[str] = []
    monkeypatch.setattr(Launcher, "__call__", call)
    return launched
