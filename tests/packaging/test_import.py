"""What `import fastkron_py` costs and touches, each looked at in a fork of a process that has imported nothing but torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = (
    *("cupy", "gpytorch", "linear_operator", "llvmlite", "lycoris", "matplotlib", "mpi4py", "numba", "pandas", "peft", "PIL"),
    *("pytest", "rich", "scipy", "skimage", "sklearn", "timm", "torchvision", "transformers", "triton", "typer"),
)


ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
# Forks once for each program: what it imports beyond torch is as new there as in a process of its own, and torch is imported once.
SERVER = """
import json, os, sys, traceback, torch
from pathlib import Path
folder, programs = Path(sys.argv[1]), json.loads(sys.argv[2])
for name, code in programs.items():
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    for file, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{kind}", os.O_WRONLY | os.O_CREAT), file)
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)
"""
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
    "distributed": f"import sys; sys.path.insert(0, {str(ROOT)!r}); import distributed",
    "integrations": f"import sys; sys.path.insert(0, {str(ROOT)!r}); import integrations",
}


class Printed(NamedTuple):
    """What a program printed."""

    out: str
    err: str

    def value(self) -> list[str]:
        assert self.err == ""
        found: list[str] = json.loads(self.out)
        return found


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Printed]:
    """Of each program, in a process that had imported nothing but torch."""
    folder = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-c", SERVER, str(folder), json.dumps(PROGRAMS)]
    subprocess.run(command, timeout=240, env=ENVIRONMENT, check=True)
    return {name: Printed(*[(folder / f"{name}.{kind}").read_text() for kind in ("out", "err")]) for name in PROGRAMS}


def test_loads_little_beyond_torch(printed: dict[str, Printed]) -> None:
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
    loaded = printed["loaded"].value()
    assert [m for m in loaded if m.split(".")[0] != "fastkron_py"] == []
    assert [m for m in loaded if m.startswith(tuple(f"fastkron_py.{name}" for name in late))] == []
    assert 1 < len(loaded) < 140


def test_imports_no_optional_package(printed: dict[str, Printed]) -> None:
    assert sorted({*HEAVY} & {*printed["loaded"].value()}) == []


def test_plans_load_no_kernels_and_products_no_planner_of_gradients(printed: dict[str, Printed]) -> None:
    assert printed["plans"].value() == []


def test_calls_load_no_adapter_and_no_compiler(printed: dict[str, Printed]) -> None:
    """A call with tensors imports neither array-api-compat nor CuPy; backward passes of operators do not import the compiler."""
    assert printed["calls"].value() == []


@pytest.mark.parametrize("room", ["distributed", "integrations"])
def test_a_room_has_one_name(room: str, printed: dict[str, Printed]) -> None:
    if not (ROOT / room / "__init__.py").is_file():
        pytest.skip("the tests run beside an installed package, without the source tree")
    assert f"ImportError: import this package as fastkron_py.{room}, not as {room}" in printed[room].err
    assert f"fastkron_py.{room}" in printed["looked_up"].value()[2:]


def test_other_rooms_are_found_on_first_use(printed: dict[str, Printed]) -> None:
    assert printed["looked_up"].value()[:2] == ["fastkron_py.distributed", "AttributeError"]
