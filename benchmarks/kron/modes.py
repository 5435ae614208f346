"""`modes`: each algorithm for one mode, or for its factor's gradient, beside the one that the plan takes.

The closed form of times (`kron/families`) is fitted to these times; each case's JSON has its times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kron.drawn import check_draw, log_uniform
from benchmarks.kron.problems import TOLERANCES
from benchmarks.registry import Benchmark, Call, Case, Contender, Draw, register
from fastkron_py.runtime.builder import Builder

ALGORITHMS: Final = ("wgmma", "chained", "matmul", "copying", "looped")
FAMILIES: Final = {"wgmma": "wgmma", "fragments": "chained", "tile": "looped"}  # algorithms
GRADIENTS: Final = {"wgmma": "wgmma", "fragments_factor": "chained", "tile_factor": "looped", "matmul": "matmul", "copying": "copying"}
DTYPES: Final = ("float32", "bfloat16", "float64")
WIDTHS: Final = (33, 2500)
MOST_ELEMENTS: Final = 20_000_000  # of the operand and of the result
LONG_SUM: Final = 100  # terms, from which on errors grow


@dataclass(frozen=True)
class Inputs:
    """x ``[before, P, after]``, the factor ``[P, Q]``, and dy, like the result, where the factor's gradient is wanted."""

    x: Tensor
    factor: Tensor
    dy: Tensor | None

    @property
    def modelled(self) -> dict[str, float]:
        """Seconds of each algorithm by the closed form."""
        from fastkron_py.kron import forward  # imports Triton, as all that launches does
        from fastkron_py.kron.families import gradient_offers, offers, torch_products
        from fastkron_py.kron.gradient_problem import Group, GroupProblem
        from fastkron_py.kron.planner import segment_of

        problem = forward.multiply_problem(self.x.unsqueeze(0), [self.factor.unsqueeze(0)], self.x.device, "highest")
        segment = segment_of(problem, 0, 1, True)
        if self.dy is not None:
            group = GroupProblem.of(problem, Group(0, 0, 1, fused=False), self.factor.shape[1:])
            bids = [bid for made in gradient_offers(group).values() if not isinstance(made, str) for bid in made]
            return {_algorithm(bid): bid.seconds for bid in bids}
        made = {name: offer for name, offer in offers(segment).items() if name in FAMILIES and not isinstance(offer, str)}
        own = {FAMILIES[name]: min([bid.seconds for bid in offer]) for name, offer in made.items()}
        return own | torch_products.multiply_times(segment.mode)


def _algorithm(offer: Any) -> str:
    """The name of an offer's algorithm for the gradient of a factor."""
    return GRADIENTS[offer.prices.removesuffix("_gradients")]


# ---- problems ----------------------------------------------------------------------------------


