"""The kernel that `make hub-kernel` builds: its layout, and its results where fastkron_py is not installed.

Each program runs in a process of its own. Most cannot import fastkron_py there. They load the kernel with Hugging
Face's `kernels`, or by the import that the documentation of `kernels` describes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import forked
import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "hub").is_dir(), reason="the tests run beside an installed package, without the source tree")
NEEDS_KERNELS = pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs the package kernels")
ALONE = 'import sys\nsys.modules["fastkron_py"] = None\n'
LOADERS = {
    "kernels": """
from kernels import get_local_kernel
kernel = get_local_kernel(FOLDER, backend="cpu")
""",
    "importlib": """
import importlib.util, json, sys
path = FOLDER / "build" / "torch-cpu"
name = json.loads((path / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, path / "__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
""",
    "older kernels": """
import importlib.util, sys
path = FOLDER / "build" / "torch-cpu" / "fastkron" / "__init__.py"
spec = importlib.util.spec_from_file_location("fastkron_1234", path)
kernel = sys.modules["fastkron_1234"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
""",
}
RESULTS = """
import torch
from torch.nn.functional import gelu, silu
torch.manual_seed(0)
def compare(y, expected):  # float32 against float64: products of up to 24 terms stay below 1e-6
    error = float((y.double() - expected).norm() / expected.norm())
    assert error < 1e-6, error

x, weight, down = torch.randn(7, 8), torch.randn(2, 24, 8), torch.randn(5, 24)
up, gate = (x.double() @ w.double().T for w in weight)
compare(kernel.gated_linear(x, weight, layout="stacked"), up * silu(gate))
compare(kernel.gated_mlp(x, tuple(weight), down, activation="gelu_tanh"), up * gelu(gate, approximate="tanh") @ down.double().T)

z, a, b = torch.randn(3, 24), torch.randn(4, 6), torch.randn(4, 4)
t = z.double().reshape(3, 4, 6)
p = sum(a.double()[:, i, None] * t**i for i in range(6))
q = 1 + sum(b.double()[:, i, None] * t ** (i + 1) for i in range(4)).abs()
compare(kernel.rational(z, a, b, version="B"), (p / q).reshape(3, 24))

f, g = torch.randn(2, 3), torch.randn(4, 4)
compare(kernel.kron_matmul(x, [f, g]), x.double() @ torch.kron(f.double(), g.double()))
h = kernel.Hadamard(8, 8**-0.5).matrix(x.double())
compare(kernel.hadamard(x, scale=8**-0.5), x.double() @ h)
q = kernel.kron_quantize(x, [2, kernel.Hadamard(4, 0.5)], torch.int8, group_size=4)
y = x.double().reshape(7, 2, 4) @ kernel.Hadamard(4, 0.5).matrix(x.double())
assert bool(((q.dequantize() - y.reshape(7, 8)).abs() <= 0.51 * q.scales.repeat_interleave(4, 1)).all())
"""
LAYERS = """
layer, mlp = kernel.GroupRational(24, num_groups=4), kernel.GatedMLP(8, 24)
loss = torch.compile(lambda x: layer(mlp(x).repeat(1, 3)).square().mean(), backend="eager", fullgraph=True)
loss(x).backward()
assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in [*layer.parameters(), *mlp.parameters()])
assert torch.autograd.gradcheck(lambda *t: kernel.rational(*t), [v.double().requires_grad_() for v in (z, a, b)])
"""


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hub_build", ROOT / "hub" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kernels")
    builder().build(out)
    return out


def run(folder: Path, code: str, **environment: str) -> str:
    code = f"from pathlib import Path\nFOLDER = Path({str(folder)!r})\n{code}"
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"} | environment
    done = forked.run(code, folder=folder, environment=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


OTHER_LOADERS = [pytest.param(name, marks=pytest.mark.full) for name in ("importlib", "older kernels")]


@pytest.mark.parametrize("loader", [pytest.param("kernels", marks=NEEDS_KERNELS), *OTHER_LOADERS])
def test_loaded_alone_it_computes(folder: Path, loader: str) -> None:
    run(folder, ALONE + LOADERS[loader] + RESULTS)


@pytest.mark.full
def test_loaded_alone_its_layers_train(folder: Path) -> None:
    run(folder, ALONE + LOADERS["importlib"] + RESULTS + LAYERS)


@pytest.mark.full
def test_its_triton_kernels_compute(folder: Path) -> None:
    """Under Triton's interpreter, which only a call for the backend by name gets on a CPU."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton compiles there; its interpreter is tested where there is no GPU")
    code = 'kernel.set_backend("triton")\n' + RESULTS
    run(folder, ALONE + LOADERS["importlib"] + code, TRITON_INTERPRET="1")


@pytest.mark.full
@NEEDS_KERNELS
@pytest.mark.parametrize(("layer", "activation", "bias"), [("SwiGLUMLP", "silu", False), ("GeGLUMLP", "gelu", True)])
def test_kernelize_takes_its_layers(folder: Path, layer: str, activation: str, bias: bool) -> None:
    code = f"""
import torch
from torch import nn
from kernels import KernelizeFallback, LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
silu, gelu = torch.nn.functional.silu, lambda x: torch.nn.functional.gelu(x, approximate="tanh")

@use_kernel_forward_from_hub("MLP")
class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 24, bias={bias}), nn.Linear(8, 24, bias={bias})
        self.down_proj = nn.Linear(24, 8, bias={bias})
    def forward(self, x):
        return self.down_proj({activation}(self.gate_proj(x)) * self.up_proj(x))

torch.manual_seed(0)
mlp, x = MLP(), torch.randn(5, 8)
expected = mlp(x)
repository = LocalLayerRepository(repo_path=FOLDER, layer_name={layer!r})
with use_kernel_mapping({{"MLP": {{"cpu": repository}}}}):
    mlp = kernelize(mlp, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu", use_fallback=KernelizeFallback.NONE)
torch.testing.assert_close(mlp(x), expected)
assert "fastkron" in mlp.forward.__func__.__module__
mlp(x).square().mean().backward()
assert all(p.grad.abs().sum() > 0 for p in mlp.parameters())
"""
    run(folder, ALONE + code)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_metadata(folder: Path, backend: str) -> None:
    variant = folder / "build" / f"torch-{backend}"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["id"].startswith(f"_fastkron_{backend}_")
    assert metadata["id"].isidentifier()
    assert metadata["backend"]["type"] == backend
    files = {path.relative_to(variant).as_posix(): path.read_bytes() for path in variant.rglob("*") if path.is_file()}
    found = {n: base64.b64encode(hashlib.sha256(data).digest()).decode() for n, data in files.items() if "__pycache__" not in n}
    del found["metadata.json"]
    assert metadata["digest"]["files"] == found
    assert {name.rpartition(".")[2] for name in found} == {"py", "json"}  # nothing compiled
    absolute = [n for n, data in files.items() if n.endswith(".py") and (b"\nfrom fastkron_py" in data or b"import fastkron_py" in data)]
    assert absolute == []


def test_imports_become_relative() -> None:
    hub = builder()
    assert hub.relative("from fastkron_py.a.b import c\n", "__init__.py") == "from .a.b import c\n"
    assert hub.relative("if x:\n    from fastkron_py.a import c\n", "gated/kernels/d.py") == "if x:\n    from ...a import c\n"
    with pytest.raises(ValueError, match=r"expected 'from fastkron_py\.room import name', got 'import fastkron_py\.a'"):
        hub.relative("import fastkron_py.a\n", "a.py")
