"""Run the examples of the docstrings behind pages of the reference. Usage: python run_examples.py docs/reference/PAGE.md ...

Prints what failed, and the entries without an example; the exit status is their number.
"""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import fastkron_py
from fastkron_py import functional, nn

# Made by functions, which have the examples, and records whose examples are docs/extending.md's.
WITHOUT = {
    *("Activation", "Denominator", "DeviceFunctions"),
    *("Applied", "Plan", "ProcessInfo", "Solution", "TuningResult"),
    *("CollectiveError", "Convergence", "Eigh", "InvQuadLogdet", "KroneckerFunction", "MaskedKroneckerProduct", "Quantized", "SlogDet"),
}


class Attention(torch.nn.Module):
    """A model for adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)


def of_adapters() -> dict[str, Any]:
    return {"model": Attention(), "copy": copy}


def of_gpytorch() -> dict[str, Any]:
    import gpytorch
    from gp_models import ExactModel, ski
    from linear_operator.operators import ToeplitzLinearOperator

    from fastkron_py.integrations.gpytorch import use_fastkron

    x, y = torch.rand(20, 2), torch.rand(20)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = ExactModel(x, y, likelihood, ski(2))
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return {"x": x, "y": y, "model": model, "mll": mll, "use_fastkron": use_fastkron, "ToeplitzLinearOperator": ToeplitzLinearOperator}


def of_transformers() -> dict[str, Any]:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, **sizes))
    return {"model": model, "input_ids": torch.arange(8)[None], "copy": copy}


def of_timm() -> dict[str, Any]:
    import timm

    return {"timm": timm}


GIVEN = {"gpytorch": of_gpytorch, "peft": of_adapters, "lycoris": of_adapters, "transformers": of_transformers, "timm": of_timm}


def names_for(entry: str) -> dict[str, Any]:
    """The names that an entry's examples may use: public ones, those of its module, and those of its library."""
    names: dict[str, Any] = {"torch": torch, "np": numpy, "fastkron_py": fastkron_py}
    module = importlib.import_module(entry.rpartition(".")[0])
    for room in (functional, fastkron_py, nn, module):
        names |= {name: getattr(room, name) for name in getattr(room, "__all__", ())}
    library = entry.removeprefix("fastkron_py.integrations.").split(".")[0]
    if library in GIVEN:
        names |= {library: importlib.import_module(library)} | GIVEN[library]()
    return names


def run(entry: str) -> int:
    """The failures of an entry's examples, and 1 for none where there should be one."""
    module, _, name = entry.rpartition(".")
    public = getattr(importlib.import_module(module), name)
    finder = doctest.DocTestFinder(recurse=inspect.isclass(public))
    tests = [test for test in finder.find(public, name, module=False) if test.examples]  # type: ignore[arg-type]
    if not tests and name not in WITHOUT:
        print(f"{entry} has no example")
        return 1
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in tests:
        test.globs = names_for(entry) | {name: public}
        runner.run(test)
    return runner.failures


def main(pages: Sequence[str]) -> int:
    """All entries of these pages."""
    entries = [entry for page in pages for entry in re.findall(r"^::: ([\w.]+)$", Path(page).read_text(), re.MULTILINE)]
    if any(".integrations." in entry for entry in entries):
        from torchvision_import import import_torchvision

        import_torchvision()
    return sum(run(entry) for entry in entries)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
