"""The record of a device's GPU, and the kernels that are used by it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastkron_py.kron.families import butterfly, fragments, missing
from fastkron_py.kron.hadamard import has_launch
from fastkron_py.runtime import backend, kernels
from fastkron_py.runtime import device as devices
from fastkron_py.runtime import gpu as gpus
from fastkron_py.runtime.checks import DTYPES
from fastkron_py.runtime.device import gpu_of
from fastkron_py.runtime.gpu import HOPPER, INTERPRETER

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Answers of this test's own: they are kept for the life of a process."""
    kept = kernels.gluon_kernel, devices.gpu_of, backend._gpu_obstacle
    for answer in kept:
        answer.cache_clear()
    yield
    for answer in kept:
        answer.cache_clear()


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[major, minor] that every GPU says it has; kernels are compiled."""
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=78))
    monkeypatch.setattr(devices, "_driver_version", lambda: 13000)
    monkeypatch.setattr(devices, "is_interpreting", lambda: False)
    return capability


def takes(family: Any, dtype: torch.dtype, device: torch.device = GPU) -> bool:
    """Whether a family multiplies on a device."""
    gpu = gpu_of(device)
    return family.takes(dtype, gpu) and family.name not in missing(dtype, gpu)


def test_a_triton_without_gluon_gets_the_plain_kernels(
    capability: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "fastkron_py.kron.hopper.multiply", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    with caplog.at_level(logging.WARNING, "fastkron_py"):
        assert not takes(fragments, torch.float32)
    assert "no Gluon" in caplog.text
    assert fragments.kernel() is None


def test_what_a_device_has(capability: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own number of multiprocessors, and the features of its architecture."""
    assert gpu_of(torch.device("cpu")) is INTERPRETER
    found = gpu_of(GPU)
    assert (found.name, found.multiprocessors, found.is_measured) == ("Hopper", 78, True)
    features = {}
    for major in (8, 9, 10, 12):
        capability[0] = major
        devices.gpu_of.cache_clear()
        found = gpu_of(GPU)
        features[major] = (found.has_wgmma, found.has_descriptors, found.has_approximations, found.is_measured)
    assert features == {
        8: (False, False, True, False),
        9: (True, True, True, True),
        10: (False, True, True, False),
        12: (False, True, True, False),
    }
    monkeypatch.setattr(torch.version, "hip", "6.0")
    devices.gpu_of.cache_clear()
    other = gpu_of(GPU)
    assert (other.has_wgmma, other.has_descriptors, other.has_approximations, other.multiprocessors) == (False, False, False, 78)
    assert (other.name, other.shared_memory, other.is_measured) == ("AMD", 65536, False)


@pytest.mark.parametrize(
    ("name", "taken", "why"),
    [
        ("gfx942:sramecc+:xnack-", DTYPES, ""),
        ("gfx1201", (torch.bfloat16,), "for which gfx1201 has no matrix cores"),
        ("gfx1030", (), "kernels were not compiled for gfx1030"),
    ],
)
def test_dtypes_that_compile_for_amd(
    name: str, taken: tuple[torch.dtype, ...], why: str, capability: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=78, gcnArchName=name))
    monkeypatch.setattr(backend, "is_interpreting", lambda: False)
    for dtype in DTYPES:
        x = SimpleNamespace(device=GPU, dtype=dtype)
        obstacle = backend.triton_obstacle(x)  # type: ignore[arg-type]
        assert backend.choose_backend("auto", x) == ("triton" if dtype in taken else "torch")  # type: ignore[arg-type]
        assert obstacle is None if dtype in taken else why in str(obstacle)


def test_kernels_in_gluon_are_not_launched_on_amd(capability: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their layouts are of 32 lanes, and NVIDIA's compiler alone takes a limit of registers."""

    def launched() -> list[bool]:
        return [
            has_launch(1, 12, torch.float32, GPU),
            takes(fragments, torch.float32),
            takes(butterfly, torch.float32),
        ]

    assert launched() == [True] * 3
    monkeypatch.setattr(torch.version, "hip", "7.0")
    devices.gpu_of.cache_clear()
    assert launched() == [False] * 3


def test_the_record_of_each_architecture(capability: list[int]) -> None:
    for major, minor, name, kilobytes in (
        (7, 5, "before Ampere", 64),
        (8, 0, "Ampere", 163),
        (8, 6, "Ampere RTX", 99),
        (8, 7, "Ampere RTX", 99),  # Orin: the newest before it
        (8, 9, "Ada", 99),
        (9, 0, "Hopper", 227),
        (10, 0, "Blackwell", 227),
        (10, 3, "Blackwell", 227),
        (12, 0, "Blackwell RTX", 99),
        (12, 1, "Blackwell RTX", 99),
    ):
        capability[:] = major, minor
        devices.gpu_of.cache_clear()
        found = gpu_of(GPU)
        assert (found.name, found.shared_memory, found.multiprocessors) == (name, 1024 * kilobytes, 78)
        assert found.is_measured is (name == "Hopper")


def test_a_new_gpu_is_one_record(monkeypatch: pytest.MonkeyPatch, capability: list[int]) -> None:
    """Until there is one, the newest record before it serves."""
    capability[0] = 13
    assert gpu_of(GPU).name == "Blackwell RTX"
    rubin = gpus.replace(HOPPER, name="Rubin", capability=(13, 0), bandwidth=1.2e13, has_wgmma=False)
    monkeypatch.setattr(gpus, "_NVIDIA", (*gpus._NVIDIA, rubin))
    devices.gpu_of.cache_clear()
    assert gpu_of(GPU) == gpus.replace(rubin, multiprocessors=78)
