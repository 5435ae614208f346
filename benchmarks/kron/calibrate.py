"""Prices of the families' launches on one GPU: single launches are measured, and the planner's quantities fitted to their times.

    python -m benchmarks.kron.calibrate --measure rows.csv --minutes 5            # on the GPU; again to go on
    python -m benchmarks.kron.calibrate --measure rows.csv --minutes 2 --gradients
    python -m benchmarks.kron.calibrate --fit rows.csv --out fastkron_py/kron/rates/hopper.json

A launch multiplies some neighbouring modes with elements before and after them, or computes their gradients. Its modelled time is a sum of
quantities, each times a price (`kron.rates.priced`). Prices are fitted by least squares of the times' logarithms, for each family and
dtype, and none is negative. Half of the minutes of gradients go to compiling their kernels, in several processes.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from rich.progress import track
from scipy.optimize import least_squares, nnls

from benchmarks.kron.programs import pretending
from fastkron_py.kron import forward, gradients, matmul_step
from fastkron_py.kron.canonical import PLAIN, Scale
from fastkron_py.kron.families import BY_NAME, asked, family_of, gradient_offers, refusal, torch_products
from fastkron_py.kron.gradient_problem import Group, GroupProblem
from fastkron_py.kron.plan.steps import Launch, steps_of
from fastkron_py.kron.planner import Place, placed_segment
from fastkron_py.kron.problem import GradientOffer, LaunchProblem, Offer, Problem, Rows, Segment, add_launch, contiguous_problem
from fastkron_py.kron.rates import at_least
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.program import Program

DTYPES: Final = ("float32", "bfloat16", "float64")
CASES: Final = 900  # of each dtype
MOST_ELEMENTS: Final = 1 << 24  # of x and of the result
WIDEST: Final = 3000
CHAINED: Final = {2: 128, 3: 32, 4: 16, 5: 8, 6: 4}  # the widest factor of a chain, by their number
AFTER: Final = (2, 8, 30, 33, 64, 128, 1000)
SECONDS: Final = 2e-3  # that a measured graph takes, about
ROUNDS: Final = 5
FOLDS: Final = 5  # of the launches, one of which is left out of a fit at a time
WORST: Final = 10  # choices that are printed
GRADIENTS: Final = "_gradients"  # ends the sections of their prices
ALONE: Final = tuple([f"{name}{GRADIENTS}" for name in ("tile_factor", "fragments_factor", "wgmma", "matmul", "copying")])  # without dx
GRADIENT_CASES: Final = 500  # of each dtype
FORMS: Final = ((1, 3000), (1, 500), (1, 128), (1, 64), (1, 64), (1, 8), (2, 8), (2, 32), (2, 32), (3, 4))  # numbers of factors, and widths
POWERS: Final = (8, 16, 16, 32, 32, 64, 128)
EVEN_AFTER: Final = (64, 256, 1024, 4096)
EVEN: Final = {"float32": 0.75, "bfloat16": 0.3, "float64": 0.3}  # share of cases of powers of two
FEWER: Final = 16  # times as few rows, which the same kernels take
COMPILING: Final = 0.5  # of the minutes of gradients
PROCESSES: Final = 16


class Row(NamedTuple):
    """A launch and its time.

    Attributes:
        dtype: of the tensors.
        rows: of x.
        before: elements of a row before the modes.
        shapes: of the factors, "2x2 3x4".
        after: elements after the modes.
        family: of the launch, of torch's products the algorithm; of gradients the section of their prices, which ends in "_gradients".
        steps: numbers of factors that each step multiplies, "1 2".
        to_front: whether the launch moves its modes ahead of the others.
        us: microseconds in a CUDA graph that runs it again and again.
    """

    dtype: str
    rows: int
    before: int
    shapes: str
    after: int
    family: str
    steps: str
    to_front: int
    us: float

    @property
    def case(self) -> tuple[Any, ...]:
        """What is multiplied."""
        return self[:5]

    @property
    def is_gradient(self) -> bool:
        """Whether gradients are computed."""
        return self.family.endswith(GRADIENTS)

    @property
    def task(self) -> tuple[Any, ...]:
        """What other launches compute as well: the multiply, or the gradients of these steps, with dx or without."""
        return (*self.case, self.steps, self.family in ALONE) if self.is_gradient else self.case

    @property
    def factors(self) -> list[tuple[int, int]]:
        """Rows and columns of the factors."""
        return [(int(p), int(q)) for p, q in (shape.split("x") for shape in self.shapes.split())]


def read(path: Path) -> list[Row]:
    """Rows of a file."""
    with path.open(newline="") as lines:
        return [
            Row(d, int(r), int(b), s, int(a), f, n, int(t), float(us))
            for d, r, b, s, a, f, n, t, us in itertools.islice(csv.reader(lines), 1, None)
        ]


# ---- quantities and prices -----------------------------------------------------------------------


def problem_of(row: Row) -> Problem:
    """The multiply: modes between two that no factor multiplies."""
    factors, width = row.factors, row.before * row.after
    sizes = (row.before, *[p for p, _ in factors], row.after)
    shapes = [(1, row.before, row.before), *[(1, *f) for f in factors], (1, row.after, row.after)]
    strides = [(0, f[2], 1) for f in shapes]
    elements = width * math.prod([p for p, _ in factors])
    gpu = devices.gpu_of(torch.device("cuda"))
    operand = (1, row.rows, elements, 1), Rows(row.rows * elements, elements, 1), None
    of = (*operand, tuple(shapes), tuple(strides), 1, 1 + len(factors), sizes)
    return Problem(getattr(torch, row.dtype), "highest", gpu, *of, whole_rows=True)


def segment_of(row: Row) -> Segment:
    """All of its factors."""
    problem = problem_of(row)
    place = Place(row.before * row.after, 1) if row.to_front else Place(row.before, row.after)
    return placed_segment(problem, 0, len(row.factors), place, not row.to_front, True)


def launch_of(row: Row) -> Launch:
    """The launch, whose steps count from the first factor."""
    ps, qs = zip(*row.factors, strict=True)
    ends = (0, *itertools.accumulate(map(int, row.steps.split())))
    family = row.family if row.family in BY_NAME else torch_products.name
    return Launch(steps_of(ps, qs, ends), family)


def offer_of(row: Row) -> Offer | None:
    """The family's offer of a launch, if it makes one."""
    launch = launch_of(row)
    bids = [bid for bid in family_of(launch).offers(segment_of(row)) if not isinstance(bid, str)]
    return next((bid for bid in bids if bid.launch.steps == launch.steps and bid.launch.config in (None, row.family)), None)


