"""The prefill arithmetic, against one written out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gated.prefill import IN_PLACE, MODELS, Model, draw, table


def test_tokens_that_a_cache_gains(tmp_path: Path) -> None:
    model = next(m for m in MODELS if m.name == "Llama 3.1 8B")
    eager, fused = 3 * 512 * 14336 * 2, 512 * 14336 * 2
    token = 32 * 2 * (8 * 128) * 2  # 128 KiB
    assert model.tokens() == (eager - fused) / token == 224
    assert model.tokens(before=IN_PLACE) == 112
    assert model.tokens(256) == 112
    assert model.tokens(grouped=False) == 56  # 32 heads in place of 8
    square = Model("c", 1, 64, 128, 1, 64)  # the source's c = 2: (5 + c) / (5 + 3 c)
    assert square.layer_share() == pytest.approx(7 / 11)
    assert len(table().splitlines()) == 2 + len(MODELS)
    assert "| Llama 3.1 8B | 3.5 | 28 | 128 | 224 | 112 | 56 | 55% |" in table()
    draw(tmp_path / "tokens.png")
    assert (tmp_path / "tokens.png").stat().st_size > 10_000
