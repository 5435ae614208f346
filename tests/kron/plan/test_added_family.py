"""The documentation's example of a kernel family: two files in a copy of the package, which the planner finds, prints and launches."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import forked
import torch

ROOT = Path(__file__).parents[3]
CODE = """
import torch, fastkron_py
from fastkron_py import KroneckerProduct, families, kron_matmul, kron_plan
from fastkron_py.testing import assert_close

device = torch.device({device!r})
torch.manual_seed(0)
shapes = [(7, 1), (5, 1)]
with families("column"):
    plan = kron_plan((30, 35), shapes, device="A100")
    assert [launch.family for launch in plan.launches] == ["column", "column"], plan
x, z = torch.randn(30, 35, device=device), torch.randn(30, 1, device=device)
factors = [torch.randn(shape, device=device) for shape in shapes]
dense = KroneckerProduct([f.double() for f in factors]).to_dense()
with fastkron_py.backend("triton"), families("column"):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        y = kron_matmul(x.to(dtype), [f.to(dtype) for f in factors], alpha=2.0, beta=0.5, z=z.to(dtype))
        if dtype != torch.bfloat16:
            assert_close(y, 2 * x.double() @ dense + 0.5 * z.double(), steps=2)
    left = kron_matmul(torch.randn(3, 4, 35, device=device), factors)
    assert left.shape == (3, 4, 1)
    try:
        kron_matmul(x, [torch.eye(35, device=device)])
    except ValueError as error:
        assert "column takes one factor of one column" in str(error)
"""


def test_the_documented_family(tmp_path: Path, device: torch.device) -> None:
    page = (ROOT / "docs/how_it_works/add_a_family.md").read_text()
    files = re.findall(r"`(fastkron_py/kron/\S+\.py)`:\n\n```python\n(.*?)```", page, flags=re.S)
    assert len(files) == 2
    shutil.copytree(ROOT / "fastkron_py", tmp_path / "fastkron_py", ignore=shutil.ignore_patterns("__pycache__"))
    for path, code in files:
        assert not (tmp_path / path).exists()
        (tmp_path / path).write_text(code)
    done = forked.run(CODE.format(device=str(device)), folder=tmp_path)
    assert done.returncode == 0, done.stderr
