"""Complex numbers on the Triton backend: gates on the modes of a state, conjugate and negative views, and what is copied.

`test_forward`, `test_backward`, `test_matmul` and `test_gradients` have complex dtypes among the others.
"""

from __future__ import annotations

import math

import pytest
import torch
from canonical_cases import backward_program, in_double, multiply_program
from torch import Tensor

import fastkron_py
from fastkron_py import kron_matmul, kron_matmul_left, mode_matmul
from fastkron_py.testing import assert_close

DTYPES = pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
QUBITS = 9


def drawn(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.complex128).to(device, dtype)


def by_einsum(state: Tensor, gates: dict[int, Tensor]) -> Tensor:
    """In complex128, one gate after the other."""
    y = in_double(state)
    for dim, gate in gates.items():
        y = torch.tensordot(y, in_double(gate), ([dim], [0])).movedim(-1, dim)
    return y


@DTYPES
def test_a_gate_on_any_qubit(dtype: torch.dtype, device: torch.device) -> None:
    """Many runs of memory before it, many elements after it, or both; and alone it takes no tensor cores."""
    for qubit in [0, 1, 4, QUBITS - 2, QUBITS - 1]:
        state, gates = drawn(dtype, device, *[2] * QUBITS), {qubit: drawn(dtype, device, 2, 2)}
        with fastkron_py.backend("triton"):
            y = mode_matmul(state, gates)
        assert_close(y, by_einsum(state, gates))
        with pytest.raises(AssertionError):
            assert_close(y, by_einsum(state, {qubit: gates[qubit].mT}))


@DTYPES
def test_gates_on_many_qubits(dtype: torch.dtype, device: torch.device) -> None:
    for qubits in [range(QUBITS), range(3, QUBITS), range(QUBITS - 3), (0, 3, 4, 8)]:
        state, gates = drawn(dtype, device, *[2] * QUBITS), {q: drawn(dtype, device, 2, 2) / math.sqrt(2) for q in qubits}
        with fastkron_py.backend("triton"):
            assert_close(mode_matmul(state, gates), by_einsum(state, gates), steps=len(gates))


def test_two_qubit_gates_that_grow_and_shrink(device: torch.device) -> None:
    """Dimensions of 4 beside those of 2, and isometries."""
    state = drawn(torch.complex64, device, 2, 4, 4, 2, 3)
    gates = {1: drawn(torch.complex64, device, 4, 2), 2: drawn(torch.complex64, device, 4, 4), 3: drawn(torch.complex64, device, 2, 4)}
    with fastkron_py.backend("triton"):
        assert_close(mode_matmul(state, gates), by_einsum(state, gates), steps=3)


@DTYPES
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_conjugate_views(left: bool, dtype: torch.dtype, device: torch.device) -> None:
    for conjugated in ["x", "factors", "one factor", "z", "all"]:
        x, z = drawn(dtype, device, 6, 6), drawn(dtype, device, 6, 6)
        factors = [drawn(dtype, device, 2, 2), drawn(dtype, device, 3, 3)]
        x = x.conj() if conjugated in ("x", "all") else x
        z = z.conj() if conjugated in ("z", "all") else z
        which = {"factors": (0, 1), "all": (0, 1), "one factor": (1,)}.get(conjugated, ())
        factors = [f.conj() if i in which else f for i, f in enumerate(factors)]
        inputs = [t.requires_grad_() for t in (x, *factors, z)]
        assert any(t.is_conj() for t in inputs)
        with fastkron_py.backend("triton"):
            y = kron_matmul_left(factors, x, beta=0.5, z=z) if left else kron_matmul(x, factors, beta=0.5, z=z)
            weight = torch.randn_like(y)
            # A sum of real parts and imaginary ones: the phase of a sum's absolute value is ill-conditioned where terms cancel.
            found = torch.autograd.grad(torch.view_as_real(y * weight).sum(), inputs)
        wide = [in_double(t.detach()).resolve_conj().requires_grad_() for t in inputs]
        matrix = torch.kron(wide[1], wide[2])
        expected = (matrix @ wide[0] if left else wide[0] @ matrix) + 0.5 * wide[3]
        wanted = torch.autograd.grad(torch.view_as_real(expected * in_double(weight)).sum(), wide)
        assert_close(y, expected, steps=2)
        for got, want in zip(found, wanted, strict=True):
            assert_close(got.resolve_conj(), want, steps=8)


def test_a_backward_pass_copies_nothing(device: torch.device) -> None:
    """No conjugate of x or of a factor is made: kernels read both as they are."""
    for sizes in [(2,) * 8, (4, 70), (3, 5)]:
        x = drawn(torch.complex64, device, 1, 4, math.prod(sizes), 1)
        factors = [drawn(torch.complex64, device, 1, p, p) for p in sizes]
        calls = [
            step for step in (*multiply_program(x, factors)._steps, *backward_program(x, x, factors)._steps) if step.results is not None
        ]
        assert not calls or max(sizes) > 32  # torch multiplies wide factors
