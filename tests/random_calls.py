"""Random products and gradients against float64: any dtypes, batch, strides, scalars, identities. A program that runs for a while, no test.

python tests/random_calls.py --seconds 60 --seed 7 [--device cuda] [--backend triton]

It prints each wrong call with all that repeats it, and exits with 1 if there was one. TRITON_INTERPRET=1 and ``--backend triton`` run the
kernels without a GPU.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastkron_py
from fastkron_py import reference
from fastkron_py.kron import operator
from fastkron_py.runtime.backend import backend_of_call

# Relative to the same expression of absolute values: what sums of random terms may round by.
TOLERANCES = {
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 4e-6,
    torch.float64: 1e-14,
    torch.complex64: 6e-6,
    torch.complex128: 1.5e-14,
}
MOST = {False: 3000, True: 600}  # elements of a row, of small calls too
SIZES = {
    True: (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 64, 65, 100, 128, 150, 300),
    False: (1, 2, 3, 4, 5, 8, 9, 16),
}
ROWS = {False: (0, 1, 2, 3, 5, 8, 16, 17, 33, 40, 65, 100, 257, 1000), True: (1, 2, 5, 16, 33)}

MANY = (40,)  # a batch, of small matrices


class Call(NamedTuple):
    """A product: tensors, or integers for identities among the factors, and options."""

    x: Tensor
    factors: list[Any]
    z: Tensor | None
    alpha: complex
    beta: float
    left: bool

    def run(self) -> Tensor:
        """By the library."""
        options: dict[str, Any] = {"alpha": self.alpha, "beta": self.beta, "z": self.z}
        if any([f.dtype != self.x.dtype for f in self.tensors]):  # float32 beside a half type, as adapters call the operator
            scalars = (float(self.alpha.real), self.beta, None, backend_of_call(), self.left)
            made: Tensor = operator.kron_matmul(self.x, self.factors, self.z if self.beta else None, *scalars)
            return made
        if self.left:
            return fastkron_py.kron_matmul_left(self.factors, self.x, **options)
        return fastkron_py.kron_matmul(self.x, self.factors, **options)

    def dense(self) -> Tensor:
        """By the dense matrix."""
        dtype, device = self.x.dtype, self.x.device
        matrices = [torch.eye(f, dtype=dtype, device=device) if isinstance(f, int) else f for f in self.factors]
        batch = torch.broadcast_shapes(*[m.shape[:-2] for m in matrices])
        k = reference.kron_dense([m.expand(*batch, *m.shape[-2:]) for m in matrices])
        y = self.alpha * (k @ self.x if self.left else self.x @ k)
        return y + self.beta * self.z if self.z is not None and self.beta else y

    def of(self, tensors: list[Tensor], alpha: complex, beta: float) -> Call:
        """The same of other tensors and scalars."""
        given = iter(tensors)
        x, factors = next(given), [f if isinstance(f, int) else next(given) for f in self.factors]
        return Call(x, factors, None if self.z is None else next(given), alpha, beta, self.left)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [self.x, *[f for f in self.factors if isinstance(f, Tensor)], *([] if self.z is None else [self.z])]

    def __str__(self) -> str:
        layouts = [f if isinstance(f, int) else (tuple(f.shape), f.stride(), f.requires_grad) for f in [*self.factors, *self.tensors[:1]]]
        z = None if self.z is None else (tuple(self.z.shape), self.z.stride())
        return f"{self.x.dtype} factors and x {layouts} z {z} alpha {self.alpha} beta {self.beta} left {self.left}"


class Drawer:
    """Draws calls."""

    def __init__(self, seed: int, device: str, small: bool) -> None:
        self.random, self.device, self.small = random.Random(seed), device, small

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Random numbers with strides of some kind; NaN lies in the gaps."""
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        t = torch.randn(shape, dtype=wide).to(dtype).to(self.device)
        kind = self.random.choice(["plain"] * 5 + ["permuted", "permuted", "part", "part", "every other", "expanded", "view"])
        if kind == "permuted":
            order = self.random.sample(range(t.ndim), t.ndim)
            return t.permute(order).contiguous().permute([order.index(i) for i in range(t.ndim)])
        if kind in ("part", "every other"):
            step = 2 if kind == "every other" else 1
            whole = t.new_full([step * (n + self.random.choice([0, 1, 3])) for n in shape], math.nan)
            part = whole[tuple([slice(None, step * n, step) for n in shape])]
            return part.copy_(t)
        if kind == "expanded" and shape[0] > 1:
            return t[:1].expand(shape)
        if kind == "view" and dtype.is_complex:
            return self.random.choice([t.conj(), torch._neg_view(t)])
        return t

    def call(self) -> Call:
        """A call, of tensors that may want gradients."""
        choose, chance = self.random.choice, self.random.random
        dtype, left, count = choose([*TOLERANCES, torch.float32, torch.float64]), chance() < 0.4, choose([1, 1, 2, 2, 2, 3, 3, 4, 5])
        shapes: list[tuple[int, int]] = []
        while not shapes or max([math.prod([s[side] for s in shapes]) for side in (0, 1)]) > MOST[self.small]:
            sizes = [(choose(SIZES[count < 3]), choose(SIZES[count < 3])) for _ in range(count)]
            shapes = [(p, q if chance() < 0.5 else p) for p, q in sizes]
        is_mixed = dtype.itemsize == 2 and chance() < 0.3  # factors of float32 too
        identities = [chance() < 0.15 and not is_mixed for _ in shapes]
        shapes = [(p, p) if is_one else (p, q) for (p, q), is_one in zip(shapes, identities, strict=True)]
        inner, outer = (math.prod([s[side] for s in shapes]) for side in ((1, 0) if left else (0, 1)))
        batch = choose([()] * 6 + [(2,), (3,), (1,), (2, 1), (0,), MANY])
        of_factors = choose([(), (), batch, tuple([choose([1, b]) for b in batch])]) if batch != MANY else ()
        dtypes = [choose([dtype, torch.float32]) if is_mixed else dtype for _ in shapes]
        factors = [s[0] if one else self.tensor((*of_factors, *s), t) for s, one, t in zip(shapes, identities, dtypes, strict=True)]
        rows = choose(ROWS[self.small or batch == MANY])
        x = self.tensor((*batch, inner, rows) if left else (*batch, rows, inner), dtype)
        shape = (*torch.broadcast_shapes(batch, () if all(identities) else of_factors), *((outer, rows) if left else (rows, outer)))
        alpha = choose([1.0, 1.0, 0.5, -2, 0.0, 1 + 2j if dtype.is_complex else 3.0])
        beta = choose([0.0, 0.0, 1.0, -0.5])
        z = self.tensor(choose([shape, shape, shape[-1:]]), dtype) if beta or chance() < 0.1 else None
        made = Call(x, factors, z, alpha, beta, left)
        return made.of([t.detach().requires_grad_(chance() < 0.5) for t in made.tensors], alpha, beta)


