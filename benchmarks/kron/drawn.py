"""`drawn`: random problems beside two ways to write them in torch, for the distribution of speed-ups rather than for chosen rows."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import fastkron_py
from benchmarks.kron.peers import PYFASTKRON, loop
from benchmarks.kron.problems import TOLERANCES, flops, gradient_inputs, label
from benchmarks.registry import Benchmark, Call, Case, Contender, Draw, register
from fastkron_py import reference

WIDEST: Final = 3000
MOST_FACTORS: Final = 6
MOST_ROWS: Final = 20_000
COTANGENT: Final = 1 / 16  # of a standard normal: sums over millions of rows stay within float16
FORWARD_TOLERANCE: Final = 2.0  # times the usual, which is of a mean error; here it is the largest
BACKWARD_TOLERANCE: Final = 4.0  # times the forward pass's: twice as many products
LONG_SUM: Final = 400  # terms, from which on roundings of a float32 sum, in the order that a BLAS takes, outgrow the tolerance
PASSES: Final = {"forward": 1, "backward": 3}  # products of x's size
QUICK: Final = 3  # problems of a quick run

Product = Callable[[Tensor, Sequence[Tensor]], Tensor]


class Limits(NamedTuple):
    """What fits a device. The rates are low ones, so that the slowest contender takes about `seconds` at most.

    Attributes:
        dtypes: to draw from, the frequent ones several times.
        flops: a second, by dtype.
        nbytes: of the largest intermediate.
        seconds: of a call, by the rates.
        bandwidth: bytes a second that a transposing copy reads and writes.
    """

    dtypes: tuple[str, ...]
    flops: dict[str, float]
    nbytes: int
    seconds: float
    bandwidth: float


HALF: Final = ("bfloat16", "float16")
LIMITS: Final = {
    "cuda": Limits(
        ("float32", "float32", *HALF, "float64"),
        {"float32": 3e13, "float64": 3e13, **dict.fromkeys(HALF, 3e14)},
        nbytes=1 << 29,
        seconds=0.05,
        bandwidth=1e12,
    ),
    "cpu": Limits(
        ("float32",) * 3 + ("float64",) * 2 + ("bfloat16",),
        {"float32": 4e10, "float64": 2e10, **dict.fromkeys(HALF, 2e9)},
        nbytes=1 << 25,
        seconds=0.3,
        bandwidth=1e9,
    ),
}


# ---- problems ----------------------------------------------------------------------------------


def sizes(m: int, ps: Sequence[int], qs: Sequence[int]) -> Iterator[int]:
    """Elements of x and of each factor's result, from the last to the first."""
    elements = m * math.prod(ps)
    yield elements
    for p, q in zip(reversed(ps), reversed(qs), strict=True):
        elements = elements // p * q
        yield elements


def fits(parameters: dict[str, Any], limits: Limits) -> bool:
    """Whether memory and time of a problem are within the limits, by its sizes alone, from the last factor and from the first one."""
    m, ps, qs = (parameters[name] for name in "MPQ")
    itemsize = getattr(torch, parameters["dtype"]).itemsize
    for p, q in ((ps, qs), (ps[::-1], qs[::-1])):
        elements = list(sizes(m, p, q))
        moved = itemsize * sum(elements[i] + 3 * elements[i + 1] for i in range(len(p)))  # a product, and a copy of its result
        seconds = flops(m, p, q) / limits.flops[parameters["dtype"]] + moved / limits.bandwidth
        if itemsize * max(elements) > limits.nbytes or PASSES[parameters["kind"]] * seconds > limits.seconds:
            return False
    return True


def log_uniform(generator: random.Random, least: int, most: int) -> int:
    """least to most, of a uniform logarithm."""
    return int(math.exp(generator.uniform(math.log(least), math.log(most + 1))))


def _most_factors(narrowest: int, fixed: dict[str, Any], limits: Limits) -> int:
    """Factors of twice the least width that fit with one row, at most MOST_FACTORS: of more, hardly a draw ever would."""
    width = min(2 * narrowest, WIDEST)
    fitting = (n for n in range(2, MOST_FACTORS + 1) if fits({"M": 1, "P": [width] * n, "Q": [width] * n, **fixed}, limits))
    return max(fitting, default=1)


