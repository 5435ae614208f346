"""Tensors that the library makes once are right in every later call, whatever mode the first call was in."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from scipy.linalg import hadamard as sylvester
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fastkron_py import hadamard
from fastkron_py.kan.bases.registry import find_basis
from fastkron_py.kan.bases.table import basis_table
from fastkron_py.nn.rational_fit import TABLE, initial
from fastkron_py.runtime import eager

CPU = torch.device("cpu")
X = torch.arange(48.0, dtype=torch.float64).view(3, 16).sin()
FIT = json.loads(TABLE.read_text())["B"]["gelu"]["numerator"]


def table() -> Tensor:
    return basis_table(find_basis("chebyshev"), 3, (), 17, torch.float64, CPU)


def table_values() -> Tensor:
    t = torch.linspace(-1, 1, 17, dtype=torch.float64, device="cpu")
    return torch.stack([torch.ones_like(t), t, 2 * t * t - 1])


# A function of no arguments, and its result.
MADE: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "hadamard": (lambda: hadamard(X), lambda: X @ torch.tensor(sylvester(16), dtype=torch.float64)),
    "table": (table, table_values),
    "rational": (lambda: initial("gelu", (5, 4), "B").a, lambda: torch.tensor(FIT, dtype=torch.float64)),
}


def in_fake_mode(call: Callable[[], Tensor]) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return call()


def on_meta(call: Callable[[], Tensor]) -> object:
    with torch.device("meta"):
        return call()


def in_inference_mode(call: Callable[[], Tensor]) -> object:
    with torch.inference_mode():
        return call()


MODES: dict[str, Callable[[Callable[[], Tensor]], object]] = {
    "none": lambda call: call(),
    "fake": in_fake_mode,
    "functionalize": lambda call: torch.func.functionalize(lambda z: call() + 0 * z.sum())(torch.ones(2)),
    "default device": on_meta,
    "inference": in_inference_mode,
    "vmap": lambda call: torch.func.vmap(lambda z: call() * z)(torch.ones(2)),
    "grad": lambda call: torch.func.grad(lambda z: (call() * z).sum())(torch.ones(())),
    "make_fx": lambda call: make_fx(lambda z: call() * z)(torch.ones(())),
    "make_fx symbolic": lambda call: make_fx(lambda z: call() * z, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.ones(())),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_next_call_is_right(mode: str) -> None:
    for call, wanted in MADE.values():
        check_the_next_call(call, wanted, mode)


def check_the_next_call(call: Callable[[], Tensor], wanted: Callable[[], Tensor], mode: str) -> None:
    MODES[mode](call)
    found = call()
    assert type(found) is Tensor
    assert not found.is_inference()
    torch.testing.assert_close(found, wanted(), rtol=0, atol=1e-12)
    MODES[mode](call)  # and what was made outside serves inside


@pytest.mark.parametrize("name", MADE)
def test_of_the_mode_in_it(name: str) -> None:
    """A fake mode takes no real tensors beside its own."""
    call, _ = MADE[name]
    call()
    with FakeTensorMode(allow_non_fake_inputs=name == "hadamard"):
        assert isinstance(call(), FakeTensor)
    with FakeTensorMode():
        assert isinstance(hadamard(torch.empty(2, 16)), FakeTensor)
        assert hadamard(torch.empty(2, 24, device="cuda")).device.type == "cuda"  # with a GPU or without


def test_an_error_in_making_is_raised() -> None:
    def make() -> list[Tensor]:
        raise ValueError("none of this size")

    with pytest.raises(ValueError, match="none of this size"):
        eager.constants(make, (), CPU)