def wide_of(call: Call, is_size: bool) -> Call:
    """The call in float64 or complex128; or that of absolute values, which all its rounding is relative to."""
    dtype = torch.complex128 if call.x.dtype.is_complex else torch.float64
    found = [t.detach().resolve_conj().resolve_neg().to(dtype) for t in call.tensors]
    found = [(t.abs() if is_size else t).requires_grad_(of.requires_grad) for t, of in zip(found, call.tensors, strict=True)]
    return call.of(found, abs(call.alpha), abs(call.beta)) if is_size else call.of(found, call.alpha, call.beta)


def worst(found: Tensor, true: Tensor, size: Tensor, dtype: torch.dtype) -> float:
    """The largest error, in tolerances of x's dtype."""
    if found.shape != true.shape:
        return math.inf
    if not true.numel():
        return 0.0
    size = size.abs()
    limit = TOLERANCES[dtype] * (size + size.max() / 20) + (1e-6 if dtype == torch.float16 else 1e-30)
    return float(((found.to(true.dtype) - true).abs() / limit).nan_to_num(math.inf).max())


def errors_of(call: Call, drawer: Drawer) -> dict[str, float]:
    """Of the result and of each gradient, in tolerances."""
    true, size = wide_of(call, False), wide_of(call, True)
    y_true, y_size = true.dense(), size.dense()
    if call.x.dtype == torch.float16 and y_size.numel() and float(y_size.detach().abs().max()) > 3e4:
        return {}
    y = call.run()
    errors = {"result": math.inf if y.dtype != call.x.dtype else worst(y.detach(), y_true.detach(), y_size.detach(), y.dtype)}
    if not y.requires_grad:
        return errors
    dy = drawer.tensor(tuple(y.shape), y.dtype)
    gradients = []
    for made, result, d in ((call, y, dy), (true, y_true, dy.to(y_true.dtype)), (size, y_size, dy.abs().to(y_size.dtype))):
        leaves = [t for t in made.tensors if t.requires_grad]
        gradients.append(torch.autograd.grad(result, leaves, d, allow_unused=True))
    for i, (found, exact, of) in enumerate(zip(*gradients, strict=True)):
        if found is None or exact is None:  # z beside beta 0
            errors[f"gradient {i}"] = 0.0 if found is exact or not bool((found if exact is None else exact).any()) else math.inf
        else:
            errors[f"gradient {i}"] = worst(found, exact, of * (2 if y.dtype.itemsize == 2 else 1), y.dtype)
    return errors


def main() -> int:
    """Run for a while; 1 if a call was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", choices=["auto", "triton", "torch"], default="auto")
    options = parser.parse_args()
    fastkron_py.set_backend(options.backend)
    torch.manual_seed(options.seed)
    drawer = Drawer(options.seed, options.device, options.backend == "triton" and options.device == "cpu")
    end, count, wrong = time.monotonic() + options.seconds, 0, 0
    while time.monotonic() < end:
        call, count = drawer.call(), count + 1
        try:
            bad = {name: error for name, error in errors_of(call, drawer).items() if not error <= 1}
        except Exception as error:
            bad = {f"{type(error).__name__}: {error}": math.inf}
        if bad:
            wrong += 1
            print(f"call {count}: {bad}\n  {call}", flush=True)
    print(f"{count} calls, {wrong} wrong, seed {options.seed}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