def quantities(row: Row) -> tuple[str, Mapping[str, float]]:
    """The section of its prices, and the quantities, as the families state them."""
    if row.is_gradient:
        return row.family, gradient_offer(row).quantities
    if row.family in matmul_step.BY_TORCH:
        of = torch_products.matmul_quantities if row.family == "matmul" else torch_products.copying_quantities
        return row.family, of(segment_of(row).mode)
    offer = offer_of(row)
    assert offer is not None, f"no family offers {row}"
    return offer.prices, offer.quantities


def group_of(row: Row) -> GroupProblem:
    """The group of all factors, of gradients."""
    factors, gpu = [(row.before, row.before), *row.factors], devices.gpu_of(torch.device("cuda"))
    problem = contiguous_problem(factors, row.rows, row.after, getattr(torch, row.dtype), gpu)
    counts = [int(count) for count in row.steps.split()]
    split = 1 + sum(counts[:-1])
    return GroupProblem.of(problem, Group(1, split, len(factors), row.family not in ALONE), [q for _, q in factors])


def gradient_offer(row: Row) -> GradientOffer:
    """The offer of the row's family."""
    made = gradient_offers(group_of(row)).values()
    (found,) = [offer for bids in made if not isinstance(bids, str) for offer in bids if offer.prices == row.family]
    return found


def fit(found: Sequence[tuple[dict[str, float], float]]) -> dict[str, float]:
    """Prices of quantities, which times follow most closely, by ratio; a few times that do not follow count less."""
    names = sorted({name for made, _ in found for name, value in made.items() if value})
    table = np.array([[made.get(name, 0.0) for name in names] for made, _ in found])
    seconds = np.array([us * 1e-6 for _, us in found])
    scale = table.max(axis=0)
    begun, _ = nnls(table / scale / seconds[:, None], np.ones(len(seconds)))

    least = np.array([made["streamed"] for made, _ in found])

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.log(at_least(np.maximum(table / scale @ np.exp(logs), 1e-12), least)) - np.log(seconds)

    made = least_squares(errors, np.log(np.maximum(begun, 1e-9)), bounds=(-25, 25), loss="soft_l1", f_scale=0.15)
    return {name: float(f"{price:.3g}") for name, price in zip(names, np.exp(made.x) / scale, strict=True) if price >= 2e-3}


