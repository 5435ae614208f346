"""Gates on the qubits of a quantum state: one on each, one alone, wherever its qubit lies, and gates on pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastkron_py
from benchmarks.kron.problems import TOLERANCES
from benchmarks.registry import Benchmark, Case, Contender, register

QUBITS = 24
FLOPS = 8  # of a complex product and a sum
Place = int | tuple[int, int]  # a qubit, or two


@dataclass(frozen=True)
class Circuit:
    """A state ``[2] * n`` and unitary gates by qubit, ``[2, 2]``, or by pair of qubits, ``[4, 4]``."""

    state: Tensor
    gates: dict[Place, Tensor]


def _inputs(parameters: Mapping[str, Any], device: torch.device) -> Circuit:
    generator, dtype = torch.Generator(device=device).manual_seed(0), getattr(torch, parameters["dtype"])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.complex128)

    gates = {place: torch.linalg.qr(draw(*[_size(place)] * 2)).Q.to(dtype) for place in parameters["places"]}
    return Circuit(draw(*[2] * parameters["n"]).to(dtype), gates)


def _size(place: Place) -> int:
    return 2 if isinstance(place, int) else 4


def _split(y: Tensor, place: Place) -> Tensor:
    """``[before, 2, after]`` around a qubit, or ``[before, 2, between, 2, after]`` around two."""
    if isinstance(place, int):
        return y.reshape(2**place, 2, -1)
    first, second = place
    return y.reshape(2**first, 2, 2 ** (second - first - 1), 2, -1)


def _moved(y: Tensor, place: Place) -> tuple[Tensor, tuple[int, ...]]:
    """The state with the gate's qubits at the end, and the permutation back."""
    if isinstance(place, int):
        return _split(y, place).permute(0, 2, 1), (0, 2, 1)
    return _split(y, place).permute(0, 2, 4, 1, 3), (0, 3, 1, 4, 2)


def _bmm(c: Circuit) -> Tensor:
    """The qubits of each gate are permuted to the end, and back: a product for each row of those before."""
    y = c.state
    for place, gate in c.gates.items():
        moved, back = _moved(y, place)
        rows = moved.reshape(moved.shape[0], -1, gate.shape[0])
        y = rows.bmm(gate.expand(rows.shape[0], *gate.shape)).view(moved.shape).permute(back)
    return y.reshape(c.state.shape)


def _mm(c: Circuit) -> Tensor:
    """The same with a copy, and one product for all."""
    y = c.state
    for place, gate in c.gates.items():
        moved, back = _moved(y, place)
        y = moved.reshape(-1, gate.shape[0]).mm(gate).view(moved.shape).permute(back)
    return y.reshape(c.state.shape)


def _einsum(c: Circuit) -> Tensor:
    y = c.state
    for place, gate in c.gates.items():
        if isinstance(place, int):
            y = torch.einsum("apb,pq->aqb", _split(y, place), gate)
        else:
            y = torch.einsum("apbqc,pqPQ->aPbQc", _split(y, place), gate.view(2, 2, 2, 2))
    return y.reshape(c.state.shape)


def _error(c: Circuit, y: Tensor) -> float:
    """Relative Frobenius error against complex128."""
    expected = _einsum(Circuit(c.state.to(torch.complex128), {q: g.to(torch.complex128) for q, g in c.gates.items()}))
    return float(torch.linalg.norm(y.to(torch.complex128) - expected) / torch.linalg.norm(expected))


def _case(label: str, n: int, places: list[Place], dtype: str) -> Case:
    return Case(
        label=f"{label} {dtype}",
        parameters={"n": n, "places": places, "dtype": dtype},
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
        floor_bytes=2 * 2**n * getattr(torch, dtype).itemsize,
        flops=FLOPS * 2**n * sum(map(_size, places)),
        quick=n < QUBITS,
    )


def _pairs(n: int) -> list[Place]:
    """All qubits in random pairs."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).view(-1, 2).sort(-1).values
    return [(int(a), int(b)) for a, b in order.tolist()]


def _cases(dtype: str) -> list[Case]:
    circuits = [_case(f"{n} qubits, a gate on each", n, list(range(n)), dtype) for n in (16, QUBITS)]
    circuits += [_case(f"{QUBITS} qubits, a gate on number {q}", QUBITS, [q], dtype) for q in (0, QUBITS // 2, QUBITS - 1)]
    return circuits + [_case(f"{n} qubits, gates on random pairs", n, _pairs(n), dtype) for n in (20, QUBITS)]


register(
    Benchmark(
        name="quantum",
        description="Gates on qubits, and on random pairs: one mode_matmul; for each gate permute + bmm, permute + mm, einsum.",
        device="cuda",
        cases=[*_cases("complex64"), *_cases("complex128")],
        contenders=[
            Contender("fastkron_py", lambda c: lambda: fastkron_py.mode_matmul(c.state, c.gates), is_ours=True),
            Contender("permute + bmm", lambda c: lambda: _bmm(c)),
            Contender("permute + mm", lambda c: lambda: _mm(c)),
            Contender("einsum", lambda c: lambda: _einsum(c)),
        ],
        inputs=_inputs,
        check=_error,
        baseline="permute + bmm",
        has_floor=True,
    )
)
