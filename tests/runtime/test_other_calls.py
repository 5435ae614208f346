"""Calls of every verb that looks up keys of its own: one that differs from those before is another call, and the same one is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from cache_spy import CacheSpy
from torch import Tensor

import fastkron_py
from fastkron_py import gated_linear, kron_matmul, poly_kan, rational
from fastkron_py.rational.api import layer_norm_rational, rational_linear
from fastkron_py.runtime.call_cache import CACHE


class Verb(NamedTuple):
    """A call on tensors of these shapes, x first, and what else it may be given."""

    call: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    options: Sequence[dict[str, Any]]


COEFFICIENTS = [(2, 6), (2, 4)]
BIAS = torch.ones(2, 5, device="cuda" if torch.cuda.is_available() else "cpu")
VERBS = {
    "kron_matmul": Verb(
        lambda x, a, b, **options: kron_matmul(x, [a, b], **options),
        [(2, 3, 8), (2, 3), (4, 2)],
        [{"alpha": 2.0}, {"z": BIAS[0, 0], "beta": 0.5}, {"precision": "high"}],
    ),
    "rational": Verb(rational, [(2, 3, 8), *COEFFICIENTS], [{"version": "A"}]),
    "layer_norm_rational": Verb(layer_norm_rational, [(2, 3, 8), (8,), (8,), *COEFFICIENTS], [{"version": "A"}, {"eps": 1.0}]),
    "rational_linear": Verb(rational_linear, [(2, 3, 8), *COEFFICIENTS, (5, 8), (5,)], [{"version": "A"}]),
    "gated_linear": Verb(
        lambda x, w, **options: gated_linear(x, w, **{"layout": "stacked", **options}),
        [(2, 3, 8), (2, 5, 8)],
        [{"activation": "relu"}, {"precision": "highest"}, {"backward": "recompute"}, {"bias": BIAS}],
    ),
    "poly_kan": Verb(
        poly_kan,
        [(2, 3, 4), (4, 3, 4)],
        [
            {"basis": "legendre"},
            {"basis": "jacobi", "basis_parameters": {"a": 0.5}},
            {"normalization": "clamp"},
            {"evaluation": "lut"},
            {"evaluation": "lut", "lut_size": 64},
            {"precision": "high"},
        ],
    ),
}
# Of x, of the parameter that comes next, and of dy.
CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "strides of x": lambda x, p, dy: (x.movedim(-1, 0).contiguous().movedim(0, -1), p, dy),
    "rows of a larger x": lambda x, p, dy: (torch.cat([x, x], -1)[..., : x.shape[-1]], p, dy),
    "an address": lambda x, p, dy: (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), p, dy),
    "a negative bit": lambda x, p, dy: (torch._neg_view(-x), p, dy),
    "a rank": lambda x, p, dy: (x.flatten(0, 1), p, dy.flatten(0, 1)),
    "rows": lambda x, p, dy: (x[:, :2], p, dy[:, :2]),
    "strides of a parameter": lambda x, p, dy: (x, p.repeat_interleave(2, -1)[..., ::2], dy),
    "an expanded dy": lambda x, p, dy: (x, p, dy[0, 0, 0].expand(dy.shape)),
    "transposed dy": lambda x, p, dy: (x, p, dy.mT.contiguous().mT),
    "every other column of dy": lambda x, p, dy: (x, p, dy.repeat_interleave(2, -1)[..., ::2]),
    "an address of dy": lambda x, p, dy: (x, p, torch.cat([dy.new_zeros(1), dy.flatten()])[1:].view(dy.shape)),
    "a negative bit of dy": lambda x, p, dy: (x, p, torch._neg_view(-dy)),
    "rows of a larger dy": lambda x, p, dy: (x, p, torch.cat([dy, dy], -1)[..., : dy.shape[-1]]),
}


def results(verb: Verb, tensors: Sequence[Tensor], dy: Tensor, **options: Any) -> list[Tensor]:
    """Without gradients, with them, and they."""
    with torch.no_grad():
        alone = verb.call(*tensors, **options)
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = verb.call(*leaves, **options)
    return [alone, y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_right(found: list[Tensor], expected: list[Tensor], most: float = 1e-5) -> None:
    for f, e in zip(found, expected, strict=True):
        assert float((f.double() - e).norm() / e.norm()) < most


@pytest.mark.parametrize("name", VERBS)
def test_what_differs_is_another_call(name: str, spy: CacheSpy, device: torch.device) -> None:
    """In tensors and in options, one after the other and then again; float64 has what torch gives without a cache."""
    verb = VERBS[name]
    tensors = [torch.randn(shape, device=device) for shape in verb.shapes]
    dy = torch.randn_like(verb.call(*tensors))
    calls: list[tuple[list[Tensor], Tensor, dict[str, Any]]] = [(tensors, dy, {})]
    for change in CHANGES.values():
        x, parameter, other = change(*tensors[:2], dy)
        calls.append(([x, parameter, *tensors[2:]], other, {}))
    calls += [(tensors, dy, options) for options in verb.options]
    calls.append(([t.double() for t in tensors], dy.double(), {}))
    expected = []
    for given, d, options in calls:
        wide = {key: value.double() if isinstance(value, Tensor) else value for key, value in options.items()}
        CACHE.forget()
        with fastkron_py.backend("torch"):
            expected.append(results(verb, [t.double() for t in given], d.double(), **wide))
    CACHE.forget()
    for turn in range(2):
        for (given, d, options), e in zip(calls, expected, strict=True):
            spy.take()
            # TF32 cuts operands off; slopes of lines are differences of table values.
            most = 5e-3 if options.get("precision") == "high" else 1e-4 if "evaluation" in options else 1e-5
            assert_right(results(verb, given, d, **options), e, most)
            assert not turn or spy.take() or given[0].is_neg()


@pytest.mark.parametrize("name", VERBS)
def test_other_modes_are_other_calls(name: str, spy: CacheSpy, device: torch.device) -> None:
    verb = VERBS[name]
    tensors = [torch.randn(shape, device=device) for shape in verb.shapes]
    y = verb.call(*tensors)
    for half in (torch.bfloat16, torch.float16):
        with torch.autocast(device.type, half):
            assert verb.call(*tensors).dtype == half
    with fastkron_py.backend("torch"):
        assert_right([verb.call(*tensors)], [y.double()])
    with torch.inference_mode():
        assert verb.call(*tensors).is_inference()
    tensors[1].requires_grad_()
    assert verb.call(*tensors).requires_grad
    tensors[1].requires_grad_(False)
    spy.take()
    assert torch.equal(verb.call(*tensors), y)
    assert spy.take()[name] == 1
