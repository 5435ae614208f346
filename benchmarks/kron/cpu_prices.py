"""Prices of the CPU's kernel and of torch's products beside it: random problems take both, and prices are fitted to the times.

    python -m benchmarks.kron.cpu_prices --measure rows.json --seconds 100    # on an idle CPU, with the threads that matter
    python -m benchmarks.kron.cpu_prices --fit rows.json                      # prints a section of fastkron_py/tiling/figures.json

Times are sums of terms, each times a price (`kron.torch_steps.kernel_terms` and `product_terms`). Prices are fitted by least squares of
the times' logarithms, outliers counting less. The report says how much longer calls take than with the better of both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from scipy.optimize import least_squares

from benchmarks.kron.drawn import OURS, cases, drawn_inputs
from benchmarks.registry import Draw
from fastkron_py.kron import torch_steps
from fastkron_py.kron.cpu import compiled
from fastkron_py.kron.cpu.plan import LIMITS, Sizes
from fastkron_py.kron.torch_steps import kernel_terms, kernel_time, product_terms, products_time, real_factors
from fastkron_py.runtime.call_cache import CACHE, CallCache
from fastkron_py.tiling.cpu_costs import KERNEL, PRODUCTS

SEED: Final = 11  # the first one: seeds from 1 on are those of the benchmark
COUNT: Final = 60
ROUNDS: Final = (4, 40)
CASE_SECONDS: Final = 0.04
MOST_CHANGE: Final = 2.0  # of a price's logarithm
OUTLIER: Final = 0.2  # of a logarithm, from which a residual counts less
TRIES: Final = 4
OTHERS: Final = 0.15  # of the time, that other processes may take
WAYS: Final = {
    "kernel": (lambda sizes: False, lambda shapes, elements: False),
    "products": (lambda sizes: True, lambda shapes, elements: True),
}
SHARES: Final = (1.0, 0.95, 0.9, 0.85)


class Row(NamedTuple):
    """A problem, and medians of both ways in nanoseconds."""

    sizes: Sizes
    kernel: float
    products: float


def sizes_of(parameters: dict[str, Any]) -> Sizes | None:
    """The sizes of a drawn problem that both ways take and that is no single product; else None."""
    shapes, m, left = tuple(zip(parameters["P"], parameters["Q"], strict=True)), parameters["M"], parameters["left"]
    itemsize, is_gradient = getattr(torch, parameters["dtype"]).itemsize, parameters["kind"] == "backward"
    sizes = Sizes(shapes, 1, 1 if left else m, m if left else 1, itemsize, torch.get_num_threads(), is_gradient, left)
    is_wide = max([p * q for p, q in shapes]) * itemsize > (LIMITS.copied_bytes if is_gradient or left else LIMITS.factor_bytes)
    return None if is_wide or itemsize == 2 or len(real_factors(shapes)) < 2 else sizes


def _busy() -> tuple[float, float]:
    """Seconds of all processes since the start, but for this one; and of the clock."""
    ticks, own = sum([int(word) for word in Path("/proc/stat").read_text().split()[1:4]]), os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system, time.perf_counter()


def _seconds(call: Callable[[], object], way: str, cache: CallCache) -> float:
    """Of the second of two calls, with programs of the way's own."""
    faster, least = WAYS[way]
    names = "_calls", "_programs"
    for name in names:
        setattr(CACHE, name, getattr(cache, name))
    with patch.object(torch_steps, "is_faster", faster), patch.object(torch_steps, "is_least", least):
        call()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def _both(call: Callable[[], object]) -> tuple[float, float]:
    caches, order = {way: CallCache() for way in WAYS}, random.Random(0)
    once = sum([min(_seconds(call, way, caches[way]) for _ in range(2)) for way in WAYS])
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(CASE_SECONDS / once / 2)))
    for _ in range(TRIES):
        (before, start), taken = _busy(), {way: list[float]() for way in WAYS}
        for _ in range(rounds):
            for way in order.sample(list(WAYS), 2):
                taken[way].append(_seconds(call, way, caches[way]))
        after, end = _busy()
        if after - before < max(0.03, OTHERS * (end - start)):
            break
    return statistics.median(taken["kernel"]) * 1e9, statistics.median(taken["products"]) * 1e9


