"""Calls like one that was made before, and their gradients: repeated right, and never where what they depend on has changed.

What keeps a call from being taken for another is proved for any operator in tests/runtime/test_cache.py.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import weakref
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
from cache_spy import CacheSpy, without_guards
from shapes_list import assert_near, call, expected
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastkron_py
from fastkron_py import kron_matmul, reference
from fastkron_py.kron import torch_steps
from fastkron_py.runtime import torch_internals
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.call_cache import CACHE


def took(spy: CacheSpy) -> tuple[int, int]:
    """The counts (multiplies, backward passes) since the last time."""
    counts = spy.take()
    return counts.get("kron_matmul", 0), counts.get("kron_matmul_backward", 0)


SERVED = (1, 1)


def draw(device: torch.device, *, left: bool = False, dtype: torch.dtype = torch.float32, needs: str = "x12") -> list[Tensor]:
    """[x, F1, F2]; those named require gradients."""
    shapes = [(12, 5) if left else (5, 12), (3, 2), (4, 3)]
    if left:
        shapes[1:] = [(2, 3), (3, 4)]
    tensors = [torch.randn(s, dtype=dtype, device=device) for s in shapes]
    return [t.requires_grad_(name in needs) for t, name in zip(tensors, "x12", strict=True)]


def multiply(tensors: list[Tensor], left: bool = False, **options: Any) -> Tensor:
    return call(left)(tensors[0], tensors[1:], **options)


def product(tensors: list[Tensor], left: bool = False) -> Tensor:
    """The reference's, which derives."""
    x, *factors = tensors
    if not left:
        return reference.kron_matmul(x, factors)
    turned = reference.kron_matmul(x if x.ndim == 1 else x.mT, [f.mT for f in factors])
    return turned if turned.ndim == 1 else turned.mT


def wanted(tensors: list[Tensor], dy: Tensor, left: bool = False, alpha: float = 1.0) -> list[Tensor | None]:
    """Gradients in float64, of the tensors that require one."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    (float(alpha) * product(wide, left)).backward(dy.detach().double())
    return [t.grad for t in wide]


def assert_gradients(tensors: list[Tensor], dy: Tensor, left: bool = False, alpha: float = 1.0) -> None:
    """The tensors' ``.grad`` are right, contiguous and their own."""
    for t, want in zip(tensors, wanted(tensors, dy, left, alpha), strict=True):
        assert (t.grad is None) == (want is None)
        if want is not None and t.grad is not None:
            assert t.grad.shape == t.shape
            assert t.grad.is_contiguous()
            assert t.grad._base is None
            assert_near(t.grad, want, scale=4)  # sums over rows of products with the other factors


def check(tensors: list[Tensor], left: bool = False, make: Callable[[Tensor], Tensor] = torch.randn_like, alpha: float = 1.0) -> None:
    """Make a call and its backward pass, from an incoming gradient that is made for the result."""
    y = multiply(tensors, left, alpha=alpha)
    dy = make(y.detach())
    y.backward(dy)
    assert_gradients(tensors, dy, left, alpha)


def warm(device: torch.device, spy: CacheSpy, **options: Any) -> None:
    """Make a first call and its backward pass, after which calls like it are served."""
    check(draw(device, **options), options.get("left", False))
    assert took(spy) == (0, 0)


# ---- without gradients


def test_the_second_call_is_served(backend_name: str, spy: CacheSpy, device: torch.device) -> None:
    for dtype, alpha, left in itertools.product([torch.float32, torch.bfloat16, torch.float64], [1.0, -2.5], (False, True)):
        spy.take()
        for i in range(3):
            x, *factors = draw(device, left=left, dtype=dtype, needs="")  # other numbers each time
            with fastkron_py.backend(backend_name):
                y = call(left)(x, factors, alpha=alpha)
            assert spy.served["kron_matmul"] == i
            assert_near(y, expected(x, factors, left=left, alpha=alpha))


def test_added_tensors(backend_name: str, spy: CacheSpy, device: torch.device) -> None:
    """z of any shape, the scalars others each time; 0 and 1 are programs of their own, and with 0 z is not read."""
    for shape in [(), (1,), (6,), (5, 1), (5, 6)]:
        CACHE.forget()
        spy.take()
        with fastkron_py.backend(backend_name):
            for beta, count in ((-0.7, 0), (2.5, 1), (1.0, 1), (1.0, 2), (0.0, 2), (0.0, 3), (-0.7, 4)):
                x, *factors = draw(device, needs="")
                z = torch.randn(shape, device=device) if beta else torch.full(shape, torch.nan, device=device)
                y = kron_matmul(x, factors, alpha=beta + 3, beta=beta, z=z)
                product = expected(x, factors, alpha=beta + 3)
                assert_near(y, product + beta * z.double() if beta else product)
                assert spy.served["kron_matmul"] == count


