"""Calls like one that was made before: repeated right, and never where anything that they depend on has changed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from modes import Functions, Operators
from shapes_list import assert_near, call, expected
from torch import Tensor
from torch.func import jvp, vmap

import fastkron_py
from fastkron_py import kron_matmul
from fastkron_py.kron import cached as recorded
from fastkron_py.runtime import call_cache as records
from fastkron_py.runtime import torch_internals as guards

SIDES = pytest.mark.parametrize("left", [False, True], ids=["right", "left"])


class Spy:
    """Counts the calls that a record served."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served = 0
        inner = recorded.replay

        def replay(*arguments: Any) -> Tensor | None:
            y = inner(*arguments)
            self.served += y is not None
            return y

        monkeypatch.setattr(recorded, "replay", replay)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    recorded.forget()
    with fastkron_py.backend("triton"):
        yield Spy(monkeypatch)
    recorded.forget()


def draw(device: torch.device, left: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn((12, 5) if left else (5, 12), dtype=dtype, device=device)
    return x, [torch.randn(3, 3, dtype=dtype, device=device), torch.randn(4, 4, dtype=dtype, device=device)]


@SIDES
@pytest.mark.parametrize("alpha", [1.0, -2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_second_call_is_served(dtype: torch.dtype, alpha: float, left: bool, spy: Spy, device: torch.device) -> None:
    for i in range(3):
        x, factors = draw(device, left, dtype)  # other numbers each time
        y = call(left)(x, factors, alpha=alpha)
        assert spy.served == i
        assert_near(y, expected(x, factors, left=left, alpha=alpha))


@pytest.mark.parametrize(
    ("x_shape", "factor_shapes"),
    [
        ((12,), [(3, 2), (4, 5)]),
        ((2, 5, 12), [(3, 2), (4, 5)]),
        ((2, 5, 12), [(2, 3, 2), (2, 4, 5)]),
        ((5, 12), [(2, 1, 3, 2), (4, 5)]),
        ((5, 128), [(2, 2)] * 7),
    ],
    ids=["vector", "batch of x", "batches", "broadcast", "many factors"],
)
@SIDES
def test_other_ranks(x_shape: tuple[int, ...], factor_shapes: list[tuple[int, ...]], left: bool, spy: Spy, device: torch.device) -> None:
    if left:
        x_shape = x_shape if len(x_shape) == 1 else (*x_shape[:-2], x_shape[-1], x_shape[-2])
        factor_shapes = [(*s[:-2], s[-1], s[-2]) for s in factor_shapes]
    for _ in range(3):
        x, factors = torch.randn(x_shape, device=device), [torch.randn(s, device=device) for s in factor_shapes]
        y = call(left)(x, factors)
        wanted = expected(x, factors, left=left)
        assert y.shape == wanted.shape
        assert y.is_contiguous()
        assert_near(y, wanted)
    assert spy.served == 2


@pytest.mark.parametrize(
    "change", ["same factor twice", "transposed factors", "strided x", "x with strided rows", "offset x", "tuple", "Parameter"]
)
def test_operands_of_the_same_shapes(change: str, spy: Spy, device: torch.device) -> None:
    x, factors = torch.randn(5, 16, device=device), [torch.randn(4, 4, device=device) for _ in range(2)]
    kron_matmul(x, factors)
    given: Any = factors
    if change == "same factor twice":
        given = factors = [factors[0]] * 2
    elif change == "transposed factors":
        given = factors = [f.mT for f in factors]
    elif change == "strided x":
        x = torch.randn(16, 5, device=device).mT
    elif change == "x with strided rows":
        x = torch.randn(5, 32, device=device)[:, :16]
    elif change == "offset x":
        x = torch.randn(5 * 16 + 1, device=device)[1:].view(5, 16)  # passes the guards, but is not aligned
    elif change == "tuple":
        given = tuple(factors)
    else:
        given = [torch.nn.Parameter(f, requires_grad=False) for f in factors]
    for _ in range(3):
        assert_near(kron_matmul(x, given), expected(x, factors))
    assert spy.served == {"strided x": 0, "tuple": 3, "offset x": 3}.get(change, 2)


def test_a_gradient_is_recorded_whenever_it_is_wanted(spy: Spy, device: torch.device) -> None:
    x, factors = draw(device)
    kron_matmul(x, factors)
    factors[1].requires_grad_()
    y = kron_matmul(x, factors)
    assert y.requires_grad
    y.sum().backward()
    assert factors[1].grad is not None
    for _ in range(3):
        with torch.no_grad():
            assert not kron_matmul(x, factors).requires_grad
        assert kron_matmul(x, factors).requires_grad
    assert spy.served == 5  # of each kind all but the first


def test_the_result_can_be_changed_in_place_later(spy: Spy, device: torch.device) -> None:
    x, factors = draw(device)
    weight = torch.randn(5, 12, device=device, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            y = kron_matmul(x, factors)
        y.mul_(weight)
        y.sum().backward()
    assert spy.served == 1
    assert_near(weight.grad, 2 * expected(x, factors))


def test_autocast(spy: Spy, device: torch.device) -> None:
    x, factors = draw(device)
    kron_matmul(x, factors)
    for _ in range(2):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert kron_matmul(x, factors).dtype == torch.bfloat16
    assert spy.served == 0
    assert kron_matmul(x, factors).dtype == torch.float32
    assert spy.served == 1


def test_inference_mode(spy: Spy, device: torch.device) -> None:
    x, factors = draw(device)
    for _ in range(3):
        assert not kron_matmul(x, factors).is_inference()
        with torch.inference_mode():
            y = kron_matmul(x, factors)
            assert y.is_inference()
            assert_near(y, expected(x, factors))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward mode
def test_transforms(spy: Spy, device: torch.device) -> None:
    x, factors = draw(device)
    wanted = expected(x, factors)
    for _ in range(2):
        kron_matmul(x, factors)
    batch = torch.randn(3, 5, 12, device=device)
    assert_near(vmap(lambda t: kron_matmul(t, factors))(batch), expected(batch, factors))
    # Of tensors that are not mapped: still a transform is in force.
    rows = vmap(lambda t: kron_matmul(x, factors) + t)(torch.zeros(3, 5, 12, device=device))
    assert_near(rows, wanted.expand(3, 5, 12))
    tangent = torch.randn(5, 12, device=device)
    y, dy = jvp(lambda t: kron_matmul(t, factors), (x,), (tangent,))
    assert_near(y, wanted)
    assert_near(dy, expected(tangent, factors))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        dy = torch.autograd.forward_ad.unpack_dual(kron_matmul(dual, factors)).tangent
    assert_near(dy, expected(tangent, factors))
    assert spy.served == 1


class _Subclass(Tensor):
    pass


def test_modes_and_subclasses_see_the_call(spy: Spy, device: torch.device) -> None:
    x, factors = draw(device)
    for _ in range(2):
        kron_matmul(x, factors)
    with Functions() as functions:
        kron_matmul(x, factors)
    assert functions.seen > 0
    with Operators() as operators:
        kron_matmul(x, factors)
    assert "fastkron.kron_matmul.default" in operators.names
    assert type(kron_matmul(x.as_subclass(_Subclass), factors)) is _Subclass
    assert kron_matmul(x.to("meta"), [f.to("meta") for f in factors]).is_meta
    assert spy.served == 1


def test_settings_between_calls(spy: Spy, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    x, factors = draw(device)
    for _ in range(2):
        kron_matmul(x, factors)
    assert spy.served == 1
    with fastkron_py.backend("torch"):
        for _ in range(2):
            kron_matmul(x, factors)
    assert spy.served == 1
    torch.set_float32_matmul_precision("high")
    try:
        kron_matmul(x, factors)
        assert spy.served == 1
        kron_matmul(x, factors, precision="high")  # which is what the last one did
        assert spy.served == 2
    finally:
        torch.set_float32_matmul_precision("highest")
    kron_matmul(x, factors, precision="highest")
    assert spy.served == 3
    with caplog.at_level(logging.DEBUG, logger="fastkron_py"):
        kron_matmul(x, factors)
    assert "backend triton" in caplog.text
    assert spy.served == 3
    recorded.forget()
    kron_matmul(x, factors)
    assert spy.served == 3


def test_wrong_arguments_are_refused_as_before(spy: Spy, device: torch.device) -> None:
    x, factors = draw(device)
    for _ in range(2):
        kron_matmul(x, factors)
    wrong: dict[str, Callable[[], Any]] = {
        "alpha: expected a finite number; got nan": lambda: kron_matmul(x, factors, alpha=float("nan")),
        "precision: expected None or one of highest, high, medium; got 'low'": lambda: kron_matmul(x, factors, precision="low"),
        "precision: expected None or one of highest, high, medium; got list": lambda: kron_matmul(x, factors, precision=["high"]),  # type: ignore[arg-type]
        "z: expected a tensor that broadcasts to the result (5, 12), since beta is not 0; got None": lambda: kron_matmul(
            x, factors, beta=1.0
        ),
        "factors[1]: expected a torch tensor, like x; got None": lambda: kron_matmul(x, [factors[0], None]),  # type: ignore[list-item]
        "factors[0]: expected x's dtype torch.float32; got torch.float64": lambda: kron_matmul(x, [factors[0].double(), factors[1]]),
    }
    for message, bad in wrong.items():
        with pytest.raises((TypeError, ValueError)) as error:
            bad()
        assert str(error.value) == message
    assert spy.served == 1


def test_bounded(spy: Spy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_KEYS", 3)
    monkeypatch.setattr(records, "MOST_TRIES", 2)
    factors = [torch.randn(2, 2, device=device)]
    for rows in range(1, 8):
        kron_matmul(torch.randn(rows, 2, device=device), factors)
        assert len(recorded.RECORDS._slots) <= 3
    for stride in range(2, 8):
        x = torch.randn(3, stride, device=device)[:, :2]
        assert_near(kron_matmul(x, factors), expected(x, factors))
    assert all(len(slot.records) <= 2 for slot in recorded.RECORDS._slots.values())


def test_threads(spy: Spy, device: torch.device) -> None:
    """A thread of its own sees its own modes: records are shared, what is in force is not."""
    x, factors = draw(device)
    kron_matmul(x, factors)
    found: list[Any] = []

    def work() -> None:
        with fastkron_py.backend("triton"):
            found.append(kron_matmul(x, factors))
            with torch.autocast(device.type, dtype=torch.bfloat16):
                found.append(kron_matmul(x, factors))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_near(found[0], expected(x, factors))
    assert found[1].dtype == torch.bfloat16


def test_without_torchs_guards(spy: Spy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "GUARDS", None)
    x, factors = draw(device)
    for _ in range(2):
        assert_near(kron_matmul(x, factors), expected(x, factors))
    assert spy.served == 0


@pytest.mark.parametrize("enabled", [False, True])
def test_torchs_guards_compare_what_they_should(enabled: bool, device: torch.device) -> None:
    """The negative control of this file: each difference alone makes the guards refuse."""
    t = torch.randn(4, 4, device=device)
    check = guards.guard([t])
    with torch.no_grad() if enabled else contextlib.nullcontext():
        assert check(torch.randn(4, 4, device=device))
        assert not check(t.mT)
        assert not check(t[:3])
        assert not check(t.double())
        assert not check(t.as_subclass(_Subclass))
        assert not check(torch._neg_view(t))
        assert not check(None)
        with torch.autocast(device.type):
            assert not check(t)
