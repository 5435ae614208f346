"""The snippets of docs/guides/adapters.md, run as they stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pages import text
from torch import Tensor, nn

pytest.importorskip("lycoris", reason="the extra lycoris is not installed")
pytest.importorskip("peft", reason="the extra peft is not installed")

from fastkron_py.integrations.lycoris.modules import FastLoKr as FastLycoris
from fastkron_py.integrations.peft.layers import FastLoKr as FastPeft
from fastkron_py.testing import assert_close


class Attention(nn.Module):
    """A model with the names that the page uses."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.v_proj(self.q_proj(x))
        return y


def run(index: int) -> dict[str, Any]:
    """The names that a snippet leaves, given a model."""
    names: dict[str, Any] = {"model": Attention()}
    code = text("guides/adapters.md").split("```python\n")[1 + index].split("```")[0]
    exec(code, names)
    return names


def test_peft() -> None:
    model = run(0)["model"]
    assert sum(isinstance(m, FastPeft) for m in model.modules()) == 2
    assert model(torch.ones(3, 64)).shape == (3, 64)


def test_lycoris() -> None:
    found = run(1)
    assert sum(isinstance(m, FastLycoris) for m in found["network"].modules()) == 2
    assert found["model"](torch.ones(3, 64)).shape == (3, 64)


def test_the_function_and_the_layer() -> None:
    found = run(2)
    x, weight, w1, w2, y = (found[n] for n in ("x", "weight", "w1", "w2", "y"))
    want = x.double() @ weight.double().T + 0.5 * x.double() @ torch.kron(w1.double(), w2[0].double() @ w2[1].double()).T
    assert_close(y, want)
    assert found["layer"].lokr_w2_b.grad.count_nonzero()
