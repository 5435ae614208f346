"""Problems and choices of the tuning tests."""

from __future__ import annotations

import math

import torch
import triton

from fastkron_py import reference
from fastkron_py.kron.plan.launch import ChainConfig, SingleConfig
from fastkron_py.kron.tune.choice import Choice, ChosenLaunch, Problem
from fastkron_py.kron.tune.entry import Entry

SINGLE = SingleConfig(16, 16, 16, 4, 1, 1)
CHAIN = ChainConfig(16, 4, 1, 1)


# Where the tests run, and the name of that in tables.
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HERE = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "interpreter"


def version() -> str:
    return ".".join(triton.__version__.split(".")[:2])


def problem(factors=((3, 5), (4, 2)), rows=4, columns=1, dtype="float32", device=HERE, batched=False, contiguous=True):
    return Problem("multiply", device, version(), dtype, "highest", tuple(factors), rows, columns, batched, contiguous)


def single(start, stop=None, config=SINGLE):
    return ChosenLaunch(((start, start + 1 if stop is None else stop),), "single", config)


def choice(*launches):
    return Choice(launches)


# Two launches of one step each, where the closed form multiplies both factors out in one.
UNMERGED = choice(single(0), single(1))


def entry(p=None, c=UNMERGED):
    return Entry(problem() if p is None else p, c, 10.0, 5.0)


def operands(p):
    """Random x and factors of a problem, in canonical form."""
    width, groups = math.prod(a for a, _ in p.factors), 2 if p.batched else 1
    dtype = getattr(torch, p.dtype)
    x = torch.randn(groups, p.rows // groups, width, p.columns, device=DEVICE, dtype=dtype)
    return x, [torch.randn(groups, a, b, device=DEVICE, dtype=dtype) for a, b in p.factors]


def expected(x, factors):
    """The product of canonical operands in float64."""
    return reference.kron_matmul(x.double().movedim(2, 3), [f.double().unsqueeze(1) for f in factors]).movedim(3, 2)


def kind(x, factors, precision="highest"):
    from fastkron_py.kron import triton_backend

    return triton_backend.kind_of(x, factors, 0, len(factors), tuple(f.shape[1] for f in factors), precision, False)


def carry_out(program, x, factors):
    """Run launches one after the other."""
    from fastkron_py.runtime.program import bits

    for prepared in program:
        x = prepared.run(x, factors, None, bits(1.0), 0)
    return x


def kernels(program):
    """Names of the kernels that a program launches by preference, with their first block size."""
    return [("single" if "sliced" in p.configs[0].kernel.__name__ else "chain", p.configs[0].arguments["BLOCK_S"]) for p in program]
