"""Every gated MLP class of transformers, made from its family's configurations, with `use_fastkron` and without.

Usage: python tests/integrations/families.py [--page docs/guides/gated_mlp_families.md] [FAMILY ...]

It prints a line for each class and writes the page. It fails if results or gradients differ, or if fewer families are served than before.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import inspect
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchvision_import import import_torchvision

from fastkron_py.integrations import transformers as layers
from fastkron_py.integrations.transformers import read_form, use_fastkron

import_torchvision()
transformers: Any = importlib.import_module("transformers")
MODELS = Path(transformers.__file__).parent / "models"
TOLERANCE = 1e-5  # relative, of float32
AT_LEAST = 160  # families
UNMADE = "cannot be made alone"
SHRINK = 64  # by which sizes of a configuration are divided
GUESSES = {
    "act": "silu",
    "bias": False,
    "idx": 0,
    "limit": 7.0,
    "rate": 0.1,
}  # what configurations lack, by a part of the name; sizes are 24


class Row(NamedTuple):
    """An MLP class."""

    family: str
    name: str
    reason: str  # why it is left alone; "" if it is served
    error: float = 0.0  # the largest, of the result and of the gradients of input and parameters


def candidates(family: str) -> list[str]:
    """Classes with two to four linear layers and a product in their forward pass, which asks for one argument."""
    path = MODELS / family / f"modeling_{family}.py"
    if not path.exists():
        return []
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            functions = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
            linears = [n for n in ast.walk(functions.get("__init__", node)) if isinstance(n, ast.Call) and "Linear" in ast.unparse(n.func)]
            forward = functions.get("forward")
            if forward is None or len(forward.args.args) - len(forward.args.defaults) != 2 or not 2 <= len(linears) <= 4:
                continue
            if any(isinstance(n, ast.Mult) for n in ast.walk(forward)):
                found.append(node.name)
    return found


def configurations(family: str) -> Iterator[Any]:
    """Of a family, with small sizes."""
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    for kind in vars(module).values():
        if inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedConfig) and kind.__module__ == module.__name__:
            try:
                config = kind()
            except Exception:  # one that asks for arguments
                continue
            for name, value in list(vars(config).items()):
                if type(value) is int and value >= 4 * SHRINK and "token" not in name:
                    object.__setattr__(config, name, value // SHRINK // 2 * 2)
            yield config


def guess(name: str) -> Any:
    return next((value for part, value in GUESSES.items() if part in name), 24)


def made(kind: type[nn.Module], config: Any) -> nn.Module:
    """A module of this class; what the configuration or the constructor's arguments lack is guessed."""
    given: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if "config" in name:
            given[name] = config
        elif parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            given[name] = getattr(config, name, guess(name))
    for _ in range(4):
        try:
            return kind(**given)
        except AttributeError as failure:
            lacking = re.search(r"Config' object has no attribute '(\w+)'", str(failure))
            if lacking is None:
                raise
            object.__setattr__(config, lacking[1], guess(lacking[1]))
    raise AttributeError("a configuration of another class")


def error(mlp: nn.Module, width: int) -> float:
    """The largest relative difference that `use_fastkron` makes."""
    torch.manual_seed(0)
    mlp = mlp.float().eval()
    with torch.no_grad():
        for p in mlp.parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    changed = copy.deepcopy(mlp)
    use_fastkron(changed)
    x, calls, gated_mlp = torch.randn(2, 5, width), [], layers.gated_mlp

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(None)
        return gated_mlp(*args, **kwargs)

    layers.gated_mlp = counted
    dy, results = None, []
    for module in (mlp, changed):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        dy = torch.randn_like(y) if dy is None else dy
        gradients = torch.autograd.grad(y, [leaf, *module.parameters()], dy)
        results.append([y.detach(), *gradients])
    layers.gated_mlp = gated_mlp
    assert len(calls) == 1
    return max(relative(a, b) for a, b in zip(results[1], results[0], strict=True))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def row(family: str, name: str) -> Row | None:
    """What becomes of a class; None if it is no gated MLP."""
    kind = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    reason: Any = None
    for config in configurations(family):
        try:
            mlp = made(kind, config)
        except Exception as failure:
            reason = reason or f"{UNMADE}: {type(failure).__name__}"
            continue
        form = read_form(mlp)
        if form is not None:
            obstacle = layers.GatedProjections.obstacle(mlp)
            return Row(family, name, obstacle or "", 0.0 if obstacle else error(mlp, getattr(mlp, form.up).in_features))
        reason = ""
    return Row(family, name, reason) if reason else None


def rows(families: list[str]) -> Iterator[Row]:
    for family in families or sorted(path.name for path in MODELS.iterdir() if path.is_dir()):
        for name in candidates(family):
            found = row(family, name)
            if found is not None:
                yield found


def page(found: list[Row]) -> str:
    """The page of the families, in Markdown."""
    served = {r.family: [c.name for c in found if c.family == r.family and not c.reason] for r in found if not r.reason}
    unmade = [f"`{r.name}`" for r in found if r.reason.startswith(UNMADE)]
    alone = [r for r in found if r.reason and not r.reason.startswith(UNMADE)]
    several = {name: f"{name} ({len(classes)} classes)" for name, classes in served.items() if len(classes) > 1}
    intro = (
        f"[`use_fastkron`](gated_mlp.md#hugging-face-transformers) supports the gated MLPs of {len(served)} families of "
        f"transformers {transformers.__version__}, {sum(map(len, served.values()))} classes. `make families` writes this page. It makes "
        "each class from its family's configuration, and compares results and gradients with those of the unmodified class, in "
        f"float32. The largest relative difference is {max(r.error for r in found):.0e}. Experts with three-dimensional weights are "
        "not supported."
    )
    lines = [
        "# Families of transformers",
        "",
        *textwrap.wrap(intro, 100),
        "",
        "## Supported",
        "",
        *textwrap.wrap(", ".join(several.get(name, name) for name in served), 100),
        "",
        "## Left alone",
        "",
        "These classes look like a gated MLP: they have a product and two to four linear layers.",
        "",
        "| family | class | reason |",
        "| --- | --- | --- |",
        *[f"| {r.family} | `{r.name}` | {r.reason.split(' with one of')[0]} |" for r in alone],
        "",
        "## Not tested",
        "",
        "These need more than a configuration. Most are attention or heads of models.",
        "",
        *textwrap.wrap(", ".join(unmade), 100),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for r in rows(given.families):
        print(*r, sep="\t", flush=True)
        found.append(r)
    served = Counter([r.family for r in found if not r.reason])
    print(f"{len(served)} families, {served.total()} classes; the largest difference: {max(r.error for r in found):.1e}")
    if given.page:
        given.page.write_text(page(found))
    if max(r.error for r in found) > TOLERANCE or not (given.families or len(served) >= AT_LEAST):
        sys.exit(1)


if __name__ == "__main__":
    main()
