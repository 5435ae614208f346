"""What `import fastkron_py` costs and touches, each looked at in a fork of a process that has imported nothing but torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]
HEAVY = (
    *("cupy", "gpytorch", "linear_operator", "llvmlite", "lycoris", "matplotlib", "mpi4py", "numba", "pandas", "peft", "PIL"),
    *("pytest", "rich", "scipy", "skimage", "sklearn", "timm", "torchvision", "transformers", "triton", "typer"),
)


PROGRAMS = {
    # Modules that it loads beyond torch's, where anything that asks CUDA is refused.
    "loaded": """
import json, sys, torch
def refuse(*args, **kwargs):
    raise RuntimeError("CUDA was asked")
for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
before = set(sys.modules)
import fastkron_py
assert not torch.cuda.is_initialized()
print(json.dumps(sorted(set(sys.modules) - before)))
""",
    # On a GPU, where there is one: Triton 3.6's interpreter fails with the newest NumPy.
    "plans": """
import json, os, sys
import torch, fastkron_py.kron.planner
found = {"triton", "fastkron_py.kron.kernels", "fastkron_py.kron.forward"} & {*sys.modules}
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
with fastkron_py.backend("triton"), torch.device(device):
    fastkron_py.kron_matmul(torch.ones(2, 6), [torch.eye(2), torch.eye(3)])
print(json.dumps([*found, *[m for m in sys.modules if m.startswith("fastkron_py") and ("backward" in m or "gradient" in m)]]))
""",
    "calls": """
import json, sys, torch, fastkron_py
fastkron_py.kron_matmul(torch.ones(2, 4), [torch.ones(2, 2)] * 2)
s = fastkron_py.KroneckerSum([torch.eye(3).requires_grad_()] * 2)
(s.solve(torch.ones(9)).sum() + s.logdet()).backward()
late = {"array_api_compat", "cupy", "jax", "dask", "triton", "fastkron_py.testing", "torch._dynamo"}
print(json.dumps(sorted(late & {*sys.modules})))
""",
    # What names of the package are.
    "looked_up": """
import json, fastkron_py
found = [fastkron_py.distributed.__name__]
try:
    fastkron_py.nonesuch
except AttributeError as error:
    found.append(type(error).__name__)
import fastkron_py.distributed as d, fastkron_py.integrations as i
print(json.dumps([*found, d.__name__, i.__name__]))
""",
    "distributed": "import distributed",
    "integrations": "import integrations",
    "info": """
import json, sys
from fastkron_py.cli.app import app
sys.argv[1:] = ["info", "--json"]
try:
    app()
finally:
    assert "triton" not in sys.modules
""",
}


@cache
def printed(name: str) -> list[str]:
    """What a program printed."""
    done = run(name)
    assert (done.returncode, done.stderr) == (0, "")
    found: list[str] = json.loads(done.stdout)
    return found


def run(name: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return forked.run(PROGRAMS[name], folder=ROOT, environment=environment)


def test_loads_little_beyond_torch() -> None:
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
    loaded = printed("loaded")
    assert [m for m in loaded if m.split(".")[0] != "fastkron_py"] == []
    assert [m for m in loaded if m.startswith(tuple(f"fastkron_py.{name}" for name in late))] == []
    assert 1 < len(loaded) < 140


def test_imports_no_optional_package() -> None:
    assert sorted({*HEAVY} & {*printed("loaded")}) == []


def test_plans_load_no_kernels_and_products_no_planner_of_gradients() -> None:
    assert printed("plans") == []


def test_calls_load_no_adapter_and_no_compiler() -> None:
    """A call with tensors imports neither array-api-compat nor CuPy; backward passes of operators do not import the compiler."""
    assert printed("calls") == []


def test_info_initialises_no_triton() -> None:
    done = run("info")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)


@pytest.mark.parametrize("room", ["distributed", "integrations"])
def test_a_room_has_one_name(room: str) -> None:
    if not (ROOT / room / "__init__.py").is_file():
        pytest.skip("the tests run beside an installed package, without the source tree")
    done = run(room)
    assert done.returncode == 1
    assert f"ImportError: import this package as fastkron_py.{room}, not as {room}" in done.stderr
    assert f"fastkron_py.{room}" in printed("looked_up")[2:]


def test_other_rooms_are_found_on_first_use() -> None:
    assert printed("looked_up")[:2] == ["fastkron_py.distributed", "AttributeError"]
