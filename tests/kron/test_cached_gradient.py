"""Cached calls whose gradients are wanted: the same gradients, and everything that autograd promises besides."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
from cache_spy import CacheSpy, without_guards
from modes import Operators
from shapes_list import assert_near, call
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastkron_py
from fastkron_py import kron_matmul, reference
from fastkron_py.kron import torch_steps
from fastkron_py.runtime import call_cache
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
    (alpha * product(wide, left)).backward(dy.detach().double())
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


def warm(device: torch.device, spy: CacheSpy, **options: Any) -> None:
    """Make a first call and its backward pass, after which calls like it are served."""
    y = multiply(draw(device, **options), options.get("left", False))
    y.backward(torch.randn_like(y))
    assert took(spy) == (0, 0)


def test_the_second_call_is_served(spy: CacheSpy, device: torch.device) -> None:
    for dtype, alpha, left in itertools.product([torch.float32, torch.bfloat16, torch.float64], [1.0, -2.5], (False, True)):
        for counts in ((0, 0), SERVED, SERVED):
            tensors = draw(device, left=left, dtype=dtype)
            y = multiply(tensors, left, alpha=alpha)
            dy = torch.randn_like(y)
            y.backward(dy)
            assert took(spy) == counts
            assert_gradients(tensors, dy, left, alpha)


def test_alpha_may_change(spy: CacheSpy, device: torch.device) -> None:
    """One program for all but 1 and, backward, 0."""
    for i, alpha in enumerate((3.0, 2.0, -0.5, 1e-3, 7.0, 0.0, 0.0)):
        tensors = draw(device)
        y = multiply(tensors, alpha=alpha)
        dy = torch.randn_like(y)
        y.backward(dy)
        assert took(spy) == {0: (0, 0), 5: (1, 0)}.get(i, SERVED)
        assert_gradients(tensors, dy, alpha=alpha)


def test_only_what_is_needed(spy: CacheSpy, device: torch.device) -> None:
    for needs, left in itertools.product(["x", "1", "2", "12", "x1", "x2"], (False, True)):
        for counts in ((0, 0), SERVED):
            tensors = draw(device, left=left, needs=needs)
            y = multiply(tensors, left)
            dy = torch.randn_like(y)
            y.backward(dy)
            assert took(spy) == counts
            assert_gradients(tensors, dy, left)


def test_needs_are_told_apart(spy: CacheSpy, device: torch.device) -> None:
    for _ in range(3):
        for needs in ("x", "12", "x12", ""):
            tensors = draw(device, needs=needs)
            y = multiply(tensors)
            assert y.requires_grad == bool(needs)
            if needs:
                dy = torch.randn_like(y)
                y.backward(dy)
                assert_gradients(tensors, dy)
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
            tensors = [torch.randn(s, device=device, requires_grad=True) for s in (x_shape, *factor_shapes)]
            y = multiply(tensors, left)
            dy = torch.randn_like(y)
            y.backward(dy)
            assert_gradients(tensors, dy, left)
        assert took(spy) == (2, 2)


def test_broadcast_batches(spy: CacheSpy, device: torch.device) -> None:
    """Gradients are sums over dimensions that were broadcast, which torch calls: steps of the program too."""
    for left in (False, True):
        shapes = [(12, 5), (2, 1, 2, 3), (3, 3, 4)] if left else [(5, 12), (2, 1, 3, 2), (3, 4, 3)]
        for _ in range(3):
            tensors = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
            y = multiply(tensors, left)
            dy = torch.randn_like(y)
            y.backward(dy)
            assert_gradients(tensors, dy, left)
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


DYS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda y: torch.randn((), device=y.device).expand(y.shape),
    "rows expanded": lambda y: torch.randn(y.shape[1], device=y.device).expand(y.shape),
    "transposed": lambda y: torch.randn(y.shape[::-1], device=y.device).mT,
    "rows of a larger one": lambda y: torch.randn(y.shape[0], 2 * y.shape[1], device=y.device)[:, : y.shape[1]],
    "every other column": lambda y: torch.randn(y.shape[0], 2 * y.shape[1], device=y.device)[:, ::2],
    "unaligned": lambda y: torch.randn(y.numel() + 1, device=y.device)[1:].view(y.shape),
    "negated lazily": lambda y: torch._neg_view(torch.randn_like(y)),
}


@pytest.mark.parametrize("kind", DYS)
def test_incoming_gradients_of_any_layout(kind: str, spy: CacheSpy, device: torch.device) -> None:
    for left in (False, True):
        warm(device, spy, left=left)
        for _ in range(3):
            tensors = draw(device, left=left)
            y = multiply(tensors, left)
            dy = DYS[kind](y.detach())
            y.backward(dy)
            assert_gradients(tensors, dy, left)
        assert took(spy) == (3, {"unaligned": 3, "negated lazily": 0}.get(kind, 2))


def test_a_tensor_changed_in_place_is_refused(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    for which in range(3):
        tensors = draw(device)
        y = multiply(tensors)
        with torch.no_grad():
            tensors[which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    assert took(spy) == (3, 0)


def test_the_result_may_be_changed_in_place(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors, weight = draw(device), torch.randn(5, 6, device=device)
    y = multiply(tensors)
    y.mul_(weight)
    y.backward(torch.ones_like(y))
    assert_gradients(tensors, weight)
    assert took(spy) == SERVED


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


def test_gradients_accumulate(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors = draw(device)
    dys = torch.randn(2, 5, 6, device=device)
    for dy in dys:
        multiply(tensors).backward(dy)
    assert_gradients(tensors, dys.sum(0))
    assert took(spy) == (2, 2)


def test_some_inputs_only(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors = draw(device)
    y = multiply(tensors)
    dy = torch.randn_like(y)
    (got,) = torch.autograd.grad(y, tensors[1:2], dy)
    assert_near(got, wanted(tensors, dy)[1])
    assert all(t.grad is None for t in tensors)


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


@pytest.mark.parametrize("left", [False, pytest.param(True, marks=pytest.mark.full)], ids=["right", "left"])
def test_gradcheck(left: bool, spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy, left=left, dtype=torch.float64)
    tensors = draw(device, left=left, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *ts: multiply(list(ts), left, alpha=1.0), tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *ts: multiply(list(ts), left, alpha=1.0), tensors, fast_mode=True)
    forward, backward = took(spy)
    assert forward > 0
    assert backward > 0


def test_second_derivatives(spy: CacheSpy, device: torch.device) -> None:
    """With create_graph, the backward pass is one that can be derived; without, the next call is served again."""

    def penalty(ts: list[Tensor], product: Callable[[Tensor, list[Tensor]], Tensor]) -> Tensor:
        y = product(ts[0], ts[1:])
        grads = torch.autograd.grad(y.square().sum(), ts, create_graph=True)
        return sum((g.square().sum() for g in grads), y.new_zeros(()))

    warm(device, spy, dtype=torch.float64)
    tensors = draw(device, dtype=torch.float64)
    penalty(tensors, kron_matmul).backward()
    copies = [t.detach().clone().requires_grad_() for t in tensors]
    penalty(copies, reference.kron_matmul).backward()
    for t, c in zip(tensors, copies, strict=True):
        assert_near(t.grad, c.grad)
    spy.take()
    y = multiply(draw(device, dtype=torch.float64))
    y.backward(torch.randn_like(y))
    assert took(spy) == SERVED


def test_transforms_of_cached_calls(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors = draw(device)
    dy = torch.randn(5, 6, device=device)

    def loss(*ts: Tensor) -> Tensor:
        return (multiply(list(ts)) * dy).sum()

    for g, w in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*tensors), wanted(tensors, dy), strict=True):
        assert w is not None
        assert_near(g, w)
    for vector in (torch.func.vjp(loss, *tensors)[1](torch.ones((), device=device)), torch.func.jacrev(loss, argnums=(0, 1, 2))(*tensors)):
        for g, w in zip(vector, wanted(tensors, dy), strict=True):
            assert w is not None
            assert_near(g, w)
    assert took(spy) == (0, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward mode
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


def test_autocast(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors = draw(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = multiply(tensors)
    assert y.dtype == torch.bfloat16
    dy = torch.randn_like(y)
    y.backward(dy)
    for t, w in zip(tensors, wanted([t.detach().bfloat16().requires_grad_() for t in tensors], dy), strict=True):
        assert w is not None
        assert t.grad is not None
        assert_near(t.grad.bfloat16(), w)
    assert took(spy) == (0, 0)
    # Forward outside, backward inside.
    tensors = draw(device)
    y = multiply(tensors)
    dy = torch.randn_like(y)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y.backward(dy)
    assert_gradients(tensors, dy)
    assert took(spy) == (1, 0)


def test_modes_see_the_operators(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors = draw(device)
    y = multiply(tensors)
    dy = torch.randn_like(y)
    with Operators() as operators:
        y.backward(dy)
    if device.type == "cpu":  # elsewhere autograd's thread has no modes of this one in torch 2.11
        assert "fastkron.kron_matmul_backward.default" in operators.names
        assert took(spy) == (1, 0)
    assert_gradients(tensors, dy)
    with Operators() as operators:
        multiply(draw(device))
    assert "fastkron.kron_matmul.default" in operators.names


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
    monkeypatch.setattr(torch_steps, "is_small", lambda problem: False)
    with fastkron_py.backend("torch"):
        for _ in range(3):
            tensors = draw(device)
            y = multiply(tensors)
            dy = torch.randn_like(y)
            y.backward(dy)
            assert_gradients(tensors, dy)
    assert took(spy) == (2, 2)


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


def test_a_compiled_graph_holds_the_operator(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    tensors = draw(device)
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    y = torch.compile(lambda *ts: multiply(list(ts)), backend=backend, fullgraph=True)(*tensors)
    assert any("fastkron.kron_matmul" in str(node.target) for node in graphs[0].graph.nodes)
    assert took(spy) == (0, 0)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert_gradients(tensors, dy)
    torch.compiler.reset()


def test_threads_at_once(spy: CacheSpy, device: torch.device) -> None:
    """Programs are shared: threads run one at once, each on its own operands, and with its own alpha."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with fastkron_py.backend("triton"):
                generator = torch.Generator().manual_seed(seed)
                for _ in range(4):
                    shapes = [(5, 12), (3, 2), (4, 3)]
                    tensors = [torch.randn(s, generator=generator).to(device).requires_grad_() for s in shapes]
                    y = multiply(tensors, alpha=seed + 0.5)
                    dy = torch.randn(y.shape, generator=generator).to(device)
                    y.backward(dy)
                    assert_gradients(tensors, dy, alpha=seed + 0.5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
        if device.type == "cpu":  # Triton's interpreter is for one thread at a time
            thread.join()
    for thread in threads:
        thread.join()
    assert not failures


def test_bounded(spy: CacheSpy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST_ENTRIES", 2)
    warm(device, spy)
    for stride in range(7, 12):
        tensors = draw(device)
        y = multiply(tensors)
        dy = torch.randn(5, stride, device=device)[:, :6]
        y.backward(dy)
        assert_gradients(tensors, dy)
    assert took(spy) == (5, 0)
    assert max(len(entries) for entries in CACHE._calls.values()) == 2


def test_nothing_is_kept_alive(spy: CacheSpy, device: torch.device) -> None:
    warm(device, spy)
    import weakref

    tensors = draw(device)
    y = multiply(tensors)
    y.backward(torch.randn_like(y))
    alive = [weakref.ref(t) for t in (y, *tensors, *(t.grad for t in tensors))]
    del tensors, y
    assert all(ref() is None for ref in alive)


def test_without_torchs_guards(spy: CacheSpy, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_guards(monkeypatch):
        for _ in range(3):
            tensors = draw(device)
            y = multiply(tensors)
            dy = torch.randn_like(y)
            y.backward(dy)
            assert_gradients(tensors, dy)
    assert took(spy) == (0, 0)
