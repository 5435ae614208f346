"""What programs of linear layers hand to the driver, on a machine without a GPU: the same in every run, argument by argument."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launched_without_gpu import launched

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("launch_without_gpu")]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return launched("launch_gemm_without_gpu.py")[0]


def test_the_same_launches(found: dict[str, Any]) -> None:
    """Through the JIT function, of another program, and repeated: results lie elsewhere, all else is equal."""
    assert len(found["calls"]) == 14
    given = set(found["given"])
    for name, ways in found["calls"].items():
        assert len(ways["first"]) == (2 if "two launches" in name else 1)
        for way in ("again", "repeated"):
            for launch, first in zip(ways[way], ways["first"], strict=True):
                assert sum(argument == "descriptor" for argument in first["arguments"]) == len(first["encoded"]) >= 3, name
                assert launch["grid"] == first["grid"]
                assert launch["arguments"] == first["arguments"], (name, way)
                for a, b in zip(launch["encoded"], first["encoded"], strict=True):
                    assert a[1:] == b[1:], (name, way)  # box, sizes, strides, kind of element, padding
                    assert a[0] == b[0] or not {a[0], b[0]} & given, (name, way)


def test_two_launches(found: dict[str, Any]) -> None:
    """The second one's weight begins where the first one's ends, and its result a row of the first one's width to the right."""
    x, weight, rest, stacked_rest = found["given"][-4:]
    for name, begin in (("two launches", rest), ("two launches, stacked", stacked_rest), ("two launches, two weights", stacked_rest)):
        for way in ("first", "again", "repeated"):
            first, second = (launch["encoded"] for launch in found["calls"][name][way])
            assert [e[0] for e in first[:2]] == [x, weight]
            assert [e[0] for e in second[:2]] == [x, begin]
            assert second[2][0] - first[2][0] == 25344 // 2 * 2


def test_two_weights(found: dict[str, Any]) -> None:
    """One descriptor reaches both, from the lower address, whichever is which."""
    low, high = found["given"][-6:-4]
    for name in ("two weights", "two weights, the second one ahead"):
        for way in ("first", "again", "repeated"):
            begin, *_, sizes, strides, _ = found["calls"][name][way][0]["encoded"][1]
            assert (begin, sizes, strides) == (low, [2, 128, 64], [(high - low) // 2, 64, 1])


def test_the_second_of_two_launches_may_begin_early(found: dict[str, Any]) -> None:
    for name, ways in found["calls"].items():
        for way in ("first", "again", "repeated"):
            assert [launch["early"] for launch in ways[way]] == ([False, True] if "two launches" in name else [False])


def test_calls_differ(found: dict[str, Any]) -> None:
    """Else the above could not fail."""
    launches = [json.dumps(ways["first"][0]["arguments"]) for ways in found["calls"].values()]
    assert len(set(launches)) >= 5


def test_repeated_calls_were_cached(found: dict[str, Any]) -> None:
    assert all(ways["served"] == [False, False, True] for ways in found["calls"].values())


def test_what_is_launched_directly(found: dict[str, Any]) -> None:
    """Not for pointers that the kernel was not compiled for, nor where a profiler wants to be told."""
    assert found["direct"] == {"first": False, "repeated": True, "unaligned bias": False, "watched": False, "repeated again": True}
