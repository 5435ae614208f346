"""Gates on the qubits of a quantum state: one on each, and one alone, wherever its qubit lies."""

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
FLOPS = 16  # of a gate, for an amplitude: two complex products and a sum each


@dataclass(frozen=True)
class Circuit:
    """A state ``[2] * n`` and unitary gates ``[2, 2]`` by qubit."""

    state: Tensor
    gates: dict[int, Tensor]


def _inputs(parameters: Mapping[str, Any], device: torch.device) -> Circuit:
    generator, dtype = torch.Generator(device=device).manual_seed(0), getattr(torch, parameters["dtype"])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.complex128)

    gates = {qubit: torch.linalg.qr(draw(2, 2)).Q.to(dtype) for qubit in parameters["qubits"]}
    return Circuit(draw(*[2] * parameters["n"]).to(dtype), gates)


def _split(y: Tensor, qubit: int) -> Tensor:
    """``[before, 2, after]`` around a qubit."""
    return y.reshape(2**qubit, 2, -1)


def _bmm(c: Circuit) -> Tensor:
    """Each qubit is permuted to the end, and back: a product for each row of the others."""
    y = c.state
    for qubit, gate in c.gates.items():
        moved = _split(y, qubit).permute(0, 2, 1)
        y = moved.bmm(gate.expand(moved.shape[0], 2, 2)).permute(0, 2, 1)
    return y.reshape(c.state.shape)


def _mm(c: Circuit) -> Tensor:
    """The same with a copy, and one product for all."""
    y = c.state
    for qubit, gate in c.gates.items():
        moved = _split(y, qubit).permute(0, 2, 1)
        y = moved.reshape(-1, 2).mm(gate).view(moved.shape).permute(0, 2, 1)
    return y.reshape(c.state.shape)


def _einsum(c: Circuit) -> Tensor:
    y = c.state
    for qubit, gate in c.gates.items():
        y = torch.einsum("apb,pq->aqb", _split(y, qubit), gate)
    return y.reshape(c.state.shape)


def _error(c: Circuit, y: Tensor) -> float:
    """Relative Frobenius error against complex128."""
    expected = _einsum(Circuit(c.state.to(torch.complex128), {q: g.to(torch.complex128) for q, g in c.gates.items()}))
    return float(torch.linalg.norm(y.to(torch.complex128) - expected) / torch.linalg.norm(expected))


def _case(label: str, n: int, qubits: list[int], dtype: str) -> Case:
    return Case(
        label=f"{label} {dtype}",
        parameters={"n": n, "qubits": qubits, "dtype": dtype},
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
        floor_bytes=2 * 2**n * getattr(torch, dtype).itemsize,
        flops=FLOPS * 2**n * len(qubits),
        quick=n < QUBITS,
    )


def _cases(dtype: str) -> list[Case]:
    circuits = [_case(f"{n} qubits, a gate on each", n, list(range(n)), dtype) for n in (16, QUBITS)]
    return circuits + [_case(f"{QUBITS} qubits, a gate on number {q}", QUBITS, [q], dtype) for q in (0, QUBITS // 2, QUBITS - 1)]


register(
    Benchmark(
        name="quantum",
        description="2 x 2 gates on the qubits of a state: one mode_matmul; for each gate permute + bmm, permute + mm, einsum.",
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
