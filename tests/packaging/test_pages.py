"""The Python code of the README and of the guides runs, and the reference has every public name."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest
from pages import DOCS, text
from torchvision_import import import_torchvision

README = Path("..") / "README.md"

# Objects that a page takes for granted: a user has them.
LLAMA = """
import torch, transformers
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=16)
llama = model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
tokens = torch.arange(8)[None]
"""
TORCHVISION = """
from torchvision_import import import_torchvision
import_torchvision()
"""
GRID_GP = """
import gpytorch, torch
class GridGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.GridInterpolationKernel(gpytorch.kernels.RBFKernel(), grid_size=8, num_dims=2)
    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
train_x, train_y = torch.rand(20, 2), torch.rand(20)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = GridGP(train_x, train_y, likelihood)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
"""
GIVEN = {
    "guides/gated_mlp.md": TORCHVISION + LLAMA,
    "guides/kat.md": TORCHVISION,
    str(README): GRID_GP,
}
EXTRAS = {"botorch", "gpytorch", "lycoris", "matplotlib", "mpi4py", "peft", "scipy", "skimage", "sklearn", "timm", "transformers"}
ELSEWHERE = {"guides/adapters.md"}  # run by tests/integrations/test_adapters_page.py


def blocks(page: str) -> list[str]:
    """The fenced Python code of a page, in its order."""
    return re.findall(r"^```python\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)


def run(page: str) -> subprocess.CompletedProcess[str]:
    """Run a page's code as one program, in a process of its own."""
    return run_code("\n".join([GIVEN.get(page, ""), *blocks(page)]))


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own; skips where a package that an extra adds is not installed."""
    names = set(re.findall(r"^ *(?:from|import) (?:fastkron_py\.integrations\.)?(\w+)", code, re.MULTILINE))
    missing = [name for name in sorted(names & EXTRAS) if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return program(code)


def program(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a user would: one rank, no launcher."""
    path = os.pathsep.join(filter(None, sys.path))
    launchers = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in launchers} | {"PYTHONPATH": path}
    return forked.run(code, *arguments, environment=environment)


def guides() -> list[str]:
    """Pages with code of their own, that no other test runs."""
    pages = sorted(str(p.relative_to(DOCS)) for p in [*DOCS.glob("*.md"), *DOCS.glob("guides/*.md")])
    return [p for p in pages if p not in ELSEWHERE and p != "extending.md" and blocks(p)] if DOCS.is_dir() else []


def test_code_of_the_readme() -> None:
    result = run(str(README))
    assert result.returncode == 0, result.stderr


@pytest.mark.full
@pytest.mark.parametrize("page", guides())
def test_code_of_a_guide(page: str) -> None:
    result = run(page)
    assert result.returncode == 0, result.stderr


NOTEBOOKS = sorted((DOCS.parent / "examples" / "notebooks").glob("*.py"))