def prices(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Prices of all rows' quantities by section and bytes of an element."""
    grouped = defaultdict[tuple[str, str], list[tuple[dict[str, float], float]]](list)
    for row in rows:
        section, made = quantities(row)
        grouped[section, str(getattr(torch, row.dtype).itemsize)].append((made, row.us))
    found = defaultdict[str, dict[str, dict[str, float]]](dict)
    for (section, itemsize), launches in sorted(grouped.items()):
        found[section][itemsize] = fit(launches)
    return dict(found)


def modelled(row: Row, of: dict[str, dict[str, dict[str, float]]]) -> float:
    """Microseconds of a row by prices."""
    section, made = quantities(row)
    paid = of.get(section, {}).get(str(getattr(torch, row.dtype).itemsize), {})
    return 1e6 * at_least(sum([paid.get(name, 0.0) * value for name, value in made.items()]), made["streamed"])


# ---- measuring -----------------------------------------------------------------------------------


def _log_uniform(generator: random.Random, most: int) -> int:
    return int(math.exp(generator.uniform(0, math.log(most + 1))))


def cases(dtype: str) -> list[Row]:
    """Random multiplies, of one factor or of several small ones, without a family and a time."""
    generator, found = random.Random(dtype), list[Row]()
    while len(found) < CASES:
        count = generator.choice((1, 1, 1, *CHAINED))
        most = CHAINED.get(count, WIDEST)
        ps = [_log_uniform(generator, most) for _ in range(count)]
        if generator.random() < 0.5:
            ps = [1 << p.bit_length() - 1 for p in ps]
        qs = ps if generator.random() < 0.6 else [_log_uniform(generator, most) for _ in range(count)]
        after = 1 if generator.random() < 0.4 else generator.choice((*AFTER, _log_uniform(generator, 2000)))
        slices, width = _log_uniform(generator, 1 << 20), after * max(math.prod(ps), math.prod(qs))
        if 1 << 8 <= width * slices <= MOST_ELEMENTS:
            before = 1 if generator.random() < 0.5 else _log_uniform(generator, slices)
            shapes = " ".join([f"{p}x{q}" for p, q in zip(ps, qs, strict=True)])
            found.append(Row(dtype, slices // before, before, shapes, after, "", "", 0, 0.0))
    return found


def gradient_cases(dtype: str) -> list[Row]:
    """Random multiplies whose gradients are computed, each also with fewer rows, for which hardly anything more is compiled."""
    generator, found = random.Random(dtype + GRADIENTS), list[Row]()
    while len(found) < GRADIENT_CASES:
        count, most = generator.choice(FORMS)
        is_even = generator.random() < EVEN[dtype]
        ps, qs = ([_log_uniform(generator, most) for _ in range(count)] for _ in range(2))
        if is_even:
            ps, qs = ([generator.choice([w for w in POWERS if w <= most] or [most]) for _ in range(count)] for _ in range(2))
        qs = ps if generator.random() < 0.6 else qs
        after = 1 if generator.random() < 0.4 else generator.choice(EVEN_AFTER if is_even else AFTER)
        width = after * max(math.prod(ps), math.prod(qs))
        # Register-resident kernels take whole tiles, and one for each multiprocessor at least.
        rows = (1 << generator.randint(19, 24)) // width if is_even else _log_uniform(generator, max(1, MOST_ELEMENTS // width))
        if 1 << 14 <= rows * width <= MOST_ELEMENTS:
            before = 1 if generator.random() < 0.5 or is_even else _log_uniform(generator, rows)
            shapes = " ".join([f"{p}x{q}" for p, q in zip(ps, qs, strict=True)])
            found += [
                Row(dtype, max(1, n // before), before, shapes, after, "", "", 0, 0.0) for n in (rows, rows // FEWER) if n * width >= 1 << 8
            ]
    return list(dict.fromkeys(found))


def gradient_launches(case: Row) -> Iterator[Row]:
    """The launches that families offer for the gradients of all factors of a case: as one step, as two, and of one factor without dx."""
    count = len(case.factors)
    forms = [(f"{count}", "tile" + GRADIENTS)]
    forms += [("1", ALONE[0])] if count == 1 else [(f"{count // 2} {count - count // 2}", "tile_chain" + GRADIENTS)]
    for steps, family in forms:
        for made in gradient_offers(group_of(case._replace(steps=steps, family=family))).values():
            for offer in () if isinstance(made, str) else made:
                yield case._replace(steps=steps, family=offer.prices)


def launches(case: Row) -> Iterator[Row]:
    """The launches that families offer for all factors of a case, in place and to the front."""
    problem = problem_of(case)
    for to_front in (0, 1) if case.after == 1 and case.before > 1 else (0,):
        segment = segment_of(case._replace(to_front=to_front))
        for family in asked(problem):
            made = refusal(family, problem) or family.offers(segment) if family.moves_to_front or not to_front else ""
            for offer in () if isinstance(made, str) else made:
                steps = " ".join([str(step.stop - step.start) for step in offer.launch.steps])
                names = torch_products.multiply_times(segment.mode) if family.name == torch_products.name else (family.name,)
                yield from [case._replace(family=name, steps=steps, to_front=to_front) for name in names]


def program_of(row: Row, x: torch.Tensor, factors: Sequence[torch.Tensor]) -> tuple[Program, LaunchProblem]:
    """The program of one launch."""
    problem, launch = problem_of(row), launch_of(row).shifted(1)
    build = Builder((x, *factors))
    operand, *matrices = build.inputs
    shape, width = (1, row.rows, row.before, row.after), row.before * launch.q * row.after
    y = Rows(row.rows * width, width, 1)
    made = forward.launch_problem(problem, launch, shape, row.to_front * row.before, problem.x, y, final=True)
    if row.family in ("matmul", "copying"):
        result = matmul_step.add_products(build, made, operand, matrices, None, None, Scale(), row.family)
    else:
        result = add_launch(build, made, operand, matrices, None, None, Scale())
    return build.program([result]), made


def gradient_program_of(row: Row, u: torch.Tensor, g: torch.Tensor, factors: Sequence[torch.Tensor]) -> Program:
    """The program of a group's gradients and, of a fused one, of dx."""
    build = Builder((u, g, *factors))
    u, g, *matrices = build.inputs
    problem, made = group_of(row), gradient_offer(row).launch()
    dx = build.empty(u.shape, u.dtype) if problem.is_fused else None
    found = gradients.add_gradients(build, problem, made, u, g, matrices, dx, PLAIN.alpha)
    return build.program([t for t in (*found, dx) if t is not None])


def microseconds(call: Callable[[], Any]) -> float:
    """The median time of a call in a CUDA graph that repeats it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(run: Callable[[], Any]) -> float:
        begin.record()
        run()
        end.record()
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    call()
    count = max(2, min(20, int(1e6 * SECONDS / max(1.0, timed(call)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    return statistics.median([timed(graph.replay) for _ in range(ROUNDS)]) / count


def calls_of(case: Row, of_gradients: bool) -> Iterator[tuple[Row, Callable[[], Any], Callable[[], bool]]]:
    """Each launch of a case, a call of it, and whether a called one had too little shared memory for its kernel's first configuration."""
    dtype, factors = getattr(torch, case.dtype), case.factors
    widths = [case.before * math.prod(side) * case.after for side in zip(*factors, strict=True)]
    x, g = (torch.randn(1, case.rows, width, 1, dtype=dtype, device="cuda") for width in widths)
    matrices = [torch.randn(1, p, q, dtype=dtype, device="cuda") for p, q in ((1, 1), *factors, (1, 1))]
    if of_gradients:
        for row in gradient_launches(case):
            program = gradient_program_of(row, x, g, matrices[1:-1])
            launchers = [step.run for step in program._steps if isinstance(step.run, Launcher)]
            yield row, partial(program, (x, g, *matrices[1:-1])), lambda launchers=launchers: any([made.fell_back for made in launchers])
    else:
        for row in launches(case):
            program, made = program_of(row, x, matrices)
            yield row, partial(program, (x, *matrices)), lambda made=made: made.fell_back


def compile_share(share: Sequence[str]) -> None:
    """Make calls once, of every so many of the cases, up to a time on this machine's monotonic clock: their kernels are kept on disk."""
    index, stop, path = int(share[0]), float(share[1]), Path(share[2])
    for case in left_of(path, True)[index::PROCESSES]:
        for _, call, _ in calls_of(case, True):
            if time.monotonic() > stop:
                return
            call()


def left_of(path: Path, of_gradients: bool) -> list[Row]:
    """Cases that are not in a file, in the order in which they are measured: each with fewer rows directly after the other."""
    known = {row.case for row in read(path) if row.is_gradient == of_gradients} if path.exists() else set()
    everything = [gradient_cases(dtype) if of_gradients else cases(dtype) for dtype in DTYPES]
    if of_gradients:
        found = [case for several in itertools.zip_longest(*everything) for case in several if case is not None]
    else:
        found = [case for several in everything for case in several]
        random.Random(len(known)).shuffle(found)
    return [case for case in found if case.case not in known]


def measure(path: Path, minutes: float, of_gradients: bool) -> None:
    """Append launches and their times to a file, as far as the minutes go."""
    begun = time.monotonic()
    left = left_of(path, of_gradients)
    if of_gradients:
        until = str(begun + 60 * minutes * COMPILING)
        command = [sys.executable, "-m", "benchmarks.kron.calibrate", "--compile"]
        children = [subprocess.Popen([*command, str(i), until, str(path)]) for i in range(PROCESSES)]
        for child in children:
            child.wait()
    is_new = not path.exists()
    with path.open("a", newline="") as lines:
        table = csv.writer(lines, lineterminator="\n")
        if is_new:
            table.writerow(Row._fields)
        for case in track(left, description="launches"):
            for row, call, fell_back in calls_of(case, of_gradients):
                if time.monotonic() > begun + 60 * minutes:
                    return
                us = microseconds(call)
                if not fell_back():
                    table.writerow(row._replace(us=round(us, 2)))


# ---- what came of it -----------------------------------------------------------------------------


def report(rows: Sequence[Row]) -> None:
    """Print how prices that were fitted to other launches tell times, and what the choices by them take over the best ones."""
    cases = sorted({row.case for row in rows})
    random.Random(0).shuffle(cases)
    fold = {case: i % FOLDS for i, case in enumerate(cases)}
    told, ratios = dict[Row, float](), defaultdict[tuple[str, str], list[float]](list)
    for left_out in range(FOLDS):
        paid = prices([row for row in rows if fold[row.case] != left_out])
        told |= {row: modelled(row, paid) for row in rows if fold[row.case] == left_out}
    for row in rows:
        ratios[row.family, row.dtype].append(row.us / max(told[row], 1e-3))
    for (family, dtype), found in sorted(ratios.items()):
        if len(found) > 1:
            low, *_, high = statistics.quantiles(found, n=10)
            spread = f"{len(found):4} launches, measured over modelled: median {statistics.median(found):.2f}"
            print(f"{family:14} {dtype:9} {spread}, {low:.2f} to {high:.2f}")
    for dtype, made in losses(rows, told).items():
        mean = math.exp(statistics.mean([math.log(loss) for loss, _, _ in made]))
        print(f"{dtype}: choices take {mean:.3f} times the best, in geometric mean over {len(made)}")
        for loss, chosen, best in sorted(made, reverse=True)[:WORST]:
            print(f"  {loss:.2f} {'x'.join(map(str, chosen[1:5]))}: {chosen.family} {chosen.us:.1f}, best {best.family} {best.us:.1f}")


def losses(rows: Sequence[Row], told: Mapping[Row, float]) -> dict[str, list[tuple[float, Row, Row]]]:
    """The time of each choice over that of the best launch, of launches in place, with both; by dtype, and of gradients apart."""
    tasks, found = defaultdict[tuple[Any, ...], list[Row]](list), defaultdict[str, list[tuple[float, Row, Row]]](list)
    for row in rows:
        if not row.to_front:
            tasks[row.task].append(row)
    for (dtype, *_), launches in tasks.items():
        chosen, best = min(launches, key=lambda row: told[row]), min(launches, key=lambda row: row.us)
        found[f"{dtype} gradients" if best.is_gradient else dtype].append((chosen.us / best.us, chosen, best))
    return dict(found)


def lines_of(value: Any, indent: str = "") -> str:
    """JSON with a line for each object that holds numbers alone."""
    if not isinstance(value, dict) or not any([isinstance(inner, dict) for inner in value.values()]):
        return json.dumps(value)
    inner = ",\n".join([f"{indent}  {json.dumps(name)}: {lines_of(of, indent + '  ')}" for name, of in value.items()])
    return f"{{\n{inner}\n{indent}}}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or fit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kron.calibrate", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", type=Path, metavar="ROWS", help="the file of measured launches to write, or to add to")
    what.add_argument("--fit", type=Path, metavar="ROWS", help="the file of measured launches")
    what.add_argument("--compile", nargs=3, metavar=("SHARE", "UNTIL", "ROWS"), help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=5.0, help="of measuring")
    parser.add_argument("--gradients", action="store_true", help="measure launches of gradients")
    parser.add_argument("--out", type=Path, help="the GPU's file of rates, whose prices are replaced")
    options = parser.parse_args(arguments)
    with torch.no_grad():
        if options.compile:
            return compile_share(options.compile)
        if options.measure:
            return measure(options.measure, options.minutes, options.gradients)
    with pretending():
        rows = read(options.fit)
        report(rows)
        if options.out:
            found = json.loads(options.out.read_text())
            found["prices"] = dict(sorted((found["prices"] | prices(rows)).items()))
            options.out.write_text(lines_of(found) + "\n")


if __name__ == "__main__":
    main()
