"""Cached calls of rational functions: their programs give right results, and never run where anything that they depend on has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_spy import CacheSpy
from rational_cases import Problem, assert_right, ours, problem, served, step
from torch import Tensor

import fastkron_py
from fastkron_py import rational, reference
from fastkron_py.rational.api_layer_norm import layer_norm_rational
from fastkron_py.rational.api_linear import rational_linear

SHAPE = (2, 3, 8)


def warm(spy: CacheSpy, device: torch.device, **options: Any) -> Problem:
    """After a call with gradients both passes of a call like it are cached."""
    p = problem(SHAPE, 2, device=device, **options)
    ours(p, options.get("version", "B"))
    assert served(spy) == (0, 0)
    return p


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


def test_operands_of_other_kinds(spy: CacheSpy, device: torch.device) -> None:
    first = warm(spy, device)
    # Guards and all but the fastest launch take unaligned tensors; another cotangent's layout is the backward pass's alone.
    counts = {"unaligned x": (3, 3), "expanded dy": (3, 2), "sliced dy": (3, 2)}
    for layout, change in LAYOUTS.items():
        p = change(first)
        for _ in range(3):
            assert_right(ours(p), p)
        assert served(spy) == counts.get(layout, (2, 2)), layout


def test_the_result_can_be_changed_in_place_and_x_cannot(spy: CacheSpy, device: torch.device) -> None:
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


# ---- the two verbs that a linear layer and a normalisation are part of ---------------------------


def tensors_of(verb: str, dtype: torch.dtype, device: torch.device, bias: bool = True) -> list[Tensor]:
    shapes = {"rational_linear": [(2, 6), (2, 4), (5, 8), (5,)][: 3 + bias], "layer_norm_rational": [(8,), (8,), (2, 6), (2, 4)]}
    return [torch.randn(s, dtype=dtype, device=device).requires_grad_() for s in (SHAPE, *shapes[verb])]


VERBS = {"rational_linear": rational_linear, "layer_norm_rational": layer_norm_rational}


@pytest.mark.parametrize("verb", VERBS)
def test_what_other_verbs_tell_apart(verb: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = CacheSpy(monkeypatch)
    call = VERBS[verb]
    tensors = [t.detach() for t in tensors_of(verb, torch.float32, device)]
    right = call(*tensors)
    for half in (torch.bfloat16, torch.float16):  # each of autocast's dtypes, which a linear layer's weight is cast to
        with torch.autocast(device.type, half):
            assert call(*tensors).dtype == half
    assert torch.equal(call(*tensors), right)
    assert spy.take() == {verb: 1}
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
