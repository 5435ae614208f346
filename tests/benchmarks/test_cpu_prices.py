"""Prices of the CPU's kernel and of torch's products are found in the times that they make."""

from __future__ import annotations

import random

import pytest

from benchmarks.kron import cpu_prices
from fastkron_py.kron.cpu.plan import Sizes
from fastkron_py.kron.torch_steps import kernel_terms, kernel_time, product_terms, products_time
from fastkron_py.tiling.cpu_costs import KERNEL, PRODUCTS


def drawn(count: int, is_gradient: bool) -> list[Sizes]:
    generator = random.Random(count)
    sizes = lambda: tuple([(generator.randint(2, 60), generator.randint(2, 60)) for _ in range(generator.randint(2, 4))])  # noqa: E731
    return [Sizes(sizes(), 1, generator.randint(1, 300), 1, 4, 2, is_gradient) for _ in range(count)]


@pytest.mark.parametrize("is_gradient", [False, True])
def test_fitted_prices_predict_times(is_gradient):
    problems = drawn(60, is_gradient)
    kernel = type(KERNEL[is_gradient])(*[1.7 * price for price in KERNEL[is_gradient]])
    products = type(PRODUCTS[is_gradient])(*[0.6 * price for price in PRODUCTS[is_gradient]])
    times = [(kernel_time(kernel, kernel_terms(s)), products_time(products, product_terms(s), 2)) for s in problems]
    found = cpu_prices.prices_of([cpu_prices.Row(s, *taken) for s, taken in zip(problems, times, strict=True)])
    for s, (by_kernel, by_products) in zip(problems, times, strict=True):
        assert kernel_time(type(kernel)(**found["kernel"]), kernel_terms(s)) == pytest.approx(by_kernel, rel=0.1)
        assert products_time(type(products)(**found["products"]), product_terms(s), 2) == pytest.approx(by_products, rel=0.1)


def test_only_problems_that_both_take_are_measured():
    of = {"M": 5, "dtype": "float32", "kind": "forward", "left": False}
    assert cpu_prices.sizes_of({**of, "P": [3, 4], "Q": [5, 6]}) is not None
    for other in ({"P": [3], "Q": [5]}, {"P": [3, 1], "Q": [5, 1]}, {"P": [3, 2000], "Q": [5, 2000]}):
        assert cpu_prices.sizes_of({**of, **other}) is None
    assert cpu_prices.sizes_of({**of, "P": [3, 4], "Q": [5, 6], "dtype": "bfloat16"}) is None
