"""Where the register-chained kernel is used."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from fastkron_py.runtime import device as devices

HOPPER = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Answers of this test's own: they are kept for the life of a process."""
    for answer in (devices._gluon_kernel, devices.has_chained):
        answer.cache_clear()
    yield
    for answer in (devices._gluon_kernel, devices.has_chained):
        answer.cache_clear()


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The major number that every GPU says it has; kernels are compiled."""
    major = [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major[0], 0))
    monkeypatch.setattr(devices, "knobs", SimpleNamespace(runtime=SimpleNamespace(interpret=False)))
    return major


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hopper_takes_it(capability: list[int], dtype: torch.dtype) -> None:
    assert devices.has_chained(HOPPER, dtype)


@pytest.mark.parametrize("major", [8, 10, 12])
def test_other_chips_do_not(capability: list[int], major: int) -> None:
    capability[0] = major
    assert not devices.has_chained(HOPPER, torch.float32)


def test_neither_float64_nor_the_cpu_nor_the_interpreter(capability: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not devices.has_chained(HOPPER, torch.float64)
    assert not devices.has_chained(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(devices, "knobs", SimpleNamespace(runtime=SimpleNamespace(interpret=True)))
    assert not devices.has_chained(HOPPER, torch.float32)


def test_a_triton_without_gluon_gets_the_plain_kernels(
    capability: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "fastkron_py.kron.hopper.multiply", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    with caplog.at_level(logging.WARNING, "fastkron_py"):
        assert not devices.has_chained(HOPPER, torch.float32)
    assert "no Gluon" in caplog.text
    assert devices.chained_kernel() is None


@pytest.mark.parametrize(
    ("major", "version", "overlaps"), [(9, 12030, True), (9, 12020, False), (9, 0, False), (8, 13000, False), (12, 13000, False)]
)
def test_launches_overlap_on_hopper_where_graphs_have_edges_for_it(
    major: int, version: int, overlaps: bool, capability: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    capability[0] = major
    monkeypatch.setattr(devices, "_driver_version", lambda: version)
    assert devices.has_overlap.__wrapped__(HOPPER) is overlaps
    monkeypatch.setattr(devices, "knobs", SimpleNamespace(runtime=SimpleNamespace(interpret=True)))
    assert not devices.has_overlap.__wrapped__(HOPPER)
    assert not devices.has_overlap(torch.device("cpu"))
