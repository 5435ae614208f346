"""What `import fastkron_py` costs and touches, each looked at in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = (
    *("cupy", "gpytorch", "linear_operator", "llvmlite", "lycoris", "matplotlib", "mpi4py", "numba", "pandas", "peft", "PIL"),
    *("pytest", "rich", "scipy", "skimage", "sklearn", "timm", "torchvision", "transformers", "triton", "typer"),
)


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process that finds the same packages as this one."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, **options)  # type: ignore[call-overload, no-any-return]


def output(code: str) -> str:
    result = run(code)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """Modules that it loads beyond torch's, in a process where anything that asks CUDA is refused."""
    code = """
import json, sys, torch
def refuse(*args, **kwargs):
    raise RuntimeError("CUDA was asked")
for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
before = set(sys.modules)
import fastkron_py
assert not torch.cuda.is_initialized()
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    return json.loads(output(code))  # type: ignore[no-any-return]


def test_loads_little_beyond_torch(loaded: list[str]) -> None:
    """Its own modules alone, and not those that have a first use to wait for: launchers, kernels of Triton, layers, other rooms."""
    late = (
        "cli",
        "distributed",
        "integrations",
        "nn",
        "testing",
        "runtime.launch",
        "kron.kernels",
        "kron.hopper",
        "rational.kernels",
        "kan.kernels",
        "gated.kernels",
    )
    assert [m for m in loaded if m.split(".")[0] != "fastkron_py"] == []
    assert [m for m in loaded if m.startswith(tuple(f"fastkron_py.{name}" for name in late))] == []
    assert len(loaded) < 140


def test_plans_load_no_kernels_and_products_no_planner_of_gradients() -> None:
    """On a GPU, where there is one: Triton 3.6's interpreter fails with the newest NumPy."""
    code = """
import os, sys
import torch, fastkron_py.kron.planner
print({"triton", "fastkron_py.kron.kernels", "fastkron_py.kron.forward"} & {*sys.modules})
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
with fastkron_py.backend("triton"), torch.device(device):
    fastkron_py.kron_matmul(torch.ones(2, 6), [torch.eye(2), torch.eye(3)])
print([m for m in sys.modules if m.startswith("fastkron_py") and ("backward" in m or "gradient" in m)])
"""
    assert output(code).split() == ["set()", "[]"]


def test_imports_no_optional_package(loaded: list[str]) -> None:
    assert sorted({*HEAVY} & {*loaded}) == []


@pytest.fixture(scope="module")
def looked_up() -> list[str]:
    """What names of the package are, in a process that imports nothing else."""
    code = """
import json, fastkron_py
found = [fastkron_py.distributed.__name__]
try:
    fastkron_py.nonesuch
except AttributeError as error:
    found.append(type(error).__name__)
import fastkron_py.distributed as d, fastkron_py.integrations as i
print(json.dumps([*found, d.__name__, i.__name__]))
"""
    return json.loads(output(code))  # type: ignore[no-any-return]


@pytest.mark.parametrize("room", ["distributed", "integrations"])
def test_a_room_has_one_name(room: str, looked_up: list[str]) -> None:
    if not (ROOT / room / "__init__.py").is_file():
        pytest.skip("the tests run beside an installed package, without the source tree")
    result = run(f"import {room}", cwd=ROOT)
    assert result.returncode == 1
    assert f"ImportError: import this package as fastkron_py.{room}, not as {room}" in result.stderr
    assert f"fastkron_py.{room}" in looked_up[2:]


def test_other_rooms_are_found_on_first_use(looked_up: list[str]) -> None:
    assert looked_up[:2] == ["fastkron_py.distributed", "AttributeError"]
