"""Cached calls of rational functions: their programs give right results, and never run where anything that they depend on has changed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from modes import Operators
from rational_cases import Problem, assert_right, ours, problem, step
from torch import Tensor

import fastkron_py
from fastkron_py import rational, reference
from fastkron_py.rational.api_layer_norm import layer_norm_rational
from fastkron_py.rational.api_linear import rational_linear
from fastkron_py.runtime.call_cache import CACHE, Entry

SHAPE = (2, 3, 8)


class Spy:
    """Counts the calls of each operator that were found in the cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._found: Counter[str] = Counter()
        inner = Entry.__call__

        def call(entry: Entry, *given: Any) -> Any:
            self._found[entry.call.__self__.name] += 1
            return inner(entry, *given)

        monkeypatch.setattr(Entry, "__call__", call)

    def take(self) -> tuple[int, int]:
        """(forward, backward) since the last time."""
        found, self._found = self._found, Counter()
        return found["rational"], found["rational_backward"]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    CACHE.forget()
    with fastkron_py.backend("triton"):
        yield Spy(monkeypatch)
    CACHE.forget()


def warm(spy: Spy, device: torch.device, **options: Any) -> Problem:
    """After a call with gradients both passes of a call like it are cached."""
    p = problem(SHAPE, 2, device=device, **options)
    ours(p, options.get("version", "B"))
    assert spy.take() == (0, 0)
    return p


@pytest.mark.parametrize(("version", "dtype"), [("A", torch.float32), ("D", torch.bfloat16), ("N", torch.float64)], ids=str)
def test_the_second_call_is_cached(version: str, dtype: torch.dtype, spy: Spy, device: torch.device) -> None:
    options = {"version": version, "dtype": dtype, "device": device}
    counts = []
    for _ in range(3):
        p = problem(SHAPE, (1, 2), **options)  # other numbers each time
        found = ours(p, version)
        assert_right(found, p, version)
        counts.append(spy.take())
    assert counts == [(0, 0), (1, 1), (1, 1)]
    CACHE.forget()
    for f, again in zip(found, ours(p, version), strict=True):
        assert torch.equal(f, again)  # bit for bit what a first call gives
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
    assert spy.take() == (2, 2 if needing else 0)
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
    # Guards and all but the fastest launch take unaligned tensors; another cotangent's layout is the backward pass's alone.
    counts = {"unaligned x": (3, 3), "expanded dy": (3, 2), "sliced dy": (3, 2)}
    assert (forward, backward) == counts.get(layout, (2, 2))


def test_autocast(spy: Spy, device: torch.device) -> None:
    """Cached too, since models train under it; each of its dtypes is another call."""
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
        assert spy.take() == (2, 2)
    assert ours(p)[0].dtype == torch.float32
    assert spy.take() == (1, 1)


def test_second_derivatives(spy: Spy, device: torch.device) -> None:
    p = warm(spy, device, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in p[:3]]

    def second(function: Callable[..., Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(function(*leaves), leaves, p.dy, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    for counts in ((1, 0), (1, 1)):  # gradients that are derived further are another call
        for found, want in zip(second(rational), second(reference.rational), strict=True):
            fastkron_py.testing.assert_close(found, want, rms_tol=1e-13, max_tol=1e-12)
        assert spy.take() == counts


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
    assert spy.take() == (0, 0)
    noisy = rational(p.x, p.a, p.b, version="D", training=True)
    assert not torch.equal(noisy, rational(p.x, p.a, p.b, version="D", training=True))
    assert spy.take() == (1, 0)  # the operator's: noise is in the numerator that it is given
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


def test_cached_numbers_are_looked_at(spy: Spy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a cached call that runs on other numbers is seen."""
    p = warm(spy, device)
    inner = Entry.__call__
    monkeypatch.setattr(Entry, "__call__", lambda entry, tensors, *options: inner(entry, [t + 1 for t in tensors], *options))
    with pytest.raises(AssertionError):
        assert_right(ours(p), p)


# ---- the two verbs that a linear layer and a normalisation are part of ---------------------------


def found_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of the calls that are found, filled as they are."""
    names: list[str] = []
    inner = Entry.__call__

    def call(entry: Entry, *given: Any) -> Any:
        operator = getattr(entry.call, "__self__", None)
        names.append("without bias" if operator is None else operator.name)
        return inner(entry, *given)

    monkeypatch.setattr(Entry, "__call__", call)
    return names


def tensors_of(verb: str, dtype: torch.dtype, device: torch.device, bias: bool = True) -> list[Tensor]:
    shapes = {"rational_linear": [(2, 6), (2, 4), (5, 8), (5,)][: 3 + bias], "layer_norm_rational": [(8,), (8,), (2, 6), (2, 4)]}
    return [torch.randn(s, dtype=dtype, device=device).requires_grad_() for s in (SHAPE, *shapes[verb])]


def composed(verb: str, tensors: list[Tensor]) -> Tensor:
    if verb == "rational_linear":
        return torch.nn.functional.linear(reference.rational(*tensors[:3]), *tensors[3:])
    x, weight, bias, a, b = tensors
    return reference.rational(torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5), a, b)


VERBS = {"rational_linear": rational_linear, "layer_norm_rational": layer_norm_rational}
BACKWARD = {"rational_linear": ["rational", "rational_backward"], "layer_norm_rational": ["layer_norm_rational_backward"]}


@pytest.mark.parametrize("verb", VERBS)
def test_both_passes_of_other_verbs_are_cached(verb: str, backend_name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where both ways differ by the order of sums alone."""
    CACHE.forget()
    names = found_names(monkeypatch)
    for turn in range(3):
        tensors = tensors_of(verb, torch.float64, device)
        y = VERBS[verb](*tensors)
        dy = torch.randn_like(y)
        found = [y.detach(), *torch.autograd.grad(y, tensors, dy)]
        want = composed(verb, tensors)
        torch.testing.assert_close(found, [want.detach(), *torch.autograd.grad(want, tensors, dy)], rtol=1e-10, atol=1e-10)
        assert names == ([verb, *BACKWARD[verb]] if turn else [])
        names.clear()


@pytest.mark.parametrize("verb", VERBS)
def test_what_other_verbs_tell_apart(verb: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    CACHE.forget()
    names = found_names(monkeypatch)
    call = VERBS[verb]
    tensors = [t.detach() for t in tensors_of(verb, torch.float32, device)]
    right = call(*tensors)
    for half in (torch.bfloat16, torch.float16):  # each of autocast's dtypes, which a linear layer's weight is cast to
        with torch.autocast(device.type, half):
            assert call(*tensors).dtype == half
    assert torch.equal(call(*tensors), right)
    assert names == [verb]
    assert not torch.equal(call(*tensors, version="A"), right)
    noisy = [call(*tensors, version="D", training=True) for _ in range(2)]
    assert not torch.equal(*noisy)
    with pytest.raises(ValueError, match="noise"):
        call(*tensors, noise=2.0)
    if verb == "layer_norm_rational":
        assert not torch.equal(call(*tensors, eps=1.0), right)
        spread = tensors[:1] + [t.repeat_interleave(2)[::2] for t in tensors[1:3]] + tensors[3:]
        assert all(torch.equal(call(*spread), right) for _ in range(3))
        for wrong in (True, [1.0]):
            with pytest.raises(TypeError, match="eps"):
                call(*tensors, eps=wrong)
    else:
        with torch.no_grad():
            without = [call(*tensors[:4]) for _ in range(2)]
        torch.testing.assert_close(without[0] + tensors[4], right)
        assert torch.equal(*without)
    CACHE.forget()