def _parameters(generator: random.Random, draw: Draw, limits: Limits) -> dict[str, Any]:
    """One problem: dtype, form, kind and number of factors are drawn once, sizes until they fit."""
    fixed = {
        "dtype": generator.choice(draw.dtypes or limits.dtypes),
        "kind": generator.choice(draw.kinds or tuple(PASSES)),
        "left": generator.random() < 0.5,
    }
    count, square = generator.randint(1, _most_factors(draw.narrowest, fixed, limits)), generator.random() < 0.5
    while True:
        ps = [log_uniform(generator, draw.narrowest, WIDEST) for _ in range(count)]
        qs = list(ps) if square else [log_uniform(generator, draw.narrowest, WIDEST) for _ in range(count)]
        parameters = {"M": log_uniform(generator, 1, MOST_ROWS), "P": ps, "Q": qs, **fixed}
        if fits(parameters, limits):
            return parameters


def _tolerance(parameters: dict[str, Any]) -> float:
    """The dtype's, more for gradients, and more for sums that are long; half types are summed in float32."""
    m, ps, qs, dtype = (parameters[name] for name in ("M", "P", "Q", "dtype"))
    terms, least = max(ps), FORWARD_TOLERANCE
    if parameters["kind"] == "backward":
        terms, least = m * math.prod(max(p, q) for p, q in zip(ps, qs, strict=True)), BACKWARD_TOLERANCE
    return TOLERANCES[dtype] * (least if dtype in HALF else max(least, math.sqrt(terms / LONG_SUM)))


def case_of(parameters: dict[str, Any], name: str, quick: bool = False) -> Case:
    """The row of a problem."""
    m, ps, qs, dtype, kind = (parameters[name] for name in ("M", "P", "Q", "dtype", "kind"))
    return Case(
        label=f"{name}: {label(m, ps, qs)} {dtype} {kind}{' left' if parameters['left'] else ''}",
        parameters=parameters,
        dtype=dtype,
        tolerance=_tolerance(parameters),
        flops=PASSES[kind] * flops(m, ps, qs),
        quick=quick,
    )


def check_draw(draw: Draw, widest: int = WIDEST) -> None:
    """Raise a ValueError for a dtype or a kind that is unknown, no problem, or widths that are out of range."""
    for name, given, known in (("dtype", draw.dtypes, TOLERANCES), ("kind", draw.kinds, PASSES)):
        if not set(given) <= set(known):
            raise ValueError(f"{name}: expected some of {', '.join(known)}; got {', '.join(given)}")
    if draw.count < 1:
        raise ValueError(f"count: expected a positive integer; got {draw.count}")
    if not 1 <= draw.narrowest <= widest:
        raise ValueError(f"narrowest: expected 1 to {widest}; got {draw.narrowest}")


def cases(draw: Draw, device: torch.device) -> list[Case]:
    """The problems of a seed; those of a smaller count are the first of them.

    Raises:
        ValueError: a dtype or a kind that is unknown, no problem, or widths that are out of range.
    """
    check_draw(draw)
    generator = random.Random(draw.seed)
    return [case_of(_parameters(generator, draw, LIMITS[device.type]), str(i), i < QUICK) for i in range(draw.count)]


@dataclass(frozen=True)
class Drawn:
    """Inputs of one problem.

    Attributes:
        x: ``[M, K]``, in the left form ``[K, M]``.
        factors: ``[P_i, Q_i]``, in the left form ``[Q_i, P_i]``.
        dy: of the result's shape, where gradients are wanted.
        left: the form.
    """

    x: Tensor
    factors: list[Tensor]
    dy: Tensor | None
    left: bool

    @cached_property
    def deviations(self) -> list[float]:
        """Standard deviations of the elements of `expected`, from the inputs'."""
        rows = self.x.shape[1 if self.left else 0]
        ps, qs = zip(*[f.shape[::-1] if self.left else f.shape for f in self.factors], strict=True)
        if self.dy is None:
            return [1.0]
        n = math.prod(qs)
        return [COTANGENT * math.sqrt(n / math.prod(ps)), *[COTANGENT * math.sqrt(rows * n / q) for q in qs]]

    @cached_property
    def expected(self) -> list[Tensor]:
        """The result, or dx and every dF_i, in float64."""
        x, *factors = (t.detach().double().requires_grad_(self.dy is not None) for t in (self.x, *self.factors))
        with torch.enable_grad():
            y = reference.kron_matmul(x, factors, left=self.left)
            return [y] if self.dy is None else list(torch.autograd.grad(y, [x, *factors], self.dy.double()))


