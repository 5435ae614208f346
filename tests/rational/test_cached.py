"""Rational calls like one that was made before: repeated right, and never where anything that they depend on has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from modes import Operators
from rational_cases import Problem, assert_right, ours, problem, step
from torch import Tensor

import fastkron_py
from fastkron_py import rational, reference
from fastkron_py.rational import cached as recorded_rational
from fastkron_py.runtime import call_cache as records
from fastkron_py.runtime import torch_internals as guards

SHAPE = (2, 3, 8)


class Spy:
    """Counts the forward and backward passes that records served."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward = self.backward = self.asked = 0
        inner, gradients = recorded_rational.replay, recorded_rational.Call.gradients

        def replay(*arguments: Any) -> Tensor | None:
            y = inner(*arguments)
            self.forward += y is not None
            return y

        def counted(call: recorded_rational.Call, *arguments: Any) -> Any:
            long_way = call._long_way
            self.backward += 1

            def missed(*given: Any) -> Any:
                self.backward -= 1
                return long_way(*given)

            call._long_way = missed
            try:
                return gradients(call, *arguments)
            finally:
                call._long_way = long_way

        monkeypatch.setattr(recorded_rational, "replay", replay)
        monkeypatch.setattr(recorded_rational.Call, "gradients", counted)

    def take(self) -> tuple[int, int]:
        """(forward, backward) since the last time."""
        found, self.forward, self.backward = (self.forward, self.backward), 0, 0
        return found


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    recorded_rational.forget()
    with fastkron_py.backend("triton"):
        yield Spy(monkeypatch)
    recorded_rational.forget()


def warm(spy: Spy, device: torch.device, **options: Any) -> Problem:
    """After two calls with gradients everything about a call like these is recorded."""
    p = problem(SHAPE, 2, device=device, **options)
    for _ in range(2):
        ours(p, options.get("version", "B"))
    spy.take()
    return p


@pytest.mark.parametrize(("version", "dtype"), [("A", torch.float32), ("D", torch.bfloat16), ("N", torch.float64)], ids=str)
def test_the_third_call_is_served(version: str, dtype: torch.dtype, spy: Spy, device: torch.device) -> None:
    """The first call is recorded, its gradient is that of the operator; the second call's is recorded as it is run."""
    options = {"version": version, "dtype": dtype, "device": device}
    served = []
    for _ in range(3):
        p = problem(SHAPE, (1, 2), **options)  # other numbers each time
        found = ours(p, version)
        assert_right(found, p, version)
        served.append(spy.take())
    assert served == [(0, 0), (1, 0), (1, 1)]
    recorded_rational.forget()
    for f, again in zip(found, ours(p, version), strict=True):
        assert torch.equal(f, again)  # bit for bit what the long way gives
    assert spy.take() == (0, 0)


@pytest.mark.parametrize("needing", ["x", "a", "xb", ""])
def test_only_what_is_needed(needing: str, spy: Spy, device: torch.device) -> None:
    p = problem(SHAPE, 2, device=device)
    for _ in range(3):
        t = [t.clone().requires_grad_(name in needing) for name, t in zip("xab", p, strict=False)]
        y = rational(*t)
        assert y.requires_grad == bool(needing)
        if needing:
            y.backward(p.dy)
        assert [u.grad is not None for u in t] == [name in needing for name in "xab"]
    assert spy.take() == (2, 1 if needing else 0)
    want = step(reference.rational, *(t.double() for t in p))
    for u, w in zip(t, want[1:], strict=True):
        if u.grad is not None:
            fastkron_py.testing.assert_close(u.grad, w, rms_tol=3e-6, max_tol=3e-5)


