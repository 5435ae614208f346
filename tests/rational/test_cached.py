"""Cached calls of rational functions: results that are changed in place, noise, refusals."""

from __future__ import annotations

import pytest
import torch
from cache_spy import CacheSpy

from fastkron_py.rational.api import layer_norm_rational, rational_linear

SHAPE = (2, 3, 8)


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
