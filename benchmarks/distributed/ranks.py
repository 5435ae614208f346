"""What every rank of ``python -m benchmarks.distributed`` does: scaling, gradients, and a product that one GPU could not hold.

    torchrun --nproc-per-node 4 -m benchmarks.distributed.ranks out.json

Every product is checked on sampled entries before it is timed: rows of x are multiples of Kronecker products of vectors, so that each entry
of the result is known. The time on one GPU is taken in the same job, by rank 0 alone while the others wait.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastkron_py
from fastkron_py.distributed import Plan, Problem, ProcessGrid, init_process_group, kron_matmul, plan
from fastkron_py.distributed.agreement import agree
from fastkron_py.distributed.plan import DIRECT, FALLBACK, of_stages
from fastkron_py.kron.operators.algebra import kron_range

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
SAMPLED_ROWS, SAMPLED_COLUMNS = 16, 4096
REPEATS = (3, 12)  # fewest and most calls in a loop
LOOP_SECONDS = 0.25


@dataclass(frozen=True)
class Scaling:
    """One product over n ranks: weak with rows for each rank, strong with as many for all."""

    label: str
    sizes: tuple[int, ...]
    rows: int
    weak: bool
    dtype: torch.dtype
    backward: bool = False

    def total(self, ranks: int) -> int:
        """Rows of x on this number of ranks."""
        return self.rows * (ranks if self.weak else 1)

    @property
    def name(self) -> str:
        """As it is shown."""
        kind = f"{self.rows} rows a rank" if self.weak else f"{self.rows} rows"
        return f"{self.label} {str(self.dtype).removeprefix('torch.')}, {kind}" + (", with gradients" if self.backward else "")


def scalings(gpus: bool, quick: bool) -> Iterator[Scaling]:
    """What is measured: the most important first, since later ones are left out when there is no time."""
    if not gpus:
        for dtype in (torch.float32, torch.bfloat16)[: 1 if quick else 2]:
            yield Scaling("8^4", (8,) * 4, 16, True, dtype)
            yield Scaling("8^4", (8,) * 4, 16, False, dtype)
        yield Scaling("8^4", (8,) * 4, 8, True, torch.float32, True)
        return
    for dtype in (torch.float32, torch.bfloat16):
        yield Scaling("64^4", (64,) * 4, 128, False, dtype)
        yield Scaling("64^4", (64,) * 4, 128, True, dtype)
        if dtype == torch.float32:
            yield Scaling("128^3", (128,) * 3, 128, False, dtype)
            yield Scaling("64^4", (64,) * 4, 32, True, dtype, True)
        if not quick:
            yield Scaling("128^4", (128,) * 4, 8, True, dtype)
            yield Scaling("128^4", (128,) * 4, 16, False, dtype)


class Ranks:
    """This rank, and the measurements that all of them share."""

    def __init__(self) -> None:
        self.info = init_process_group(timeout=120)
        self.device, self.size = self.info.device, self.info.world_size
        self.gpus = self.device.type == "cuda"
        self.world = ProcessGrid((self.size, 1))

    def tell(self, text: str) -> None:
        """Print on rank 0."""
        if self.info.rank == 0:
            print(text, flush=True)

    def most(self, value: float) -> float:
        """The largest of all ranks'."""
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.world.group)
        return float(found)

    def wait(self) -> None:
        """For this rank's device, then for all ranks."""
        if self.gpus:
            torch.cuda.synchronize(self.device)
        self.world.barrier()

    def seconds(self, work: Callable[[], Any], alone: bool = False) -> float:
        """Of one call of several in a loop, on the slowest rank; alone: on rank 0 while the others wait."""
        mine = not alone or self.info.rank == 0

        def loop(count: int) -> float:
            self.wait()
            start = time.perf_counter()
            for _ in range(count if mine else 0):
                work()
            if self.gpus:
                torch.cuda.synchronize(self.device)
            return self.most((time.perf_counter() - start) / count)

        loop(2)
        first = loop(2)
        count = max(REPEATS[0], min(REPEATS[1], round(LOOP_SECONDS / max(first, 1e-6))))
        return min(loop(count) for _ in range(2))

    def begun(self, work: Callable[[], Any]) -> float:
        """Seconds until one call returns, while GPUs are still at work; on the slowest rank."""
        found = []
        for _ in range(3):
            self.wait()
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
        return self.most(min(found))


