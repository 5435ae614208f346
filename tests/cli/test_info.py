"""`python -m fastkron_py info`: text, JSON, and the reasons for a backend."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import fastkron_py
from fastkron_py.cli import environment
from fastkron_py.cli.app import app
from fastkron_py.cli.display import bytes_text, seconds_text
from fastkron_py.cli.environment import choice
from fastkron_py.runtime.backend import _gpu_obstacle
from fastkron_py.runtime.checks import DTYPES
from fastkron_py.runtime.device import gpu_of

CHOICE = {"dtype": "float32", "backend": "triton", "why": "a reason"}


def test_info_as_text(runner: CliRunner) -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    for part in (
        fastkron_py.__version__,
        torch.__version__,
        "Devices",
        "cpu",
        "bfloat16",
        "complex128",
        'Choices of the backend "auto"',
        "Caches",
        "\ncall cache: on\n",
    ):
        assert part in result.output


def test_info_states_each_reason_once(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {torch.float32: "one", torch.float64: "two"}
    monkeypatch.setattr(
        environment, "choice", lambda device, dtype: dict(CHOICE, device=device, dtype=str(dtype), why=reasons.get(dtype, "zero"))
    )
    output = runner.invoke(app, ["info"], env={"COLUMNS": "200"}).output
    assert [output.count(reason) for reason in ("zero", "one", "two")] == [1 + torch.cuda.device_count()] * 3


def test_info_as_json(runner: CliRunner) -> None:
    result = runner.invoke(app, ["info", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert set(found) == {"versions", "devices", "backend", "caches", "call_cache", "cpu_kernel"}
    assert found["call_cache"] == "on"
    assert found["cpu_kernel"].startswith("on" if importlib.util.find_spec("numba") else "off: numba")
    assert found["versions"]["torch"] == torch.__version__
    assert [d["device"] for d in found["devices"]] == ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    auto = found["backend"]["auto"]
    assert len(auto) == len(found["devices"]) * len(DTYPES)
    assert {c["backend"] for c in auto if c["device"] == "cpu"} == {"torch"}
    assert all(c["why"] for c in auto)


@pytest.mark.parametrize(
    ("capability", "record", "measured"), [((9, 0), "Hopper", True), ((8, 9), "Ada", False), ((12, 1), "Blackwell RTX", False)]
)
def test_info_names_the_record_in_use(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], record: str, measured: bool
) -> None:
    properties = SimpleNamespace(name="a GPU", major=capability[0], minor=capability[1], total_memory=1 << 30, multi_processor_count=78)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(environment, "choice", lambda device, dtype: dict(CHOICE, device=device))
    gpu_of.cache_clear()
    try:
        text, data = (runner.invoke(app, arguments).output for arguments in (["info"], ["info", "--json"]))
    finally:
        gpu_of.cache_clear()
    assert f"{record}, {'measured' if measured else 'estimated'}" in text
    found = [(d["device"], d["record"], d["measured"]) for d in json.loads(data)["devices"]]
    assert found == [("cpu", None, None), ("cuda:0", record, measured)]


@pytest.mark.parametrize(
    ("name", "dtype", "taken", "why"),
    [
        ("gfx942", torch.float32, "triton", "none was run on AMD's GPUs"),
        ("gfx1201", torch.float32, "torch", "kernels for float32 multiply in float32 or more, for which gfx1201 has no matrix cores"),
        ("gfx1201", torch.bfloat16, "triton", "none was run on AMD's GPUs"),
    ],
)
def test_reasons_on_amd(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, taken: str, why: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=f"{name}:xnack-"))
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: SimpleNamespace(dtype=dtype, device=torch.device(device)))
    _gpu_obstacle.cache_clear()
    try:
        found = choice("cuda:0", dtype)
    finally:
        _gpu_obstacle.cache_clear()
    assert (found["backend"], why in found["why"]) == (taken, True), found


@pytest.mark.gpu
def test_reasons_on_a_gpu() -> None:
    assert choice("cuda", torch.float32)["backend"] == "triton"
    assert choice("cuda", torch.complex64)["backend"] == "triton"


def test_bytes_and_seconds() -> None:
    for count, text in ((0, "0 B"), (999, "999 B"), (1000, "1 kB"), (73.2e9, "73.2 GB"), (5e12, "5 TB"), (5e15, "5e+03 TB")):
        assert bytes_text(count) == text
    for seconds, text in ((2.5, "2.5 s"), (0.0125, "12.5 ms"), (3.1e-6, "3.1 us")):
        assert seconds_text(seconds) == text