def test_vectors_are_kept_as_they_are(backend_name: str, spy: CacheSpy, device: torch.device) -> None:
    """A vector's program takes it as it is; where gradients are wanted, it is a matrix."""
    for left, needs in itertools.product((False, True), ("", "x12", "2")):
        CACHE.forget()
        spy.take()
        for i in range(3):
            x, *factors = draw(device, left=left, needs=needs)
            x = (x[:, 0] if left else x[0]).detach().clone().requires_grad_("x" in needs)
            with fastkron_py.backend(backend_name):
                y = call(left)(x, factors)
            assert y.shape == (6,)
            assert spy.served["kron_matmul"] == i
            assert_near(y, expected(x, factors, left=left))
            if needs:
                y.backward(dy := torch.randn_like(y))
                assert_gradients([x, *factors], dy, left)


# ---- other verbs, which look a call up before they check it


def verbs(device: torch.device) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]]:
    """A verb, what it is in float64, and its tensors, by the name of the operator that serves it."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    signs = fastkron_py.hadamard(torch.eye(24, dtype=torch.float64, device=device))
    return {
        "mode_matmul": (
            lambda x, a, b: fastkron_py.mode_matmul(x, {1: a, -1: b}),
            lambda x, a, b: torch.einsum("ipq,pr,qs->irs", x, a, b),
            [draw(2, 4, 6), draw(4, 3), draw(6, 5)],
        ),
        "in the middle": (
            lambda x, a: fastkron_py.mode_matmul(x, {1: a}),
            lambda x, a: torch.einsum("ipq,pr->irq", x, a),
            [draw(2, 4, 6), draw(4, 3)],
        ),
        "hadamard": (lambda x: fastkron_py.hadamard(x, scale=0.5), lambda x: 0.5 * x @ signs, [draw(3, 24)]),
        "solve": (
            lambda b, f, g: fastkron_py.KroneckerProduct([f, 2, g]).solve(b),
            lambda b, f, g: torch.linalg.solve(torch.kron(torch.kron(f, torch.eye(2).to(f)), g), b),
            [draw(24), *[draw(n, n) + 4 * torch.eye(n, device=device) for n in (3, 4)]],
        ),
    }


@pytest.mark.parametrize("name", ["mode_matmul", "in the middle", "hadamard", "solve"])
def test_verbs_look_up_before_they_check(name: str, backend_name: str, spy: CacheSpy, device: torch.device) -> None:
    """With gradients and without; other numbers, strides and settings are never served by an earlier call's."""
    verb, in_float64, tensors = verbs(device)[name]
    for needs in (False, True):
        for i in range(3):
            given = [torch.randn_like(tensors[0]), *tensors[1:]] if i else tensors
            given = [t.detach().clone().requires_grad_(needs) for t in given]
            spy.take()
            with fastkron_py.backend(backend_name):
                y = verb(*given)
            assert (sum(spy.take().values()) > 0) == (i > 0), f"call {i}, needs {needs}"
            want = in_float64(*[t.detach().double() for t in given])
            torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
            if needs:
                found = torch.autograd.grad(y.square().sum(), given)
                wide = [t.detach().double().requires_grad_() for t in given]
                for g, w in zip(found, torch.autograd.grad(in_float64(*wide).square().sum(), wide), strict=True):
                    torch.testing.assert_close(g.double(), w, rtol=1e-3, atol=1e-3)
    x, *others = tensors
    moved = x.mT.contiguous().mT if x.ndim > 1 else torch.stack([x, x], 1)[:, 0]
    with fastkron_py.backend(backend_name):
        near = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
        near(verb(moved, *others).double(), in_float64(*[t.double() for t in tensors]))
        near(torch.func.vmap(lambda t: verb(t, *others))(torch.stack([x, -x]))[1], -verb(*tensors))