@dataclass
class Made:
    """A product with a known result, as one rank has it: ``x = a v^T`` with a the rows' numbers and v a Kronecker product."""

    x: Tensor
    factors: list[Tensor]
    rows: Tensor  # a, this rank's part
    images: list[Tensor]  # v's vectors times the factors
    columns: slice  # of the result

    def error(self, y: Tensor) -> float:
        """Largest relative error of sampled entries."""
        if y.numel() == 0:
            return 0.0
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(y.shape[0], (SAMPLED_ROWS,), generator=generator).to(y.device)
        columns = torch.randint(y.shape[1], (SAMPLED_COLUMNS,), generator=generator).to(y.device)
        left = columns + self.columns.start
        expected = torch.ones(SAMPLED_COLUMNS, dtype=torch.float64, device=y.device)
        for image in reversed(self.images):
            expected *= image[left % len(image)]
            left //= len(image)
        wanted = self.rows[rows, None] * expected
        return float((y[rows[:, None], columns].double() - wanted).norm() / wanted.norm())


def make(grid: ProcessGrid | None, device: torch.device, rows: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Made:
    """x's block on this rank of a grid, or all of x without one; row by row, since a second x may not fit."""
    generator = torch.Generator().manual_seed(0)
    factors = [(torch.randn(p, p, generator=generator, dtype=torch.float64) / p**0.5).to(dtype).to(device) for p in sizes]
    vectors = [torch.randn(p, generator=generator, dtype=torch.float64).to(device) for p in sizes]
    numbers = torch.randn(rows, generator=generator, dtype=torch.float64).sign() * torch.linspace(1, 2, rows, dtype=torch.float64)
    width = math.prod(sizes)
    mine, columns = (slice(0, rows), slice(0, width)) if grid is None else grid.block((rows, width))
    numbers = numbers[mine].to(device)
    line = kron_range(vectors, columns.start, columns.stop).to(dtype)
    x = torch.empty(len(numbers), line.numel(), dtype=dtype, device=device)
    for row, number in zip(x, numbers, strict=True):
        torch.mul(line, float(number), out=row)
    images = [v @ f.double() for v, f in zip(vectors, factors, strict=True)]
    return Made(x, factors, numbers, images, columns)


def work_of(made: Made, backward: bool, call: Callable[..., Tensor], **options: Any) -> Callable[[], Tensor]:
    """The call that is timed."""
    if not backward:
        return lambda: call(made.x, made.factors, **options)
    leaves = [made.x.requires_grad_(), *[f.requires_grad_() for f in made.factors]]

    def both() -> Tensor:
        y = call(leaves[0], leaves[1:], **options)
        torch.autograd.grad(y, leaves, y.detach())
        return y.detach()

    return both


def multiply_only(chosen: Plan, grid: ProcessGrid, made: Made) -> Callable[[], Any]:
    """A rank's multiplies without exchanges, chunk by chunk, on operands of their shapes."""
    line, position = grid.row, grid.col
    chunks = chosen.chunk_rows(chosen.rows(line))
    width = chosen.problem.columns[0]
    if chosen.by_rows:
        shapes = [(c * (position + 1) // chosen.parts - c * position // chosen.parts, width, made.factors) for c in chunks]
    else:
        widths = [(s.offsets[position + 1] - s.offsets[position], s) for s in chosen.steps if s.multiplies]
        shapes = [(c * w // s.p, s.p, made.factors[s.start : s.stop]) for c in chunks for w, s in widths]
    most = max(m * k for m, k, _ in shapes)
    operand = torch.zeros(most, dtype=made.x.dtype, device=made.x.device)
    return lambda: [fastkron_py.kron_matmul(operand[: m * k].view(m, k), factors) for m, k, factors in shapes if m]


def exchange_only(chosen: Plan, grid: ProcessGrid, made: Made) -> Callable[[], Any]:
    """A rank's exchanges by all-to-all, chunk by chunk, of buffers that are packed already."""
    line, me = grid.row, grid.col
    peers = range(chosen.parts)
    splits = [
        ([leg.size(peer, me) for peer in peers], [leg.size(me, peer) for peer in peers]) for legs in chosen.legs(line) for leg in legs
    ]
    most = max(max(sum(coming), sum(going)) for coming, going in splits)
    received, sent = (torch.zeros(most, dtype=made.x.dtype, device=made.x.device) for _ in range(2))

    def work() -> None:
        for coming, going in splits:
            dist.all_to_all_single(received[: sum(coming)], sent[: sum(going)], coming, going, group=grid.row_group)

    return work


def grids_of(size: int) -> dict[str, tuple[int, int] | None]:
    """The grids that are compared, None for the plan's choice."""
    shapes = dict.fromkeys(s for s in ((size, 1), (size // 2, 2), (2, size // 2), (1, size)) if s[0] * s[1] == size)
    return {"auto": None} | {f"{a} x {b}": (a, b) for a, b in shapes}


def measure(
    ranks: Ranks, scaling: Scaling, alone: float, made_grids: dict[tuple[int, int], ProcessGrid], wrong: list[str]
) -> list[dict[str, Any]]:
    """All grids of one product; ways that come out wrong are named instead of timed."""
    m = scaling.total(ranks.size)
    problem = Problem(m, scaling.sizes, scaling.sizes, scaling.dtype, gradients=scaling.backward)
    found: list[dict[str, Any]] = []
    for name, shape in grids_of(ranks.size).items():
        base = plan(problem, shape, world_size=ranks.size, chunks=None if ranks.gpus else 2, transport=None if ranks.gpus else FALLBACK)
        if base.grid not in made_grids:
            made_grids[base.grid] = ProcessGrid(base.grid)
        grid = made_grids[base.grid]
        again = next((f for f in found if f["shape"] == list(base.grid)), None)
        if again is not None:
            found.append(again | {"grid": name})
            continue
        made = make(grid, ranks.device, m, scaling.sizes, scaling.dtype)
        best: dict[str, Any] = {}
        for how in _variants(problem, base, scaling, ranks):
            work = work_of(made, scaling.backward, kron_matmul, grid=grid, plan=how)
            error = ranks.most(made.error(work()))
            if not error < TOLERANCES[scaling.dtype]:
                wrong.append(f"{scaling.name}, {name}, {_stages(how)}, {how.chunks} chunks, {how.transport}: errs by {error:.1e}")
                ranks.tell(f"wrong: {wrong[-1]}")
                continue
            seconds = ranks.seconds(work)
            row = {
                "grid": name, "shape": list(base.grid), "stages": _stages(how), "chunks": how.chunks, "direct": how.transport == DIRECT,
                "error": error,
                "seconds": seconds, "begun": ranks.begun(work),
                "bytes": how.bytes_total,
                "flops": problem.flops * (3 if scaling.backward else 1) / seconds,
                "efficiency": alone * m / scaling.rows / (seconds * ranks.size) if alone else None,
            }  # fmt: skip
            row["also"] = [
                *best.get("also", []),
                {k: row[k] for k in ("stages", "chunks", "direct", "seconds", "begun")},
            ]
            best = row if not best or seconds < best["seconds"] else best | {"also": row["also"]}
        if not best:
            continue
        if base.parts > 1 and not scaling.backward:
            moves, multiplies = ranks.seconds(exchange_only(base, grid, made)), ranks.seconds(multiply_only(base, grid, made))
            hidden = (moves + multiplies - best["seconds"]) / min(moves, multiplies)
            best |= {"exchanges": moves, "multiplies": multiplies, "hidden": min(1.0, max(0.0, hidden))}
        found.append(best)
        del made, work
        if ranks.gpus:
            torch.cuda.empty_cache()
    return found


def _stages(how: Plan) -> Sequence[int] | str:
    """As results have them."""
    return how.cuts or "rows"


def _variants(problem: Problem, base: Plan, scaling: Scaling, ranks: Ranks) -> list[Plan]:
    """The plan; on GPUs also every other way to send whole rows, and once by stages."""
    if base.parts == 1 or not ranks.gpus or scaling.backward:
        return [base]
    found = [base]
    if base.by_rows:
        other = FALLBACK if base.transport == DIRECT else DIRECT
        found.append(plan(problem, base.grid, transport=other))
        found.append(plan(problem, base.grid, chunks=2 * base.chunks))
    if base.by_rows and not scaling.weak and scaling.label == "64^4":
        found.append(of_stages(problem, base.grid, (2, 2), None, None))
    return found


def large(ranks: Ranks) -> dict[str, Any]:
    """A product whose x and result are several times one GPU's memory, on a grid with exchanges, right on sampled entries."""
    sizes = (128,) * 4 if ranks.gpus else (8,) * 4
    memory = torch.cuda.get_device_properties(ranks.device).total_memory if ranks.gpus else 2 << 20
    row = math.prod(sizes) * 4
    m = int(0.72 * memory / (2 * row)) * ranks.size // 2 * 2
    shape = (ranks.size // 2, 2) if ranks.size > 1 else (1, 1)
    grid = ProcessGrid(shape)
    how = plan(Problem(m, sizes, sizes), shape, chunks=32, transport=FALLBACK)  # with no more buffers than needed
    made = make(grid, ranks.device, m, sizes, torch.float32)
    ranks.wait()
    start = time.perf_counter()
    y = kron_matmul(made.x, made.factors, grid=grid, plan=how)
    if ranks.gpus:
        torch.cuda.synchronize(ranks.device)
    seconds = ranks.most(time.perf_counter() - start)
    error = ranks.most(made.error(y))
    if not error < TOLERANCES[torch.float32]:
        raise ValueError(f"the large product's sampled entries err by {error:.1e}")
    peak = torch.cuda.max_memory_allocated(ranks.device) if ranks.gpus else 0
    return {"m": m, "sizes": sizes, "grid": shape, "bytes": 2 * m * row, "of_one": 2 * m * row / memory, "seconds": seconds,
            "error": error, "peak": ranks.most(peak), "planned_peak": how.peak_memory}  # fmt: skip


def alone_seconds(ranks: Ranks, scaling: Scaling) -> float:
    """One rank's time for the rows that it would have by itself."""
    made = make(None, ranks.device, scaling.rows, scaling.sizes, scaling.dtype) if ranks.info.rank == 0 else None
    work = work_of(made, scaling.backward, fastkron_py.kron_matmul) if made else None
    seconds = ranks.seconds(work or (lambda: None), alone=True)
    del made, work
    if ranks.gpus:
        torch.cuda.empty_cache()
    return seconds


def main(path: str, seconds: float, quick: bool) -> None:
    """Measure as much as there is time for; rank 0 writes."""
    start = time.perf_counter()
    ranks = Ranks()
    results: dict[str, Any] = {"ranks": ranks.size, "device": str(ranks.device.type), "products": [], "left_out": [], "wrong": []}
    made_grids: dict[tuple[int, int], ProcessGrid] = {}
    results["agree"] = ranks.seconds(lambda: [agree(ranks.world, {"call": "benchmark"}, local=(1, 2)) for _ in range(100)]) / 100
    ranks.tell(f"agreement of all ranks: {results['agree'] * 1e6:.1f} us")
    for scaling in scalings(ranks.gpus, quick):
        if ranks.most(time.perf_counter() - start) > seconds:
            results["left_out"].append(scaling.name)
            continue
        with torch.set_grad_enabled(scaling.backward):
            alone = alone_seconds(ranks, scaling)
            found = measure(ranks, scaling, alone, made_grids, results["wrong"])
        results["products"].append({"name": scaling.name, "weak": scaling.weak, "alone": alone, "grids": found})
        for f in found:
            hidden = f", {f['hidden']:.0%} hidden" if "hidden" in f else ""
            ranks.tell(f"{scaling.name}, {f['grid']}: {f['seconds'] * 1e3:.3f} ms, {f['efficiency']:.0%}{hidden}")
        _write(ranks, path, results)
    with torch.no_grad():
        try:
            results["large"] = large(ranks)
        except (torch.OutOfMemoryError, ValueError) as error:  # on every rank
            results["wrong"].append(f"large product: {error}")
    ranks.tell(f"large: {results.get('large', results['wrong'])}")
    results["seconds"] = time.perf_counter() - start
    _write(ranks, path, results)


def _write(ranks: Ranks, path: str, results: dict[str, Any]) -> None:
    if ranks.info.rank == 0:
        Path(path).write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 120.0, "quick" in sys.argv[3:])
