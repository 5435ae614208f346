"""Problems in canonical form, which the Triton launchers take, and their dense product in float64."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from fastkron_py import reference
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.launch import Launcher
from fastkron_py.runtime.precision import resolved
from fastkron_py.runtime.program import Program, Scalar, bits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


def rounding_steps(dtype: torch.dtype, count: int) -> int:
    """Roundings of a result after count factors.

    Each factor may be rounded when neighbours are multiplied out and each intermediate once more; the
    interpreter truncates to bfloat16, which errs twice as much as rounding does.
    """
    interpreted = not torch.cuda.is_available()
    return 2 * count * (2 if dtype == torch.bfloat16 and interpreted else 1)


def in_double(t):
    """In float64, or complex128."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def problem(dtype, device, groups, rows, ps, qs, columns):
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(groups, rows, math.prod(ps), columns, dtype=wide).to(dtype)
    factors = [torch.randn(groups, p, q, dtype=wide).to(dtype) for p, q in zip(ps, qs, strict=True)]
    return x.to(device), [f.to(device) for f in factors]


LARGEST = 1 << 20  # elements of a matrix that is built: 8 MB; those of `test_row_pair` would have 2 GB


def by_factors(x, factors):
    """Canonical product in float64, one factor after the other, which takes no more memory than x and the results."""
    return reference.kron_matmul(in_double(x).mT, [in_double(f).unsqueeze(1) for f in factors]).mT


def dense(x, factors):
    """Canonical product in float64: [B, L, K, R] with [B, K, N], which is built where it is small; else one factor after the other."""
    if math.prod(math.prod(f.shape[1:]) for f in factors) > LARGEST:
        return by_factors(x, factors)
    product = reference.kron_dense([in_double(f) for f in factors])
    return torch.einsum("blkr,bkn->blnr", in_double(x), product)


def multiply_program(x, factors, z=None, scaled=False, precision=None, epilogue="axpby") -> Program:
    """Of x, the factors, and z if there is one; it is run with alpha, if it scales, and beta, if there is a z."""
    from fastkron_py.kron.canonical import Scale
    from fastkron_py.kron.forward import add_multiply
    from fastkron_py.kron.kernels import epilogues  # imports Triton, which reads TRITON_INTERPRET

    build = Builder([x, *factors, z])
    x, *factors, z = build.inputs
    scale = Scale(Scalar(0) if scaled else bits(1.0), bits(0.0) if z is None else Scalar(1))
    return build.program([add_multiply(build, x, factors, resolved(precision), scale, z, epilogue=getattr(epilogues, epilogue.upper()))])


def multiply(x, factors, z=None, alpha=1.0, beta=0.0, precision=None, epilogue="axpby"):
    """Build that program, and run it."""
    program = multiply_program(x, factors, z, alpha != 1, precision, epilogue)
    (y,) = program([x, *factors] if z is None else [x, *factors, z], (alpha, beta))
    return y


def backward_program(dy, x, factors, scaled=False, needs=None, shared=None) -> Program:
    """Of dy, x and the factors, to the gradients that are needed (of x and each factor); run with alpha, if it scales."""
    from fastkron_py.kron.canonical import Scale
    from fastkron_py.kron.gradients import add_backward  # as above

    needs = [True] * (1 + len(factors)) if needs is None else needs
    build = Builder([dy, x, *factors], shared)
    dy, x, *factors = build.inputs
    dx, dfs = add_backward(build, dy, x, factors, needs, "highest", Scale(Scalar(0) if scaled else bits(1.0)), x.dtype)
    assert [t is not None for t in (dx, *dfs)] == list(needs)
    return build.program([t for t in (dx, *dfs) if t is not None])


def backward(dy, x, factors, alpha=1.0, needs=None):
    """Build that program, and run it: dx and the factors' gradients, None for those that are not needed."""
    needs = [True] * (1 + len(factors)) if needs is None else needs
    found = iter(backward_program(dy, x, factors, alpha != 1, needs)([dy, x, *factors], (alpha,)))
    dx, *dfs = [next(found) if need else None for need in needs]
    return dx, dfs


CASES = {
    "one step": (1, 5, (31,), (17,), 1),
    "one step, loops over P and Q": (1, 3, (130,), (200,), 1),
    "merged twos": (1, 3, (2,) * 5, (2,) * 5, 1),
    "chain of two": (1, 4, (16, 32), (32, 16), 1),
    "chain of three": (1, 2, (16, 8, 16), (16, 8, 16), 1),
    "chain, padded digits": (1, 7, (11, 13), (13, 11), 1),
    "many rows": (1, 700, (3, 5), (5, 3), 1),
    "left form": (1, 2, (6, 7), (7, 6), 5),
    "left form, long": (1, 1, (5, 9, 11), (3, 9, 13), 33),
    "batched factors": (3, 2, (9, 4), (4, 9), 1),
    "batched factors, left": (2, 1, (9, 4), (4, 9), 6),
    "shrinking first": (1, 3, (40, 3), (2, 50), 1),
    "widths of one": (1, 4, (1, 5, 1), (1, 1, 3), 1),
}


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda t: t[:, :1].expand(t.shape),
    "every other": lambda t: t.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, ::2, ::2],
    "reversed": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "offset": lambda t: torch.nn.functional.pad(t, (1, 2, 3, 1))[:, :, 3:-1, 1:-2],
}
"""Canonical tensors of the same values (expanded: of the first row's) that lie differently in memory."""


def expected_gradients(dy, x, factors, alpha=1.0):
    """dx and each dF_i of ``alpha * x (F1 (x) ... (x) FN)``, in float64."""
    inputs = [in_double(t).requires_grad_() for t in (x, *factors)]
    return torch.autograd.grad(alpha * dense(inputs[0], inputs[1:]), inputs, in_double(dy))


def force_products(monkeypatch, algorithm: str) -> None:
    """Multiply by one algorithm from now on: "looped", "wgmma" where it can, "matmul" or "copying"."""
    from types import SimpleNamespace

    from fastkron_py.kron import forward, planner  # as above
    from fastkron_py.kron.families import torch_products, wgmma

    names = {"looped": ("tile",), "wgmma": ("wgmma", "tile", "narrow")}.get(algorithm, ("torch_products",))
    monkeypatch.setattr(forward, "families_in_force", SimpleNamespace(get=lambda: names))
    planner.plan.cache_clear()
    if algorithm == "wgmma":
        monkeypatch.setattr(wgmma, "quantities", lambda mode: defaultdict(float, streamed=1e-12))  # no time
    elif names == (torch_products.name,):
        monkeypatch.setattr(torch_products, "multiply_times", lambda mode: {algorithm: 1.0})


def force_gradients(monkeypatch, algorithm: str) -> None:
    """Gradients of large factors by one algorithm from now on: "looped", "wgmma", "matmul" or "copying"."""
    from fastkron_py.kron import gradients  # as above

    prices, bids = f"{'tile_factor' if algorithm == 'looped' else algorithm}_gradients", gradients.bids

    def forced(problem):
        found = bids(problem)
        return [bid for bid in found if bid.prices == prices] or found

    monkeypatch.setattr(gradients, "bids", forced)


def watch_kernels(monkeypatch) -> list[str]:
    """The names of the kernels that launchers are made for from now on."""
    taken: list[str] = []
    make = Launcher.__init__

    def watched(self, configs):
        make(self, configs)
        taken.append(configs[0].kernel.__name__)

    monkeypatch.setattr(Launcher, "__init__", watched)
    CACHE.forget()
    return taken
