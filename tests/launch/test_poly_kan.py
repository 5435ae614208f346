"""What a cached call of a layer hands to the driver, on a machine without a GPU: what the first call does, argument by argument."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launched_without_gpu import launched

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("launch_without_gpu")]

PASSES = ("forward", "backward")
CACHED = ("cached", "on another stream", "watched", "cached again")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return launched("launch_poly_kan_without_gpu.py")[0]


def on_stream(launches: list[Any], stream: int) -> list[Any]:
    return [[[*grid[:3], stream], *rest] for grid, *rest in launches]


def test_the_same_launches(found: dict[str, Any]) -> None:
    """In the same order, of the same kernels' arguments, on memory that is used alike."""
    counts = {}
    for name, ways in found.items():
        first = ways["through the JIT functions"]
        for way in ("built again", *CACHED):
            for part in PASSES:
                stream = 12 if way == "on another stream" else 11
                assert ways[way][part] == on_stream(first[part], stream), (name, way, part)
        counts[name] = [len(first[part]) for part in PASSES]
        described = sum(len(encoded) for part in PASSES for _, encoded, _ in first[part])
        assert described >= 4 or "small" in name
    # Forward: sums of C[0], C's low halves, y. Backward: C transposed, dy's low halves, dx; dy transposed, dC, the sum of its parts,
    # dC[0] in one or two, the bias's as dC[0]. In bfloat16 dy need not be transposed, and nothing has low halves in one pass. In three
    # passes one launch prepares dy and the coefficients. Of a small layer: y and its sum; dx and dC in one launch, the sum of dx's parts,
    # the bias's.
    assert counts == {"bfloat16": [2, 5], "TF32, with bias": [2, 8], "three passes": [3, 4], "small, with bias": [2, 3]}


def test_what_is_cached(found: dict[str, Any]) -> None:
    both = ["poly_kan", "poly_kan_backward"]
    for ways in found.values():
        assert ways["built"] == {way: [] if way in CACHED else both for way in ways["built"]}


def test_layers_differ(found: dict[str, Any]) -> None:
    """Else the above could not fail."""
    for part in PASSES:
        assert len({json.dumps(ways["built again"][part]) for ways in found.values()}) == len(found)