LAYOUTS: dict[str, Callable[[Problem], Problem]] = {
    "sliced rows": lambda p: p._replace(x=torch.cat([p.x, p.x], -1)[..., :8]),
    "unaligned x": lambda p: p._replace(x=torch.cat([p.x.flatten(), p.x[0, 0, :1]])[1:].view(SHAPE)),
    "permuted x": lambda p: p._replace(x=p.x.movedim(-1, 0).contiguous().movedim(0, -1)),
    "expanded dy": lambda p: p._replace(dy=p.dy[0, 0, 0].expand(SHAPE)),
    "sliced dy": lambda p: p._replace(dy=torch.cat([p.dy, p.dy], -1)[..., :8]),
    "transposed coefficients": lambda p: p._replace(a=p.a.mT.contiguous().mT),
    "coefficients of another dtype": lambda p: p._replace(b=p.b.bfloat16()),
    "another rank": lambda p: p._replace(x=p.x.flatten(0, 1), dy=p.dy.flatten(0, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_of_other_kinds(layout: str, spy: Spy, device: torch.device) -> None:
    p = LAYOUTS[layout](warm(spy, device))
    for _ in range(3):
        assert_right(ours(p), p)
    forward, backward = spy.take()
    assert (forward, backward) == {
        "unaligned x": (3, 3),  # passes the guards
        "permuted x": (0, 0),  # y and dx would not be contiguous
        "expanded dy": (3, 0),  # copied first
        "sliced dy": (3, 2),
    }.get(layout, (2, 1))


def test_autocast(spy: Spy, device: torch.device) -> None:
    """Recognised too, since models train under it; each of its dtypes is another call."""
    p = warm(spy, device)
    for half in (torch.bfloat16, torch.float16):
        q = p._replace(dy=p.dy.to(half))

        def function(*t: Tensor, half: torch.dtype = half) -> Tensor:
            with torch.autocast(device.type, half):
                return rational(*t)

        for _ in range(3):
            found = step(function, *q)
            assert found[0].dtype == half
            assert_right(found, q)
        assert spy.take() == (2, 1)
    assert ours(p)[0].dtype == torch.float32
    assert spy.take() == (1, 1)


def test_second_derivatives_go_the_long_way(spy: Spy, device: torch.device) -> None:
    p = warm(spy, device, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in p[:3]]

    def second(function: Callable[..., Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(function(*leaves), leaves, p.dy, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    for found, want in zip(second(rational), second(reference.rational), strict=True):
        fastkron_py.testing.assert_close(found, want, rms_tol=1e-13, max_tol=1e-12)
    assert spy.take() == (1, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in forward mode
def test_transforms_and_modes_see_the_call(spy: Spy, device: torch.device) -> None:
    x, a, b, dy = warm(spy, device)
    want = reference.rational(x, a, b)
    rows = torch.vmap(lambda t: rational(x, a, b) + t)(torch.zeros(2, *x.shape, device=device))
    torch.testing.assert_close(rows, want.expand(2, *x.shape))
    _, tangent = torch.func.jvp(lambda t: rational(t, a, b), (x,), (dy,))
    of_reference = torch.func.jvp(lambda t: reference.rational(t, a, b), (x,), (dy,))[1]
    torch.testing.assert_close(tangent, of_reference)
    with Operators() as operators:
        rational(x, a, b)
    assert "fastkron.rational.default" in operators.names
    assert rational(*(t.to("meta") for t in (x, a, b))).is_meta
    with torch.inference_mode():
        assert rational(x, a, b).is_inference()
    assert not rational(x, a, b).is_inference()
    assert spy.take() == (0, 0)
    got = torch.compile(lambda t: rational(t.sin(), a, b), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, reference.rational(x.sin(), a, b))
    torch._dynamo.reset()


def test_settings_between_calls(spy: Spy, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    p = warm(spy, device)
    with fastkron_py.backend("torch"):
        assert_right(ours(p), p)
    assert_right(ours(p, "A"), p, "A")
    noisy = rational(p.x, p.a, p.b, version="D", training=True)
    assert not torch.equal(noisy, rational(p.x, p.a, p.b, version="D", training=True))
    with caplog.at_level(logging.DEBUG, logger="fastkron_py"):
        ours(p)
    assert "backend triton" in caplog.text
    assert spy.take() == (0, 0)
    for error, change in ((ValueError, {"noise": 2.0}), (ValueError, {"version": "E"}), (TypeError, {"version": ["B"]})):
        with pytest.raises(error):
            rational(p.x, p.a, p.b, **change)
    with pytest.raises(ValueError, match="numerator: expected x's device"):
        rational(p.x, p.a.to("meta"), p.b)
    ours(p)
    assert spy.take() == (1, 1)


def test_the_result_can_be_changed_in_place_and_x_cannot(spy: Spy, device: torch.device) -> None:
    p = warm(spy, device)
    x = p.x.clone().requires_grad_()
    a, b = (c.clone().requires_grad_() for c in p[1:3])
    y = rational(x, a, b)
    (y.mul_(2.0)).backward(p.dy)
    want = step(reference.rational, *(t.double() for t in p))
    fastkron_py.testing.assert_close(a.grad, 2 * want[2], rms_tol=3e-6, max_tol=3e-5)
    base = p.x.clone().requires_grad_() * 1.0
    y = rational(base, a, b)
    with torch.no_grad():
        base.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(p.dy)


def test_bounded(spy: Spy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_KEYS", 2)
    monkeypatch.setattr(records, "MOST_TRIES", 1)
    a, b = torch.randn(1, 3, device=device), torch.randn(1, 2, device=device)
    for rows in range(1, 6):
        rational(torch.randn(rows, 4, device=device), a, b)
        assert len(recorded_rational.RECORDS._slots) <= 2
    rational(torch.randn(5, 8, device=device)[:, ::2], a, b)
    assert all(len(slot.records) <= 1 for slot in recorded_rational.RECORDS._slots.values())


def test_without_torchs_guards(spy: Spy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "GUARDS", None)
    p = problem(SHAPE, 2, device=device)
    for _ in range(3):
        assert_right(ours(p), p)
    assert spy.take() == (0, 0)
