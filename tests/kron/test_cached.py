"""Calls like one that was made before: repeated right, and never where anything that they depend on has changed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_spy import CacheSpy, without_guards
from modes import Functions, Operators
from shapes_list import assert_near, call, expected
from torch import Tensor
from torch.func import jvp, vmap

import fastkron_py
from fastkron_py import kron_matmul
from fastkron_py.runtime import call_cache, torch_internals
from fastkron_py.runtime.call_cache import CACHE


def draw(device: torch.device, left: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn((12, 5) if left else (5, 12), dtype=dtype, device=device)
    return x, [torch.randn(3, 3, dtype=dtype, device=device), torch.randn(4, 4, dtype=dtype, device=device)]


def test_the_second_call_is_served(backend_name: str, spy: CacheSpy, device: torch.device) -> None:
    for dtype, alpha, left in itertools.product([torch.float32, torch.bfloat16, torch.float64], [1.0, -2.5], (False, True)):
        spy.take()
        for i in range(3):
            x, factors = draw(device, left, dtype)  # other numbers each time
            with fastkron_py.backend(backend_name):
                y = call(left)(x, factors, alpha=alpha)
            assert spy.served["kron_matmul"] == i
            assert_near(y, expected(x, factors, left=left, alpha=alpha))


def test_added_tensors(backend_name: str, spy: CacheSpy, device: torch.device) -> None:
    """z of any shape, the scalars others each time; 0 and 1 are programs of their own, and with 0 z is not read."""
    for shape in [(), (1,), (12,), (5, 1), (5, 12)]:
        CACHE.forget()
        spy.take()
        with fastkron_py.backend(backend_name):
            for beta, count in ((-0.7, 0), (2.5, 1), (1.0, 1), (1.0, 2), (0.0, 2), (0.0, 3), (-0.7, 4)):
                x, factors = draw(device)
                z = torch.randn(shape, device=device) if beta else torch.full(shape, torch.nan, device=device)
                y = kron_matmul(x, factors, alpha=beta + 3, beta=beta, z=z)
                product = expected(x, factors, alpha=beta + 3)
                assert_near(y, product + beta * z.double() if beta else product)
                assert spy.served["kron_matmul"] == count


def test_other_ranks(spy: CacheSpy, device: torch.device) -> None:
    for (x_shape, factor_shapes), left in itertools.product(
        [
            ((12,), [(3, 2), (4, 5)]),
            ((2, 5, 12), [(3, 2), (4, 5)]),
            ((2, 5, 12), [(2, 3, 2), (2, 4, 5)]),
            ((5, 12), [(2, 1, 3, 2), (4, 5)]),
            ((5, 128), [(2, 2)] * 7),
        ],
        (False, True),
    ):
        spy.take()
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
        assert spy.served["kron_matmul"] == 2


@pytest.mark.parametrize(
    "change", ["same factor twice", "transposed factors", "strided x", "x with strided rows", "offset x", "tuple", "Parameter"]
)
def test_operands_of_the_same_shapes(change: str, spy: CacheSpy, device: torch.device) -> None:
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
    assert spy.served["kron_matmul"] == {"tuple": 3, "offset x": 3}.get(change, 2)


def test_a_gradient_is_recorded_whenever_it_is_wanted(spy: CacheSpy, device: torch.device) -> None:
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
    assert spy.served["kron_matmul"] == 5  # of each kind all but the first


def test_the_result_can_be_changed_in_place_later(spy: CacheSpy, device: torch.device) -> None:
    x, factors = draw(device)
    weight = torch.randn(5, 12, device=device, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            y = kron_matmul(x, factors)
        y.mul_(weight)
        y.sum().backward()
    assert spy.served["kron_matmul"] == 1
    assert_near(weight.grad, 2 * expected(x, factors))


def test_autocast(spy: CacheSpy, device: torch.device) -> None:
    x, factors = draw(device)
    kron_matmul(x, factors)
    wanted = expected(x.bfloat16(), [f.bfloat16() for f in factors])
    for served in (0, 1):  # of operands that were cast: the operator has an entry, the verb none
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = kron_matmul(x, factors)
        assert y.dtype == torch.bfloat16
        assert_near(y, wanted)
        assert spy.served["kron_matmul"] == served
    assert kron_matmul(x, factors).dtype == torch.float32
    assert spy.served["kron_matmul"] == 2


def test_another_dtype_of_autocast(spy: CacheSpy, device: torch.device) -> None:
    """Guards tell of autocast, not of its dtype, in which operands may be already."""
    x, factors = draw(device, dtype=torch.bfloat16)
    for half in (torch.bfloat16, torch.bfloat16, torch.float16):
        with torch.autocast(device.type, dtype=half):
            y = kron_matmul(x, factors)
        assert y.dtype == half
        assert_near(y, expected(x.to(half), [f.to(half) for f in factors]))


def test_inference_mode(spy: CacheSpy, device: torch.device) -> None:
    x, factors = draw(device)
    for _ in range(3):
        assert not kron_matmul(x, factors).is_inference()
        with torch.inference_mode():
            y = kron_matmul(x, factors)
            assert y.is_inference()
            assert_near(y, expected(x, factors))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward mode
def test_transforms(spy: CacheSpy, device: torch.device) -> None:
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
    assert spy.served["kron_matmul"] == 1


class _Subclass(Tensor):
    pass


def test_modes_and_subclasses_see_the_call(spy: CacheSpy, device: torch.device) -> None:
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
    assert spy.served["kron_matmul"] == 1


def test_settings_between_calls(spy: CacheSpy, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    x, factors = draw(device)
    for _ in range(2):
        kron_matmul(x, factors)
    assert spy.served["kron_matmul"] == 1
    with fastkron_py.backend("torch"):
        for served in (1, 2):
            kron_matmul(x, factors)
            assert spy.served["kron_matmul"] == served
    torch.set_float32_matmul_precision("high")
    try:
        for served in (2, 3):
            kron_matmul(x, factors)
            assert spy.served["kron_matmul"] == served
    finally:
        torch.set_float32_matmul_precision("highest")
    for served in (3, 4):
        kron_matmul(x, factors, precision="high")
        assert spy.served["kron_matmul"] == served
    with caplog.at_level(logging.DEBUG, logger="fastkron_py"):
        kron_matmul(x, factors)
    assert "backend triton" in caplog.text
    assert spy.served["kron_matmul"] == 4
    CACHE.forget()
    kron_matmul(x, factors)
    assert spy.served["kron_matmul"] == 4


def test_wrong_arguments_are_refused_as_before(spy: CacheSpy, device: torch.device) -> None:
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
    assert spy.served["kron_matmul"] == 1


def test_bounded(spy: CacheSpy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_KEYS", 3)
    monkeypatch.setattr(call_cache, "MOST_ENTRIES", 2)
    factors = [torch.randn(2, 2, device=device)]
    for rows in range(1, 8):
        kron_matmul(torch.randn(rows, 2, device=device), factors)
        assert len(CACHE._calls) <= 3
        assert len(CACHE._programs) <= 3
    for stride in range(2, 8):
        x = torch.randn(3, stride, device=device)[:, :2]
        assert_near(kron_matmul(x, factors), expected(x, factors))
    assert all(len(entries) <= 2 for entries in CACHE._calls.values())


def test_threads(spy: CacheSpy, device: torch.device) -> None:
    """A thread of its own sees its own modes: entries are shared, what is in force is not."""
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


def test_without_torchs_guards(spy: CacheSpy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, factors = draw(device)
    with without_guards(monkeypatch):
        for _ in range(2):
            assert_near(kron_matmul(x, factors), expected(x, factors))
    assert spy.served["kron_matmul"] == 0
    assert not CACHE._calls


@pytest.mark.parametrize("enabled", [False, True])
def test_torchs_guards_compare_what_they_should(enabled: bool, device: torch.device) -> None:
    """The negative control of this file: each difference alone makes the guards refuse."""
    t = torch.randn(4, 4, device=device)
    check = torch_internals.guard([t])
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
