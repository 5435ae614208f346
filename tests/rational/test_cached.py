"""Cached calls of rational functions: results that are changed in place, noise, refusals."""

from __future__ import annotations

import pytest
import torch
from cache_spy import CacheSpy
from rational_cases import ours, problem, served, step

import fastkron_py
from fastkron_py import rational, reference
from fastkron_py.rational.api import layer_norm_rational, rational_linear

SHAPE = (2, 3, 8)


def test_the_result_can_be_changed_in_place_and_x_cannot(spy: CacheSpy, device: torch.device) -> None:
    p = problem(SHAPE, 2, device=device)
    ours(p)
    assert served(spy) == (0, 0)
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


def test_what_is_no_number_is_refused_and_noise_is_drawn_again(spy: CacheSpy, device: torch.device) -> None:
    """After a call like it that is kept; True is equal to 1, and no number here."""
    x, weight, bias = torch.randn(SHAPE, device=device), torch.randn(5, 8, device=device), torch.randn(5, device=device)
    a, b, scale = torch.randn(2, 6, device=device), torch.randn(2, 4, device=device), torch.randn(8, device=device)
    for call in (lambda **o: rational_linear(x, a, b, weight, bias, **o), lambda **o: layer_norm_rational(x, scale, scale, a, b, **o)):
        call()
        assert not torch.equal(call(version="D", training=True), call(version="D", training=True))
        with pytest.raises(ValueError, match="noise"):
            call(noise=2.0)
    layer_norm_rational(x, scale, scale, a, b, eps=1.0)
    for wrong in (True, [1.0]):
        with pytest.raises(TypeError, match="eps"):
            layer_norm_rational(x, scale, scale, a, b, eps=wrong)  # type: ignore[arg-type]
    torch.testing.assert_close(rational_linear(x, a, b, weight) + bias, rational_linear(x, a, b, weight, bias))