@pytest.mark.full
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook(notebook: Path) -> None:
    """Its cells, in their order; they assert what they show."""
    result = run_code(TORCHVISION + notebook.read_text())
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_with_results_is_that_of_its_file(notebook: Path) -> None:
    """`make notebooks` has run the present code, without an error."""
    cells = json.loads(notebook.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    parts = re.split(r"^# %%.*\n", notebook.read_text(encoding="utf-8"), flags=re.MULTILINE)
    written = [part.strip() for part in parts if part.strip() and not part.startswith("#")]
    assert ["".join(cell["source"]).strip() for cell in code] == written
    assert all(output["output_type"] != "error" for cell in code for output in cell["outputs"])
    assert any(cell["outputs"] for cell in code)


def test_a_page_whose_packages_or_file_are_missing_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.find_spec", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match=r"not installed: gpytorch, peft"):
        run_code("import torch\nfrom fastkron_py.integrations.gpytorch import use_fastkron\nif True:\n    import peft\n")
    assert "no_such_package" in run_code("import no_such_package").stderr  # of no extra: the page is wrong
    with pytest.raises(pytest.skip.Exception, match=r"guides/no_such_page.md is not here"):
        text("guides/no_such_page.md")


def test_the_readme_is_short() -> None:
    lines = text(str(README)).splitlines()
    assert len(lines) <= 110
    prose = re.sub(
        r"^```.*?^```$|^    .*?$|^\|.*?$|^#.*?$|!?\[[^\]]*\]\([^)]*\.png\)", "", "\n".join(lines), flags=re.DOTALL | re.MULTILINE
    )
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    sentences = re.split(r"(?<=[.:?!])[\s*]+|\n\n|\n- ", prose)
    assert [s for s in sentences if len(s.split()) > 25] == []


def test_lines_of_the_pages() -> None:
    """At most 100 characters, in prose and in Python code; tables, pictures and what programs print may be wider."""
    assert [f"{page.name}:{n}" for page in DOCS.rglob("*.md") for n in _long_lines(page.read_text())] == []
    assert _long_lines(f"```python\nx\n```\n{'a' * 101}\n```\n{'b' * 101}\n```\n    {'c' * 101}\n| {'d' * 101}") == [4]


def _long_lines(page: str) -> list[int]:
    long, fence = [], None
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith("```"):
            fence = line if fence is None else None
        elif fence != "```" and len(line) > 100 and not line.startswith(("|", "![", "    ")):
            long.append(number)
    return long


MODULES = (
    "fastkron_py",
    "fastkron_py.distributed",
    "fastkron_py.functional",
    "fastkron_py.integrations.gpytorch",
    "fastkron_py.integrations.lycoris",
    "fastkron_py.integrations.peft",
    "fastkron_py.integrations.timm",
    "fastkron_py.integrations.transformers",
    "fastkron_py.nn",
)
PUBLIC_WITHOUT_ALL = {
    "fastkron_py.testing": ("assert_close", "tolerances"),
    "fastkron_py.reference": ("kron_dense", "kron_matmul", "lokr_linear"),
}


def found(name: str) -> object:
    """The object behind a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@cache
def described() -> dict[str, object]:
    """The entries of the reference, and their objects."""
    if not DOCS.is_dir():
        pytest.skip("the tests run beside an installed package, without the source tree")
    pytest.importorskip("lycoris")  # of all extras, the one that a GPU machine may lack
    import_torchvision()
    names = [name for page in (DOCS / "reference").glob("*.md") for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)]
    return {name: found(name) for name in names}


def examples(*pages: str) -> subprocess.CompletedProcess[str]:
    """Run the examples behind pages of the reference, in a process of their own with one rank."""
    if "integrations.md" in pages:
        pytest.importorskip("lycoris")
    code = f"import runpy\nrunpy.run_path({str(Path(__file__).parent / 'run_examples.py')!r}, run_name='__main__')"
    return program(code, *[str(DOCS / "reference" / page) for page in pages])


def missing(module: str, entries: Iterable[object]) -> list[str]:
    """Public names of a module whose objects are not among the entries."""
    names = getattr(importlib.import_module(module), "__all__", None) or PUBLIC_WITHOUT_ALL[module]
    ids = {id(entry) for entry in entries}
    return [name for name in names if id(found(f"{module}.{name}")) not in ids]


def test_the_reference_has_every_public_name() -> None:
    for module in (*MODULES, *PUBLIC_WITHOUT_ALL):
        assert missing(module, described().values()) == [], module
    entries = [entry for name, entry in described().items() if name != "fastkron_py.hadamard"]
    assert missing("fastkron_py", entries) == ["hadamard"]


APART = ("distributed.md", "integrations.md")  # of a group of processes, and with other libraries loaded
TOGETHER = sorted(p.name for p in (DOCS / "reference").glob("*.md") if p.name not in APART)


@pytest.mark.full
@pytest.mark.parametrize("pages", [*[[page] for page in APART], TOGETHER], ids=[*APART, "the others"])
def test_examples_of_the_reference(pages: list[str]) -> None:
    """Every function and class has an example in its docstring, which runs."""
    result = examples(*pages)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_reference_looks_at_every_module() -> None:
    """Integrations that need an extra, and submodules that `fastkron_py` offers."""
    import fastkron_py

    folder = Path(fastkron_py.__file__).parent / "integrations"
    files = [p for p in [*folder.glob("*.py"), *folder.glob("*/__init__.py")] if "with of_extra(" in p.read_text()]
    integrations = {(p.parent if p.stem == "__init__" else p).stem for p in files}
    assert {m.rsplit(".", 1)[1] for m in MODULES if ".integrations." in m} == integrations
