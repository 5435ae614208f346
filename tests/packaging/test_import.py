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


def test_loads_little_beyond_torch() -> None:
    """Its own modules alone, and not those that have a first use to wait for: launchers, kernels of Triton, layers, other rooms."""
    code = """
import json, sys, torch
before = set(sys.modules)
import fastkron_py
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    loaded = json.loads(output(code))
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
        "kan.hopper",
        "gated.kernels",
    )
    assert [m for m in loaded if m.split(".")[0] != "fastkron_py"] == []
    assert [m for m in loaded if m.startswith(tuple(f"fastkron_py.{name}" for name in late))] == []
    assert len(loaded) < 140


def test_asks_nothing_of_cuda() -> None:
    code = """
import torch
def refuse(*args, **kwargs):
    raise RuntimeError("CUDA was asked")
for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
import fastkron_py
assert not torch.cuda.is_initialized()
print("quiet")
"""
    assert output(code) == "quiet"


def test_imports_no_optional_package() -> None:
    code = f"""
import json, sys, torch
before = set(sys.modules)
import fastkron_py
print(json.dumps(sorted(set({HEAVY!r}) & (set(sys.modules) - before))))
"""
    assert json.loads(output(code)) == []


def test_the_look_for_packages_can_find_one() -> None:
    code = f"""
import json, sys, torch
before = set(sys.modules)
import fastkron_py.cli.app
print(json.dumps(sorted(set({HEAVY!r}) & (set(sys.modules) - before))))
"""
    assert {"rich", "typer"} <= set(json.loads(output(code)))


@pytest.mark.parametrize("room", ["distributed", "integrations"])
def test_a_room_has_one_name(room: str) -> None:
    if not (ROOT / room / "__init__.py").is_file():
        pytest.skip("the tests run beside an installed package, without the source tree")
    result = run(f"import {room}", cwd=ROOT)
    assert result.returncode == 1
    assert f"ImportError: import this package as fastkron_py.{room}, not as {room}" in result.stderr
    assert output(f"import fastkron_py.{room} as m; print(m.__name__)") == f"fastkron_py.{room}"


def test_other_rooms_are_found_on_first_use() -> None:
    assert output("import fastkron_py; print(fastkron_py.distributed.__name__)") == "fastkron_py.distributed"
    assert "AttributeError" in run("import fastkron_py; fastkron_py.nonesuch").stderr
