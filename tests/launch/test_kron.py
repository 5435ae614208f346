"""Launches of a cached call, on a machine without a GPU: the same kernels on the same arguments as the first call's."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from launched_without_gpu import launched

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("launch_without_gpu")]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return launched("launch_without_gpu.py")[0]


def pointers(launch: dict[str, Any]) -> tuple[int, list[int], int, int]:
    """Addresses of (x, factors, z, y); see the kernels' signatures."""
    x, factors, z, y = launch["arguments"][:4]
    return x, factors, z, y


def test_the_same_launches(found: dict[str, Any]) -> None:
    """Through the JIT functions, for another program, and past them in a cached call: results lie elsewhere, all else is equal."""
    assert found["programs"] == 2
    for way in ("built again", "cached"):
        assert len(found[way]) == len(found["first"])
        for launch, first in zip(found[way], found["first"], strict=True):
            assert launch["grid"] == first["grid"]
            assert launch["stream"] == first["stream"] == 11
            assert launch["arguments"][4:] == first["arguments"][4:]


def test_the_same_operands(found: dict[str, Any]) -> None:
    x, *factors = found["operands"]
    for way in ("first", "built again", "cached"):
        assert len(found[way]) > 1  # so that one launch's result is the next one's operand
        given: list[int] = []
        source = x
        for launch in found[way]:
            x_ptr, factor_ptrs, z_ptr, y_ptr = pointers(launch)
            assert x_ptr == source
            assert z_ptr == y_ptr
            given = [*factor_ptrs, *given]
            source = y_ptr
        assert sorted(given) == sorted(factors)


def test_addresses_are_given_as_integers(found: dict[str, Any]) -> None:
    assert all(launch["tensors"] for way in ("first", "built again") for launch in found[way])
    assert not any(launch["tensors"] for launch in found["cached"])


def test_the_current_stream(found: dict[str, Any]) -> None:
    assert {launch["stream"] for launch in found["on another stream"]} == {12}


def test_another_current_device(found: dict[str, Any]) -> None:
    """The operands' device launches, on its own current stream; the other one is the current device again."""
    assert {launch["stream"] for launch in found["on another current device"]} == {12}
    assert len(found["on another current device"]) == len(found["first"])
    assert found["current device"] == 1


def test_an_unaligned_operand_is_compiled_for(found: dict[str, Any]) -> None:
    """Kernels are specialised to operands on a 16-byte boundary: another x goes through the JIT function."""
    assert found["shifted"] % 16 != 0
    assert found["unaligned"][0]["tensors"]
    assert pointers(found["unaligned"][0])[0] == found["shifted"]


def test_alpha(found: dict[str, Any]) -> None:
    def bits(value: float) -> int:
        return int(struct.unpack("<q", struct.pack("<d", value))[0])

    assert bits(3.0) in found["scaled"][-1]["arguments"]
    assert bits(-5.0) in found["scaled again"][-1]["arguments"]
    assert bits(3.0) not in found["scaled again"][-1]["arguments"]
    assert not found["scaled again"][-1]["tensors"]


def test_backward_passes(found: dict[str, Any]) -> None:
    """Built again and cached, they launch the same kernels as the first one, on the same operands; buffers lie elsewhere."""
    assert found["backward"]
    for ways in found["backward"].values():
        assert ways["programs"] == 2
        first, operands = ways["first"], ways["operands"]
        for way in ("built again", "cached"):
            assert len(ways[way]) == len(first) > 1
            for launch, like in zip(ways[way], first, strict=True):
                assert (launch["grid"], launch["stream"], launch["names"]) == (like["grid"], like["stream"], like["names"])
                for name, given, wanted in zip(like["names"], launch["arguments"], like["arguments"], strict=True):
                    if not name.endswith(("_ptr", "_ptrs")):
                        assert given == wanted, name
                        continue
                    for a, b in zip(flat(given), flat(wanted), strict=True):
                        assert (a in operands) == (b in operands)
                        assert a == b or a not in operands
        assert not any(launch["tensors"] for launch in ways["cached"])


def flat(pointers: Any) -> list[int]:
    return list(pointers) if isinstance(pointers, list) else [pointers]