def measured(seconds: float) -> Iterator[Row]:
    """Rows until the time is over."""
    compiled.waits, device, end = True, torch.device("cpu"), time.perf_counter() + seconds
    kept = CACHE._calls, CACHE._programs
    seed = SEED
    while time.perf_counter() < end:
        for case in cases(Draw(seed, COUNT, (), (), 1, 1), device):
            sizes = sizes_of(case.parameters)
            if sizes is not None and time.perf_counter() < end:
                yield Row(sizes, *_both(OURS.prepare(drawn_inputs(case.parameters, device))))
        seed += 1
    CACHE._calls, CACHE._programs = kept


def fitted(found: Sequence[tuple[Any, float]], first: Any, time_of: Callable[[Any, Any], float]) -> Any:
    """Prices for terms and the times they took, from those before."""

    def residuals(logarithms: Any) -> Any:
        prices = np.exp(logarithms)
        return [math.log(time_of(prices, terms) / taken) for terms, taken in found]

    start = np.log(first)  # terms that hardly any problem has tell nothing: their prices stay near those before
    made = least_squares(residuals, start, bounds=(start - MOST_CHANGE, start + MOST_CHANGE), loss="soft_l1", f_scale=OUTLIER)
    return type(first)(*[float(f"{price:.3g}") for price in np.exp(made.x)])


def prices_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The prices of both ways for the rows of a kind, and the report."""
    threads, is_gradient = rows[0].sizes.threads, rows[0].sizes.is_gradient
    priced = partial(products_time, threads=threads)
    kernel = fitted([(kernel_terms(row.sizes), row.kernel) for row in rows], KERNEL[is_gradient], kernel_time)
    products = fitted([(product_terms(row.sizes), row.products) for row in rows], PRODUCTS[is_gradient], priced)
    for name, (a, b) in {"before": (KERNEL[is_gradient], PRODUCTS[is_gradient]), "fitted": (kernel, products)}.items():
        for share in SHARES:
            lost = [lost_by(row, priced(b, product_terms(row.sizes)) < share * kernel_time(a, kernel_terms(row.sizes))) for row in rows]
            print(f"  {name}, share {share}: {statistics.geometric_mean(lost):.3f} times the better way, at most {max(lost):.2f}")
    print(f"  the kernel always: {statistics.geometric_mean([lost_by(row, False) for row in rows]):.3f}")
    return {"kernel": kernel._asdict(), "products": products._asdict()}


def lost_by(row: Row, is_products: bool) -> float:
    """The time of the way that is taken over that of the better one."""
    return (row.products if is_products else row.kernel) / min(row.kernel, row.products)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or fit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kron.cpu_prices", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", type=Path, metavar="ROWS", help="the file of measured problems to write")
    what.add_argument("--fit", type=Path, metavar="ROWS", help="the file of measured problems")
    parser.add_argument("--seconds", type=float, default=100.0, help="of measuring")
    options = parser.parse_args(arguments)
    if options.measure:
        options.measure.write_text(json.dumps(list(measured(options.seconds))))
        return
    read = json.loads(options.fit.read_text())
    rows = [Row(Sizes(tuple([(p, q) for p, q in shapes]), *rest), *times) for (shapes, *rest), *times in read]
    for kind in ("forward", "backward"):
        of = [row for row in rows if row.sizes.is_gradient == (kind == "backward")]
        print(f"{kind}: {len(of)} problems, {of[0].sizes.threads} threads")
        print(json.dumps({kind: prices_of(of)}, indent=2))


if __name__ == "__main__":
    main()
