"""The benchmarks of layers: each contender computes the same, and a result with one wrong part is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torchvision_import import import_torchvision

import fastkron_py
from benchmarks.gated import layers as gated
from benchmarks.kan import peers as kan_peers
from benchmarks.kan import problems as kan
from benchmarks.kan.ablation import STEPS
from benchmarks.registry import Case, Contender
from fastkron_py.runtime.backend import requested_backend

import_torchvision()


class Table(NamedTuple):
    """A row of a benchmark, and what is asked of its contenders."""

    row: Callable[[], Case]
    inputs: Callable[..., Any]
    check: Callable[..., float]
    contenders: Sequence[Contender]
    backend: str = "triton"


KAN_ROW = (24, 6, 10, 5)
FORWARD = (
    *(kan_peers.OURS, kan_peers.OURS_TABLE, kan_peers.TRIGONOMETRIC, kan_peers.RECURRENCE),
    *(kan_peers.TABLE, kan_peers.BASIS_KERNEL, *STEPS),
)
BACKWARD = (kan_peers.OURS_BACKWARD, kan_peers.TRIGONOMETRIC_BACKWARD, kan_peers.RECURRENCE_BACKWARD, kan_peers.BASIS_KERNEL_BACKWARD)
TABLES = {
    "gated": Table(lambda: gated.case("small", 33, "float16"), gated.inputs, gated.check, gated.contenders("float16")),
    **{
        f"gated, gradients, {'whole' if whole else 'wide half'}": Table(
            lambda whole=whole: gated.case("small", 33, "float16", gradients=True, whole=whole),  # type: ignore[misc]
            *(gated.inputs, gated.check_gradients, gated.BACKWARD),
        )
        for whole in (False, True)
    },
    "kan": Table(lambda: kan.case(KAN_ROW, "float32"), kan.inputs, kan.check, FORWARD),
    "kan, bfloat16": Table(lambda: kan.case(KAN_ROW, "bfloat16"), kan.inputs, kan.check, FORWARD),
    "kan, gradients": Table(lambda: kan.case(KAN_ROW, "float32", gradients=True), kan.inputs, kan.check_gradients, BACKWARD),
}
if importlib.util.find_spec("transformers"):
    from benchmarks.gated import models

    NEEDS_NOTHING = [c for c in models.CONTENDERS if c.obstacle(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is None]
    TABLES |= {
        f"decoder layers, {'training' if training else 'prefill'}": Table(
            lambda training=training: models.case("small", 16, "float32", training),  # type: ignore[misc]
            *(models.inputs, models.check, NEEDS_NOTHING, "auto"),
        )
        for training in (False, True)
    }


def with_one_wrong_part(found: Any) -> list[Any]:
    """The results with each part in turn moved by one."""
    parts = [found] if isinstance(found, Tensor) else list(found)
    made: list[Any] = []
    for i, part in enumerate(parts):
        moved = [part.roll(1, -1), part.roll(1, -2)]
        made += [m if isinstance(found, Tensor) else [m if i == j else p for j, p in enumerate(parts)] for m in moved]
    return made


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n.startswith("decoder") else ()) for n in TABLES])
def test_contenders(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gated.LLAMAS, "small", (24, 40))
    table = TABLES[name]
    row = table.row()
    with fastkron_py.backend(requested_backend() if table.backend == "auto" else table.backend):
        problem = table.inputs(row.parameters, device)
        for contender in table.contenders:
            if "torch.compile" not in contender.name:  # the same operations, and they take a minute
                found = contender.prepare(problem)()
                assert table.check(problem, found) <= max(row.tolerance, contender.tolerance), contender.name
                for wrong in with_one_wrong_part(found):
                    assert table.check(problem, wrong) > 0.1, contender.name