def test_keys_of_verbs_hold_all_that_calls_depend_on(spy: CacheSpy, device: torch.device) -> None:
    x, a = torch.randn(4, 4, 4, device=device), torch.randn(4, 4, device=device)
    for dim in (0, 1, 2, 1, -2):
        want = torch.einsum(("pij,pr->rij", "ipj,pr->irj", "ijp,pr->ijr")[dim], x.double(), a.double())
        assert_near(fastkron_py.mode_matmul(x, {dim: a}), want)
    with pytest.raises(TypeError, match="integers as dimensions"):
        fastkron_py.mode_matmul(x, {1.0: a})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="precision"):
        fastkron_py.mode_matmul(x, {1: a}, precision="low")
    rows = torch.randn(3, 8, device=device)
    for scale in (1.0, 2.0, 1.0, -1.0):
        torch.testing.assert_close(fastkron_py.hadamard(rows, scale=scale), scale * fastkron_py.hadamard(rows))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert fastkron_py.hadamard(rows).dtype == fastkron_py.mode_matmul(x, {1: a}).dtype == torch.bfloat16
    with torch.autocast(device.type, dtype=torch.float16):
        assert fastkron_py.hadamard(rows).dtype == fastkron_py.mode_matmul(x, {1: a}).dtype == torch.float16
    singular = fastkron_py.KroneckerProduct([torch.eye(2, device=device), torch.ones(2, 2, device=device)])
    for _ in range(2):
        fastkron_py.KroneckerProduct([torch.eye(2, device=device)] * 2).solve(rows[0, :4])
        with pytest.raises(torch.linalg.LinAlgError, match=r"factors\[1\]"):
            singular.solve(rows[0, :4])


class _Subclass(Tensor):
    pass


def test_without_torchs_guards(spy: CacheSpy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, *factors = draw(device, needs="")
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


# ---- with gradients


def test_the_second_backward_pass_is_served(spy: CacheSpy, device: torch.device) -> None:
    for dtype, alpha, left in itertools.product([torch.float32, torch.bfloat16, torch.float64], [1.0, -2.5], (False, True)):
        for counts in ((0, 0), SERVED, SERVED):
            check(draw(device, left=left, dtype=dtype), left, alpha=alpha)
            assert took(spy) == counts


def test_alpha_may_change(spy: CacheSpy, device: torch.device) -> None:
    """One program for all but 1 and, backward, 0; integers are floats, also those that no tensor takes."""
    for i, alpha in enumerate((3.0, 2, -0.5, 1e-3, 10**20, 0.0, 0)):
        check(draw(device), alpha=alpha)
        assert took(spy) == {0: (0, 0), 5: (1, 0)}.get(i, SERVED)


def test_needs_are_told_apart(spy: CacheSpy, device: torch.device) -> None:
    for _ in range(3):
        for needs in ("x", "12", "x12", ""):
            tensors = draw(device, needs=needs)
            if needs:
                check(tensors)
            else:
                assert not multiply(tensors).requires_grad
    assert took(spy) == (8, 6)


SHAPES = {
    "vector": ((12,), [(3, 2), (4, 5)]),
    "one factor": ((5, 3), [(3, 2)]),
    "batch of x": ((2, 5, 12), [(3, 2), (4, 5)]),
    "batches": ((2, 5, 12), [(2, 3, 2), (2, 4, 5)]),
    "many factors": ((3, 64), [(2, 2)] * 6),
    "three groups": ((2, 16 * 16 * 4), [(16, 16), (16, 3), (4, 9)]),
    "wide": ((3, 70 * 3), [(70, 66), (3, 2)]),
}


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "one by one"])
def test_other_shapes(pooled: bool, spy: CacheSpy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pooled:  # as where buffers are large
        monkeypatch.setattr(Builder, "__init__", partialmethod(Builder.__init__, shared=0))
    for (x_shape, factor_shapes), left in itertools.product(SHAPES.values(), (False, True)):
        if left:
            x_shape = x_shape if len(x_shape) == 1 else (*x_shape[:-2], x_shape[-1], x_shape[-2])
            factor_shapes = [(*s[:-2], s[-1], s[-2]) for s in factor_shapes]
        for _ in range(3):
            check([torch.randn(s, device=device, requires_grad=True) for s in (x_shape, *factor_shapes)], left)
        assert took(spy) == (2, 2)


def test_broadcast_batches(spy: CacheSpy, device: torch.device) -> None:
    """Gradients are sums over dimensions that were broadcast, which torch calls: steps of the program too."""
    for left in (False, True):
        shapes = [(12, 5), (2, 1, 2, 3), (3, 3, 4)] if left else [(5, 12), (2, 1, 3, 2), (3, 4, 3)]
        for _ in range(3):
            check([torch.randn(s, device=device, requires_grad=True) for s in shapes], left)
        assert took(spy) == (2, 2)


@pytest.mark.parametrize(
    "change", ["same factor twice", "transposed factors", "strided x", "x with strided rows", "offset x", "overlapping", "Parameter"]
)
def test_operands_of_the_same_shapes(change: str, spy: CacheSpy, device: torch.device) -> None:
    def ordinary() -> list[Tensor]:
        return [torch.randn(s, device=device, requires_grad=True) for s in ((5, 16), (4, 4), (4, 4))]

    for _ in range(2):
        multiply(ordinary()).sum().backward()
    assert took(spy) == SERVED
    for _ in range(3):
        tensors = ordinary()
        given = list(tensors)
        if change == "same factor twice":
            given[2] = given[1]
        elif change == "transposed factors":
            given[1:] = [f.mT for f in given[1:]]
        elif change == "strided x":
            given[0] = torch.randn(16, 5, device=device, requires_grad=True).mT
        elif change == "x with strided rows":
            given[0] = torch.randn(5, 32, device=device, requires_grad=True)[:, :16]
        elif change == "offset x":
            given[0] = torch.randn(5 * 16 + 1, device=device, requires_grad=True)[1:].view(5, 16)
        elif change == "overlapping":
            base = torch.randn(2, 4, 4, device=device, requires_grad=True)
            given[0], given[1] = base.view(2, 16)[:1].expand(5, 16), base[0]  # both begin at one address
        else:
            given[1:] = [torch.nn.Parameter(f.detach()) for f in given[1:]]
        y = multiply(given)
        dy = torch.randn_like(y)
        distinct = list({id(t): t for t in given}.values())
        got = dict(zip(map(id, distinct), torch.autograd.grad(y, distinct, dy), strict=True))
        wide = {id(t): t.detach().double().requires_grad_() for t in distinct}
        x64, *fs64 = [wide[id(t)] for t in given]
        want = torch.autograd.grad(reference.kron_matmul(x64, fs64), list(wide.values()), dy.double())
        for t, w in zip(distinct, want, strict=True):
            assert_near(got[id(t)], w)
    forward, backward = took(spy)
    assert forward == (3 if change == "offset x" else 2)
    assert backward >= 2


def test_a_graph_used_twice(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors = draw(device)
    y = multiply(tensors)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, tensors, dy, retain_graph=True)
    again = torch.autograd.grad(y, tensors, dy)
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, tensors, dy)
    assert took(spy) == (1, 2)


