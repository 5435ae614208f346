"""Malformed calls of `add_diagonal` and `apply_function`: each error says which argument, what was expected and what came."""

import re

import numpy as np
import pytest
import torch
from refusals import assert_refused, value, wrong_type

from fastkron_py import KroneckerProduct

F = [torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.eye(3)]
SKEW = torch.tensor([[2.0, 1.0], [0.0, 2.0]])
K = KroneckerProduct(F)
ONES = torch.ones(6)
REFUSED = {
    "not square": value(
        lambda: KroneckerProduct([torch.ones(2, 3)]).add_diagonal(1.0),
        "factors: expected a square product to add a diagonal to; got shape (2, 3)",
    ),
    "a word": wrong_type(lambda: K.add_diagonal("1"), "s: expected a number or a 0-dimensional floating-point tensor; got str"),
    "infinite": value(lambda: K.add_diagonal(float("inf")), "s: expected a finite number; got inf"),
    "complex": wrong_type(lambda: K.add_diagonal(1j), "s: expected a real number, since factors[0] is of torch.float32; got 1j"),
    "another dtype": wrong_type(lambda: K.add_diagonal(ONES.double()), "s: expected factors[0]'s dtype torch.float32; got torch.float64"),
    "another size": value(lambda: K.add_diagonal(torch.ones(5)), "s: expected a vector [6] or [*batch, 1]; got shape (5,)"),
    "too few vectors": value(lambda: K.add_diagonal([torch.ones(2)]), "s: expected 2 vectors, one for each factor; got 1"),
    "a vector of another size": value(
        lambda: K.add_diagonal([torch.ones(2), torch.ones(2)]),
        "s[1]: expected a vector [3], the diagonal that is added to factors[1]; got shape (2,)",
    ),
    "an operator that is not diagonal": value(
        lambda: K.add_diagonal(K), "s.factors[0]: expected a diagonal matrix; got one with other elements"
    ),
    "an array beside tensors": wrong_type(
        lambda: K.add_diagonal(np.ones(6, np.float32)), "s: expected a torch tensor, like factors[0]; got numpy.ndarray"
    ),
    "a negative Kronecker diagonal": value(
        lambda: K.add_diagonal([torch.ones(2), -torch.ones(3)]).solve(ONES), "s[1]: expected positive numbers; got -1"
    ),
    "a singular shift": (
        lambda: K.add_diagonal(-1.0).solve(ONES),
        torch.linalg.LinAlgError,
        "s: expected an invertible matrix for solve; got eigenvalues of 0 to 2 in absolute value",
    ),
    "indefinite": value(
        lambda: K.add_diagonal(-2 * ONES).solve(torch.arange(6.0)),
        "factors, s: expected a positive definite K + diag(s) and preconditioner; got a direction without positive curvature in iteration "
        "1",
    ),
    "not symmetric": value(
        lambda: KroneckerProduct([SKEW, F[1]]).add_diagonal(ONES).solve(ONES),
        "factors[0]: expected a symmetric matrix for conjugate gradients; got one that differs from its conjugate transpose",
    ),
    "a sample of what is indefinite": value(
        lambda: K.add_diagonal(-2.0).sample(), "factors, s: expected a positive semi-definite matrix for sample; got an eigenvalue of -1"
    ),
    "a sample of what is not symmetric": value(
        lambda: KroneckerProduct([SKEW, F[1]]).add_diagonal(1.0).sample(),
        "factors[0]: expected a symmetric matrix for eigenvalues that are real; got one that differs from its conjugate transpose",
    ),
    "rectangular factors": value(
        lambda: KroneckerProduct([torch.ones(2, 3), torch.ones(3, 2)]).add_diagonal(1.0).solve(ONES),
        "factors[0]: expected a square matrix for eigenvectors; got shape (2, 3)",
    ),
    "half types": wrong_type(
        lambda: K.to(torch.float16).add_diagonal(1.0).solve(ONES.half()),
        "factors: expected a dtype among float32, float64, complex64, complex128 for eigenvectors; got torch.float16",
    ),
    "b of another size": value(
        lambda: K.add_diagonal(1.0).solve(torch.ones(5)),
        "b: expected dimension -1 of size 6, the product of the factors' sizes; got shape (5,)",
    ),
    "b that is not finite": value(lambda: K.add_diagonal(ONES).solve(ONES / 0), "b: expected finite numbers; got NaN or an infinity"),
    "x of another size": value(
        lambda: K.add_diagonal(ONES) @ torch.ones(5),
        "x: expected dimension -1 of size 6, the product of the factors' sizes; got shape (5,)",
    ),
    "a mask of numbers": wrong_type(
        lambda: K.add_diagonal(1.0).solve(ONES, mask=ONES), "mask: expected a tensor of bool; got torch.float32"
    ),
    "a mask of another size": value(
        lambda: K.add_diagonal(1.0).solve(ONES, mask=torch.ones(5).bool()), "mask: expected dimension -1 of size 6; got shape (5,)"
    ),
    "an empty mask": value(
        lambda: K.add_diagonal(1.0).solve(ONES, mask=ONES < 0),
        "mask: expected one that is true somewhere; got one that is false everywhere",
    ),
    "a negative tolerance": value(
        lambda: K.add_diagonal(ONES).solve(ONES, tolerance=-1), "tolerance: expected a finite number, 0 or more; got -1"
    ),
    "iterations that are no integer": wrong_type(
        lambda: K.add_diagonal(ONES).solve(ONES, max_iterations=1.5), "max_iterations: expected an integer; got float"
    ),
    "a preconditioner that is none": wrong_type(
        lambda: K.add_diagonal(ONES).solve(ONES, preconditioner="eigen"), "preconditioner: expected True, False or a function; got str"
    ),
    "progress that is no function": wrong_type(
        lambda: K.add_diagonal(ONES).solve(ONES, progress=1), "progress: expected a function of (iteration, residual) or None; got int"
    ),
    "a determinant that is too large": value(
        lambda: KroneckerProduct([torch.eye(100)] * 2).add_diagonal(torch.ones(10_000)).logdet(),
        "probes: expected a number of probe vectors, such as 32: matrices with a vector D are factorized up to 67108864 elements in all; "
        "got None for shape (10000, 10000)",
    ),
    "no probes at all": value(lambda: K.add_diagonal(ONES).logdet(probes=0), "probes: expected 1 or more; got 0"),
    "probes of what is indefinite": value(
        lambda: KroneckerProduct([-torch.eye(8).double()]).add_diagonal(torch.rand(8).double()).logdet(probes=2),
        "factors, s: expected a positive definite matrix for logdet; got an eigenvalue near ",
    ),
    "eigenvectors of a vector": value(
        lambda: K.add_diagonal(ONES).eigh(), "s: expected one number: other sums have no Kronecker product of eigenvectors; got a vector"
    ),
    "a sample shape": wrong_type(lambda: K.add_diagonal(1.0).sample(3), "sample_shape: expected a sequence of integers; got int"),
    "f is none": wrong_type(lambda: K.apply_function(2), "f: expected a function of eigenvalues; got int"),
    "f changes the shape": value(
        lambda: K.apply_function(torch.sum) @ ONES, "f: expected a function that keeps the shape (6,); got one to shape ()"
    ),
    "f changes the dtype": wrong_type(
        lambda: K.apply_function(torch.Tensor.double) @ ONES, "f: expected a function to torch.float32; got one to torch.float64"
    ),
    "f of what is not symmetric": value(
        lambda: KroneckerProduct([SKEW]).apply_function(torch.sqrt) @ ONES[:2],
        "factors[0]: expected a symmetric matrix for eigenvalues that are real; got one that differs from its conjugate transpose",
    ),
}


def test_refusals():
    for call, error, message in REFUSED.values():
        if message.endswith(" "):  # a number follows
            with pytest.raises(error, match=re.escape(message)):
                call()
        else:
            assert_refused(call, error, message)
