"""The snippets of docs/guides/adapters.md, run as they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pages import text

pytest.importorskip("lycoris", reason="the extra lycoris is not installed")
pytest.importorskip("peft", reason="the extra peft is not installed")

from fastkron_py import lokr_linear
from fastkron_py.integrations.lycoris import FastLoKr as FastLycoris
from fastkron_py.integrations.peft import FastLoKr as FastPeft
from fastkron_py.testing import assert_close


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page saves an adapter into the current folder."""
    monkeypatch.chdir(tmp_path)


def run(blocks: int) -> dict[str, Any]:
    """The names that the first blocks leave, run in their order."""
    names: dict[str, Any] = {}
    for part in text("guides/adapters.md").split("```python\n")[1 : 1 + blocks]:
        exec(part.split("```")[0], names)
    return names


def test_peft() -> None:
    found = run(2)
    assert sum(isinstance(m, FastPeft) for m in found["adapted"].modules()) == len(found["applied"].replaced) == 2
    assert all(p.grad is not None for p in found["adapted"].parameters() if p.requires_grad)
    assert type(found["merged"].q_proj) is torch.nn.Linear
    assert Path("adapter/adapter_model.safetensors").is_file()


def test_lycoris() -> None:
    found = run(3)
    assert sum(isinstance(m, FastLycoris) for m in found["network"].modules()) == 2
    assert all(p.grad is not None for p in found["network"].parameters())


def test_the_function_and_the_layer() -> None:
    found = run(4)
    x, weight, w1, w2, y = (found[n] for n in ("x", "weight", "w1", "w2", "y"))
    want = x.double() @ weight.double().T + 0.5 * x.double() @ torch.kron(w1.double(), w2[0].double() @ w2[1].double()).T
    assert_close(y, want)
    assert found["layer"].lokr_w2_b.grad.count_nonzero()
    terms = [torch.kron(a, b) for a, b in zip(*(t.double() for t in found["sums"]), strict=True)]
    assert_close(lokr_linear(x, *found["sums"]), x.double() @ sum(terms).mT)  # type: ignore[union-attr]


def test_files() -> None:
    found = run(5)
    assert sorted(found["state"])[0] == "lora_unet_attn_q_proj.alpha"
    assert type(found["other"].attn.q_proj) is found["LoKrLinear"]