def test_hooks(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors = draw(device)
    seen: list[Tensor] = []
    tensors[1].register_hook(lambda g: g * 2)
    y = multiply(tensors)
    y.register_hook(lambda g: seen.append(g))
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 3,))
    dy = torch.randn_like(y)
    y.backward(dy)
    want = wanted(tensors, 3 * dy)
    assert torch.equal(seen[0], dy)
    for t, w, scale in zip(tensors, want, (1, 2, 1), strict=True):
        assert w is not None
        assert_near(t.grad, scale * w)
    assert took(spy) == SERVED


def test_saved_tensors_hooks(spy: CacheSpy, device: torch.device) -> None:
    packed: list[torch.Size] = []
    for unpack in [lambda t: t.clone(), lambda t: t.mT.contiguous().mT, lambda t: t.double().to(t.dtype).detach(), lambda t: t[:]]:
        CACHE.forget()
        warm(device, spy)
        packed.clear()
        for _ in range(3):
            tensors = draw(device)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.detach(), unpack):
                y = multiply(tensors)
            dy = torch.randn_like(y)
            y.backward(dy)
            assert_gradients(tensors, dy)
        assert packed == [t.shape for t in draw(device)] * 3
        assert took(spy)[0] == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool, spy: CacheSpy, device: torch.device) -> None:
    """The first run is not served and its repetition is: both save the same."""
    for _ in range(4):
        tensors = draw(device)
        y = checkpoint(lambda *ts: multiply(list(ts)).sin(), *tensors, use_reentrant=use_reentrant)
        dy = torch.randn_like(y)
        y.backward(dy)
        assert_gradients(tensors, dy * reference.kron_matmul(tensors[0].double(), [f.double() for f in tensors[1:]]).cos())
    assert took(spy)[1] >= 2