def cases(draw: Draw, device: torch.device) -> list[Case]:
    """Modes of a seed: the last one of rows, the first one of few columns, or one in between.

    Raises:
        ValueError: as `check_draw`.
    """
    check_draw(draw, WIDTHS[1])
    generator, found = random.Random(draw.seed), list[Case]()
    narrowest = max(draw.narrowest, WIDTHS[0])
    while len(found) < draw.count:
        dtype, kind = generator.choice(draw.dtypes or DTYPES), generator.choice(draw.kinds or ("forward", "backward"))
        p = log_uniform(generator, narrowest, WIDTHS[1])
        q = p if generator.random() < 0.5 else log_uniform(generator, narrowest, WIDTHS[1])
        slices = log_uniform(generator, 30, 100_000)
        tail = generator.choice((1, slices, log_uniform(generator, 2, 10), log_uniform(generator, 2, slices)))
        before = max(1, slices // tail)
        if before * tail * max(p, q) > MOST_ELEMENTS:
            continue
        parameters = {"before": before, "P": p, "after": tail, "Q": q, "dtype": dtype, "kind": kind}
        terms = p if kind == "forward" else before * tail
        found.append(
            Case(
                label=f"{len(found)}: {before} x {p} x {tail} to {q} {dtype} {kind}",
                parameters=parameters,
                dtype=dtype,
                tolerance=TOLERANCES[dtype] * max(2.0, math.sqrt(terms / LONG_SUM)),
                flops=2 * before * p * tail * q,
                quick=len(found) < 3,
            )
        )
    return found


def inputs_of(parameters: dict[str, Any], device: torch.device) -> Inputs:
    """Standard normal operands, and a factor that keeps their size."""
    generator = torch.Generator(device=device).manual_seed(0)
    before, p, after, q = (parameters[name] for name in ("before", "P", "after", "Q"))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(getattr(torch, parameters["dtype"]))

    dy = draw(before, q, after) if parameters["kind"] == "backward" else None
    return Inputs(draw(before, p, after), draw(p, q) / p**0.5, dy)


def error_of(inputs: Inputs, result: Tensor) -> float:
    """The largest error of an element over the largest element."""
    x, f = inputs.x.double(), inputs.factor.double()
    expected = torch.einsum("apb,pq->aqb", x, f) if inputs.dy is None else torch.einsum("apb,aqb->pq", x, inputs.dy.double())
    return float((result.double().reshape(expected.shape) - expected).abs().max() / expected.abs().max())


# ---- contenders --------------------------------------------------------------------------------


@contextmanager
def forced(algorithm: str) -> Iterator[None]:
    """Let programs that are built here take this algorithm for every mode.

    Raises:
        NotImplementedError: no kernel has this name.
    """
    from fastkron_py import families
    from fastkron_py.kron import gradients, planner
    from fastkron_py.kron.families import torch_products
    from fastkron_py.kron.plan.gradients import bids

    if algorithm not in ALGORITHMS:
        raise NotImplementedError(algorithm)
    (name,) = [name for name, own in FAMILIES.items() if own == algorithm] or [torch_products.name]
    times = torch_products.multiply_times
    planner.plan.cache_clear()  # it knows the choice of another algorithm
    with (
        families(name),
        patch.object(torch_products, "multiply_times", lambda mode: {algorithm: 1.0} if name == torch_products.name else times(mode)),
        patch.object(gradients, "bids", lambda problem: [bid for bid in bids(problem) if _algorithm(bid) == algorithm]),
    ):
        yield


def _program(inputs: Inputs) -> Call:
    """The product, or the factor's gradient, as a program of its own."""
    from fastkron_py.kron.canonical import PLAIN
    from fastkron_py.kron.forward import add_multiply
    from fastkron_py.kron.gradients import add_backward

    given = [t for t in (inputs.x, inputs.factor, inputs.dy) if t is not None]
    build = Builder(given)
    x, factor, *dy = [t.unsqueeze(0) for t in build.inputs]
    if dy:
        _, (made,) = add_backward(build, dy[0], x, [factor], (False, True), "highest", PLAIN, inputs.factor.dtype)
    else:
        made = add_multiply(build, x, [factor], "highest")
    assert made is not None  # the factor's gradient is wanted
    program = build.program([made])
    return lambda: program(given)[0]


def _by(algorithm: str) -> Callable[[Inputs], Call]:
    def prepare(inputs: Inputs) -> Call:
        if algorithm not in inputs.modelled:
            raise NotImplementedError(f"{algorithm} is no choice here")
        with forced(algorithm):
            return _program(inputs)

    return prepare


def _obstacle(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "the kernels need a GPU"


OURS = Contender("the plan's choice", _program, _obstacle, is_ours=True)

register(
    Benchmark(
        name="modes",
        description="Each algorithm for a mode of random sizes, or for its factor's gradient, beside the plan's choice.",
        device="cuda",
        cases=(),
        draw=cases,
        contenders=[OURS, *[Contender(algorithm, _by(algorithm), _obstacle) for algorithm in ALGORITHMS]],
        inputs=inputs_of,
        check=error_of,
        baseline="matmul",
        rounds=(5, 40),
        case_seconds=0.3,
        details=lambda inputs: {"modelled": inputs.modelled},
        notes=("An algorithm that is no choice for a mode fails with that reason.",),
    )
)