def drawn_inputs(parameters: dict[str, Any], device: torch.device) -> Drawn:
    """Standard normal x and factors of one problem, factors scaled so that results keep their size."""
    plain = gradient_inputs(parameters, device)
    tensors = [t.detach() for t in (plain.x, *plain.factors, plain.dy * COTANGENT)]
    if parameters["left"]:
        tensors = [t.mT.contiguous() for t in tensors]
    x, *factors, dy = tensors
    if parameters["kind"] == "forward":
        return Drawn(x, factors, None, parameters["left"])
    return Drawn(x.requires_grad_(), [f.requires_grad_() for f in factors], dy, parameters["left"])


def largest_error(problem: Drawn, results: Tensor | Sequence[Tensor]) -> float:
    """The largest error of an element over the largest element, of the result or of any gradient.

    Where all elements happen to be small, as the only gradient of a factor 1 x 1 may be, it is over their standard deviation.
    """
    listed = [results] if isinstance(results, Tensor) else list(results)
    if [t.shape for t in listed] != [t.shape for t in problem.expected]:
        return math.inf
    errors = [
        (a.double() - e).abs().max() / e.abs().max().clamp(min=deviation)
        for a, e, deviation in zip(listed, problem.expected, problem.deviations, strict=True)
    ]
    return float(torch.stack(errors).max())  # NaN stays NaN


# ---- contenders --------------------------------------------------------------------------------


def _ours(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    return fastkron_py.kron_matmul(x, factors)


def _ours_left(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    return fastkron_py.kron_matmul_left(factors, x)


def loop_left(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """The textbook form from the left, as GPyTorch has it: multiply by a factor, move its mode behind the others, next factor."""
    columns = x.shape[-1]
    for f in factors:
        x = (f @ x.reshape(f.shape[1], -1)).reshape(f.shape[0], -1, columns).transpose(0, 1).reshape(-1, columns)
    return x


def in_place(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Each factor on its mode where it stands, ``F^T @ [before, P, after]``: no transposes, no copies."""
    rows, after = x.shape[0], 1
    for f in reversed(factors):
        x = x.reshape(-1, f.shape[0]) @ f if after == 1 else torch.matmul(f.mT, x.view(-1, f.shape[0], after))
        after *= f.shape[1]
    return x.view(rows, -1)


def in_place_left(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """The same from the left, with x's columns behind all modes."""
    columns = after = x.shape[-1]
    for f in reversed(factors):
        x = torch.matmul(f, x.view(-1, f.shape[1], after))
        after *= f.shape[0]
    return x.view(-1, columns)


def _pyfastkron(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    return importlib.import_module("pyfastkron.fastkrontorch").gemkm(x, factors)  # type: ignore[no-any-return]


def _pyfastkron_left(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    return importlib.import_module("pyfastkron.fastkrontorch").gekmm(factors, x)  # type: ignore[no-any-return]


def _either(right: Product, left: Product) -> Callable[[Drawn], Call]:
    """The call that a problem's form and kind ask for."""

    def prepare(problem: Drawn) -> Call:
        multiply, arguments = left if problem.left else right, [problem.x, *problem.factors]

        def gradients() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(multiply(problem.x, problem.factors), arguments, problem.dy)

        return (lambda: multiply(problem.x, problem.factors)) if problem.dy is None else gradients

    return prepare


OURS = Contender("fastkron_py", _either(_ours, _ours_left), is_ours=True)
LOOP = Contender("matmul + transpose", _either(loop, loop_left))
IN_PLACE = Contender("matmul in place", _either(in_place, in_place_left))

register(
    Benchmark(
        name="drawn",
        description="Random Kronecker products, forward and with backward, beside the matmul-and-transpose loop and matmul in place.",
        device="cuda",
        cases=(),
        draw=cases,
        contenders=[
            OURS,
            LOOP,
            IN_PLACE,
            Contender("pyfastkron", _either(_pyfastkron, _pyfastkron_left), obstacle=PYFASTKRON.obstacle),
        ],
        inputs=drawn_inputs,
        check=largest_error,
        baseline="matmul + transpose",
        rounds=(5, 60),
        case_seconds=0.4,
        notes=("Errors are the largest of an element over the largest element of the float64 reference.",),
    )
)