def test_second_derivatives_through_a_checkpoint(spy: CacheSpy, device: torch.device) -> None:
    """Which lets a backward pass read what was saved once, and no more."""

    def found(function: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
        y = function(*tensors)
        first = torch.autograd.grad(y.sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum((g.square().sum() for g in first), y.new_zeros(())), tensors)

    for _ in range(2):
        tensors = draw(device, dtype=torch.float64)
        got = found(lambda *ts: checkpoint(lambda *ts: multiply(list(ts)), *ts, use_reentrant=False), tensors)
        want = found(lambda *ts: product(list(ts)), tensors)
        for g, w in zip(got, want, strict=True):
            assert_near(g, w, scale=20)  # sums of products of four rounded factors
    assert took(spy)[1] >= 1


def test_forward_mode(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors = draw(device)
    tangent = torch.randn(5, 12, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], tangent)
        got = torch.autograd.forward_ad.unpack_dual(kron_matmul(dual, tensors[1:])).tangent
        # A graph from outside, derived backwards while a level is in force.
    assert_near(got, reference.kron_matmul(tangent.double(), [f.detach().double() for f in tensors[1:]]))
    y = multiply(tensors)
    dy = torch.randn_like(y)
    with torch.autograd.forward_ad.dual_level():
        y.backward(dy)
    assert_gradients(tensors, dy)
    assert took(spy) == (1, 0)


def test_settings_between_forward_and_backward(spy: CacheSpy, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    warm(device, spy)
    tensors = draw(device)
    y = multiply(tensors)
    dy = torch.randn_like(y)
    torch.set_float32_matmul_precision("high")
    try:
        y.backward(dy)
        assert took(spy) == (1, 0)  # of another precision: a program of its own
    finally:
        torch.set_float32_matmul_precision("highest")
    for t, want in zip(tensors, wanted(tensors, dy), strict=True):  # in TF32 on a GPU: eleven bits, in two products one after the other
        assert t.grad is not None
        assert want is not None
        assert (t.grad.double() - want.double()).norm() < 3e-3 * want.double().norm()
    tensors = draw(device)
    y = multiply(tensors)
    with fastkron_py.backend("torch"):  # the backward pass is the forward's backend's
        y.backward(dy)
    assert_gradients(tensors, dy)
    assert took(spy)[0] == 1
    tensors = draw(device)
    y = multiply(tensors)
    with caplog.at_level(logging.DEBUG, logger="fastkron_py"):
        y.backward(dy)
    assert "backend triton" in caplog.text
    assert_gradients(tensors, dy)
    assert took(spy) == (1, 0)


def test_torchs_backend_is_served_too(spy: CacheSpy, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Where its products are not so small that autograd records them."""
    monkeypatch.setattr(torch_steps, "is_small", lambda shapes, elements: False)
    monkeypatch.setattr(torch_steps, "is_faster", lambda sizes: False)
    with fastkron_py.backend("torch"):
        for _ in range(3):
            check(draw(device))
    assert took(spy) == (2, 2)


@pytest.mark.parametrize("units", [0, 1])
@pytest.mark.parametrize("left", [False, True])
def test_one_product_is_called_in_few_frames(left: bool, units: int) -> None:
    """A cached call of one real factor on a CPU runs no program; its result may be changed in place, also with a gradient."""
    x, f, bias = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    factors, frames = [f, *[torch.ones(1, 1)] * units], list[str]()
    run = (lambda: fastkron_py.kron_matmul_left(factors, x)) if left else (lambda: kron_matmul(x, factors))
    with fastkron_py.backend("torch"):
        run()
        sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name) if event == "call" else None)
        try:
            run()
        finally:
            sys.setprofile(None)
        assert len(frames) <= 15 + 8 * units, frames
        with torch.no_grad():
            y = run()
    y.add_(bias)
    y.sum().backward()
    assert torch.equal(bias.grad, torch.ones(3, 3))  # type: ignore[arg-type]
    assert_near(y.detach(), (f @ x if left else x @ f) + bias.detach())


def test_added_tensors_and_scalars_with_gradients(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    for _ in range(2):
        tensors, z = draw(device), torch.randn(6, device=device, requires_grad=True)
        alpha, beta = (torch.tensor(v, device=device, requires_grad=True) for v in (2.0, -3.0))
        y = multiply(tensors, alpha=alpha, beta=beta, z=z)
        dy = torch.randn_like(y)
        y.backward(dy)
        assert_gradients(tensors, dy, alpha=2.0)
        assert_near(z.grad, -3.0 * dy.double().sum(0))
        assert_near(beta.grad, (dy.double() * z.detach().double()).sum())
        product = reference.kron_matmul(tensors[0].detach().double(), [f.detach().double() for f in tensors[1:]])
        assert_near(alpha.grad, (dy.double() * product).sum())
    assert took(spy) == (1, 2)  # the operator's calls, without the scalars


def test_nothing_is_kept_alive(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors = draw(device)
    y = multiply(tensors)
    y.backward(torch.randn_like(y))
    alive = [weakref.ref(t) for t in (y, *tensors, *(t.grad for t in tensors))]
    del tensors, y
    assert all(ref() is None for ref in alive)
