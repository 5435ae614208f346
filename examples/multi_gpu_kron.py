"""A Kronecker product over many ranks: TFLOP/s, exchanged volume, and how much of the exchange is hidden.

x is a sum of two matrices whose rows are Kronecker products of vectors, so that every rank knows what its block of
the result has to be, however large the product is. Usage, with GPUs or with CPU ranks alone:

    torchrun --nproc-per-node 8 examples/multi_gpu_kron.py --factors 64 64 64 64 --rows 1024
    mpirun -n 4 python examples/multi_gpu_kron.py --grid 2x2 --dtype float64
    python examples/multi_gpu_kron.py
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from fastkron_py import kron_matmul as local_kron_matmul
from fastkron_py.distributed import Plan, Problem, ProcessGrid, init_process_group, kron_matmul, plan
from fastkron_py.kron.operators.algebra import kron_range

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", type=int, nargs="+", help="sizes of the square factors (GPUs: 64 64 64 64; CPUs: 16 16 16 16)")
    parser.add_argument("--rows", type=int, help="rows of x on all ranks together (GPUs: 128 a rank; CPUs: 16 a rank)")
    parser.add_argument("--grid", default="auto", help="GMxGK, or auto")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--backward", action="store_true", help="time forward and backward pass together")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--backend", choices=["nccl", "gloo"])
    return parser.parse_args()


def rank_one_rows(grid: ProcessGrid, rows: int, vectors: list[torch.Tensor], seed: int) -> torch.Tensor:
    """This rank's block of ``c v^T`` with a random column c ``[rows]`` and v the Kronecker product of vectors."""
    column = torch.randn(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mine, columns = grid.block((rows, math.prod(len(v) for v in vectors)))
    return column[mine, None].to(grid.device) * kron_range([v.to(grid.device) for v in vectors], columns.start, columns.stop)


def seconds(work: Callable[[], object], grid: ProcessGrid, repeat: int) -> float:
    """Median of several runs that all ranks begin together, of the slowest rank."""
    times = []
    for _ in range(repeat + 1):
        grid.barrier()
        if grid.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if grid.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[1:], device=grid.device)  # the first compiles
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=grid.group)
    return float(slowest.median())


def multiply_only(chosen: Plan, grid: ProcessGrid, factors: list[torch.Tensor], rows: int) -> Callable[[], object]:
    """The multiplies of all stages on this rank, on operands of their shapes, without exchanges."""
    operands = []
    if chosen.by_rows:  # ranks take whole rows for the product, and give them back
        mine = rows * (grid.col + 1) // grid.shape[1] - rows * grid.col // grid.shape[1]
        operands.append((mine, math.prod(chosen.problem.ps), factors))
    else:
        for stage in (step for step in chosen.steps if step.multiplies):
            slices = (stage.offsets[grid.col + 1] - stage.offsets[grid.col]) // stage.p
            operands.append((rows * slices, stage.p, factors[stage.start : stage.stop]))
    work = [(torch.randn(m, k, device=grid.device).to(factors[0].dtype), some) for m, k, some in operands]
    return lambda: [local_kron_matmul(operand, some) for operand, some in work]


def exchange_only(chosen: Plan, grid: ProcessGrid, dtype: torch.dtype) -> Callable[[], object]:
    """All exchanges of this rank, in one chunk each, of buffers that are packed already."""
    me, peers = grid.col, range(grid.shape[1])
    buffers = []
    for legs in chosen.legs(grid.row):
        outgoing = [sum(leg.size(me, peer) for leg in legs) for peer in peers]
        arriving = [sum(leg.size(peer, me) for leg in legs) for peer in peers]
        buffers.append(
            (torch.zeros(sum(arriving), dtype=dtype, device=grid.device), torch.zeros(sum(outgoing), dtype=dtype, device=grid.device))
        )
        buffers[-1] += (arriving, outgoing)  # type: ignore[assignment]

    def work() -> None:
        for received, sent, arriving, outgoing in buffers:  # type: ignore[misc]
            dist.all_to_all_single(received, sent, arriving, outgoing, group=grid.row_group)

    return work


def main() -> None:
    """Plan, multiply, check, time."""
    options = arguments()
    info = init_process_group(options.backend)
    gpus = info.device.type == "cuda"
    sizes = tuple(options.factors or ((64,) * 4 if gpus else (16,) * 4))
    rows = options.rows or (128 if gpus else 16) * info.world_size
    dtype = getattr(torch, options.dtype)
    problem = Problem(rows, sizes, sizes, dtype, gradients=options.backward)
    wanted = None if options.grid == "auto" else tuple(int(n) for n in options.grid.split("x"))
    # On CPUs multiplies and exchanges share the cores: chunks would only make them smaller.
    chosen = plan(problem, wanted, world_size=info.world_size, chunks=None if gpus else 1)
    grid = ProcessGrid(chosen.grid)

    generator = torch.Generator().manual_seed(0)
    factors = [(torch.randn(p, p, generator=generator, dtype=torch.float64) / p**0.5).to(grid.device, dtype) for p in sizes]
    vectors = [[torch.randn(p, generator=generator, dtype=torch.float64) for p in sizes] for _ in range(2)]
    x = torch.stack([rank_one_rows(grid, rows, v, seed) for seed, v in enumerate(vectors)]).sum(0).to(dtype)

    if options.backward:
        for t in (x, *factors):
            t.requires_grad_()

    def step() -> torch.Tensor:
        for t in (x, *factors):
            t.grad = None
        y = kron_matmul(x, factors, grid=grid, plan=chosen)
        if options.backward:
            y.sum().backward()
        return y.detach()

    images = [[v.to(grid.device) @ f.detach().double() for v, f in zip(vs, factors, strict=True)] for vs in vectors]
    expected = torch.stack([rank_one_rows(grid, rows, v, seed) for seed, v in enumerate(images)]).sum(0)
    errors = torch.stack([(step().double() - expected).square().sum(), expected.square().sum()])
    dist.all_reduce(errors, group=grid.group)
    error = float((errors[0] / errors[1]).sqrt())
    if not error < TOLERANCE[dtype]:
        raise ValueError(f"the result differs from the expected one by {error:.1e}, more than {TOLERANCE[dtype]:.0e}")

    total = seconds(step, grid, options.repeat)
    flops = problem.flops * (3 if options.backward else 1)
    lines = [str(chosen), "", f"relative error:    {error:.1e}"]
    lines.append(
        f"measured:          {total * 1e3:.3g} ms, {flops / total / 1e12:.3g} TFLOP/s on {info.world_size} {info.device.type} ranks"
    )
    legs = chosen.legs(grid.row)
    if legs and not options.backward:
        alone = seconds(multiply_only(chosen, grid, factors, x.shape[0]), grid, options.repeat)
        moves = seconds(exchange_only(chosen, grid, dtype), grid, options.repeat)
        hidden = min(1.0, max(0.0, (alone + moves - total) / min(alone, moves)))
        lines.append(f"exchanged:         {chosen.bytes_total / 1e6:.4g} MB by all ranks in {len(legs)} exchanges")
        lines.append(f"multiplies alone:  {alone * 1e3:.3g} ms; exchanges alone: {moves * 1e3:.3g} ms")
        lines.append(f"hidden:            {100 * hidden:.0f} % of the shorter of the two")
    if info.rank == 0:
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
