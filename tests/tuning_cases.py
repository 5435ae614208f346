"""Problems and choices of the tuning tests."""

from __future__ import annotations

import math

import torch
import triton

from fastkron_py import reference
from fastkron_py.kron.plan.steps import Launch, Step
from fastkron_py.kron.tune.table import Choice, Entry, Problem

FACTORS = ((3, 5), (4, 2))

# Where the tests run, and the name of that in tables.
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HERE = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "interpreter"


def version() -> str:
    return ".".join(triton.__version__.split(".")[:2])


def problem(factors=FACTORS, rows=4, columns=1, dtype="float32", device=HERE, batched=False, contiguous=True):
    return Problem(device, version(), dtype, "highest", tuple(factors), rows, columns, batched, contiguous)


def launch(steps, family="tile", factors=FACTORS):
    ps, qs = zip(*factors, strict=True)
    return Launch(tuple([Step(i, j, math.prod(ps[i:j]), math.prod(qs[i:j])) for i, j in steps]), family)


def single(start, stop=None):
    return launch(((start, start + 1 if stop is None else stop),))


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


def launches_by(chosen, x, factors, precision="highest"):
    """The launches of a product of canonical operands by a choice, or by the closed form for None."""
    from fastkron_py.kron.forward import launches_of, multiply_problem

    return launches_of(multiply_problem(x, factors, x.device, precision), chosen)


def carry_out(launches, x, factors):
    """Run launches one after the other, as a program."""
    from fastkron_py.kron.canonical import PLAIN
    from fastkron_py.kron.problem import add_launch
    from fastkron_py.runtime.builder import Builder

    build = Builder((x, *factors))
    y, *matrices = build.inputs
    for launch in launches:
        y = add_launch(build, launch, y, matrices, None, build.empty(launch.result_shape, x.dtype), PLAIN)
    return build.program([y])((x, *factors))[0]


def noted_launches(monkeypatch):
    """The launches of every multiply that is built from now on, in order; of a cached call none."""
    from fastkron_py.kron import forward

    launches_of, noted = forward.launches_of, []

    def noting(problem, chosen):
        noted.append(launches_of(problem, chosen))
        return noted[-1]

    monkeypatch.setattr(forward, "launches_of", noting)
    return noted


def kernels(launches):
    """Names of the kernels that are launched by preference."""
    return ["single" if "sliced" in launch.launcher.configs[0].kernel.__name__ else "chain" for launch in launches]
