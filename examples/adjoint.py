"""Gradients of a quantum circuit whose backward pass keeps one state: gates are unitary, so that their inverses bring the others back.

Autograd keeps the state before every step, which are gigabytes for 20 qubits. The adjoint method (Jones and Gacon, "Efficient calculation
of gradients in classical simulations of variational quantum algorithms", 2020) keeps the last one. Its backward pass takes each step back,
and differentiates it alone. Layers have a rotation on each qubit, and a gate on each of the pairs that the qubits are dealt into at random.

Usage: python examples/adjoint.py [--qubits 16] [--layers 10] [--device cpu|cuda].
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py import mode_matmul

Step = Sequence[Any]  # the dimensions of gates that act at once: qubits, or pairs of qubits


class Circuit(NamedTuple):
    """Steps of gates on n qubits, and the angles of a gate each."""

    qubits: int
    steps: list[Step]
    angles: list[Tensor]  # [gates] of each step

    @classmethod
    def drawn(cls, qubits: int, layers: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Circuit:
        """Rotations on each qubit, then gates on random pairs, in each layer."""
        generator = torch.Generator().manual_seed(0)
        steps: list[Step] = []
        for _ in range(layers):
            order = torch.randperm(qubits, generator=generator).tolist()
            steps += [range(qubits), *[[pair] for pair in zip(order[::2], order[1::2], strict=False)]]
        angles = [math.pi * torch.rand(len(step), generator=generator, dtype=dtype) for step in steps]
        return cls(qubits, steps, [a.to(device).requires_grad_() for a in angles])

    def gates(self) -> list[list[Tensor]]:
        """The transposed matrices: rotations about an axis between x and y, and about x of both qubits of a pair."""
        return [list(rotations(a, 2 if isinstance(step, range) else 4)) for step, a in zip(self.steps, self.angles, strict=True)]

    def start(self) -> Tensor:
        """The state of n zeros."""
        first = self.angles[0]
        state = torch.zeros([2] * self.qubits, dtype=first.dtype.to_complex(), device=first.device)
        state[(0,) * self.qubits] = 1
        return state


def rotations(angles: Tensor, size: int) -> Tensor:
    """``cos(a) I - i sin(a) P`` for each angle, transposed, with ``P = (X + Y) / sqrt(2)``, or ``X (x) X`` for size 4."""
    half = math.sqrt(0.5)
    weights = torch.tensor([1.0] * 4 if size == 4 else [half + half * 1j, half - half * 1j], dtype=torch.complex128)
    weights = weights.to(angles.device, angles.dtype.to_complex())
    a = angles[:, None, None]
    return a.cos() * torch.eye(size, dtype=weights.dtype, device=a.device) - 1j * a.sin() * weights.diag().flip(1)


class Adjoint(torch.autograd.Function):
    """The state after all steps, of the state before, the steps, and their gates one after the other."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, steps: Sequence[Step], *gates: Tensor) -> Tensor:
        """Apply the steps and keep their result alone."""
        rest = iter(gates)
        for step in steps:
            state = mode_matmul(state, {k: next(rest) for k in step})
        ctx.save_for_backward(state, *gates)
        ctx.steps = steps
        return state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Take each step back, and differentiate it alone."""
        state, *gates = ctx.saved_tensors
        (gradient,), found = gradients, list[Tensor]()
        for step in reversed(ctx.steps):
            own, gates = gates[-len(step) :], gates[: -len(step)]
            state = mode_matmul(state, {k: g.mH for k, g in zip(step, own, strict=True)})
            leaves = [t.detach().requires_grad_() for t in (state, *own)]
            with torch.enable_grad():
                after = mode_matmul(leaves[0], dict(zip(step, leaves[1:], strict=True)))
            gradient, *of_gates = torch.autograd.grad(after, leaves, gradient)
            found = [*of_gates, *found]
        return gradient, None, *found


def by_adjoint(circuit: Circuit) -> Tensor:
    """The circuit's state, one state kept."""
    state: Tensor = Adjoint.apply(circuit.start(), circuit.steps, *[g for own in circuit.gates() for g in own])  # type: ignore[no-untyped-call]
    return state


def by_autograd(circuit: Circuit) -> Tensor:
    """The same, with the state before every step kept."""
    state = circuit.start()
    for step, own in zip(circuit.steps, circuit.gates(), strict=True):
        state = mode_matmul(state, dict(zip(step, own, strict=True)))
    return state


def by_torch(circuit: Circuit) -> Tensor:
    """Gate by gate in plain torch: permute the gate's qubits to the end, and multiply."""
    state, n = circuit.start(), circuit.qubits
    for step, own in zip(circuit.steps, circuit.gates(), strict=True):
        for k, gate in zip(step, own, strict=True):
            dims = list(k) if isinstance(k, tuple) else [k]
            order = [*[d for d in range(n) if d not in dims], *dims]
            rows = state.permute(order).reshape(-1, gate.shape[0])
            state = (rows @ gate).view([2] * n).permute([order.index(d) for d in range(n)])
    return state


WAYS: dict[str, Callable[[Circuit], Tensor]] = {
    "mode_matmul, one state kept": by_adjoint,
    "mode_matmul, autograd": by_autograd,
    "torch, autograd": by_torch,
}


def energy(state: Tensor) -> Tensor:
    """The mean of Z on each qubit, weighted."""
    probability, n = state.abs().square(), state.ndim
    of_qubits = [probability.sum([d for d in range(n) if d != q]) for q in range(n)]
    total: Tensor = sum(((p[0] - p[1]) / (q + 1) for q, p in enumerate(of_qubits)), start=probability.new_zeros(()))
    return total


class Result(NamedTuple):
    """Of one way: its energy and gradients, seconds of a gradient, and the memory that it took."""

    energy: float
    gradients: list[Tensor]
    seconds: float
    megabytes: float


def measure(name: str, qubits: int, layers: int, device: str) -> Result:
    """The second of two gradients, in a process of its own, which tells the memory."""
    torch.set_num_threads(1)
    small = Circuit.drawn(4, 2, device=device)
    energy(WAYS[name](small)).backward()  # type: ignore[no-untyped-call]
    circuit = Circuit.drawn(qubits, layers, device=device)
    before = _megabytes(device)
    for _ in range(2):
        begin = time.perf_counter()
        value = energy(WAYS[name](circuit))
        gradients = torch.autograd.grad(value, circuit.angles)
        found = float(value.detach())  # waits for a GPU
        seconds = time.perf_counter() - begin
    return Result(found, [g.cpu() for g in gradients], seconds, _megabytes(device) - before)


def _megabytes(device: str) -> float:
    """The largest memory so far."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Print seconds and memory of each way, and how far gradients are from those of torch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--qubits", type=int, default=16)
    parser.add_argument("--layers", type=int, default=10)
    options = parser.parse_args()
    count = sum(map(len, Circuit.drawn(options.qubits, options.layers).steps))
    print(f"{options.qubits} qubits, {options.layers} layers, {count} gates; a state takes {2**options.qubits * 8 / 2**20:.2f} MiB")
    results = {}
    for name in WAYS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            results[name] = pool.submit(measure, name, options.qubits, options.layers, options.device).result()
    expected = torch.cat(results["torch, autograd"].gradients)
    for name, r in results.items():
        error = float((torch.cat(r.gradients) - expected).norm() / expected.norm())
        print(f"{name:>28}: {r.seconds:8.3f} s, {r.megabytes:7.0f} MiB, energy {r.energy:.6f}, gradients apart by {error:.1e}")


if __name__ == "__main__":
    main()
