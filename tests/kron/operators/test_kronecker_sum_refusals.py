"""Malformed calls of `KroneckerSum`: each error says which argument, what was expected and what came."""

import torch
from refusals import assert_refused, value, wrong_type

from fastkron_py import KroneckerSum

A, B = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.eye(3)
LAPLACE = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
SKEW = torch.tensor([[2.0, 1.0], [0.0, 2.0]])
S = KroneckerSum([A, B])
REFUSED = {
    "no factors": value(lambda: KroneckerSum([]), "factors: expected at least one factor; got an empty sequence"),
    "a tensor": wrong_type(lambda: KroneckerSum(A), "factors: expected a list or tuple of matrices; got torch.Tensor"),
    "not square": value(
        lambda: KroneckerSum([A, torch.ones(2, 3)]), "factors[1]: expected a square matrix for a Kronecker sum; got shape (2, 3)"
    ),
    "two dtypes": wrong_type(
        lambda: KroneckerSum([A, B.double()]), "factors[1]: expected factors[0]'s dtype torch.float32; got torch.float64"
    ),
    "too few masses": value(lambda: KroneckerSum([A, B], masses=[A]), "masses: expected 2 matrices, one for each factor; got 1"),
    "a mass of another size": value(
        lambda: KroneckerSum([A, B], masses=[A, A]), "masses[1]: expected a matrix [3, 3], as factors[1]; got shape (2, 2)"
    ),
    "a mass of another dtype": wrong_type(
        lambda: KroneckerSum([A, B], masses=[A, B.double()]), "masses[1]: expected factors[0]'s dtype torch.float32; got torch.float64"
    ),
    "batches": value(
        lambda: KroneckerSum([A.expand(2, 2, 2), B.expand(3, 3, 3)]), "factors: expected batch dimensions that broadcast; got (2,), (3,)"
    ),
    "an indefinite mass": value(
        lambda: KroneckerSum([A], masses=[-A]).solve(torch.ones(2)),
        "masses[0]: expected a positive definite matrix; got one that has no Cholesky decomposition",
    ),
    "singular": (
        lambda: KroneckerSum([LAPLACE, LAPLACE]).solve(torch.ones(4)),
        torch.linalg.LinAlgError,
        "factors: expected an invertible matrix for solve; got eigenvalues of 0 to 4 in absolute value",
    ),
    "x of another size": value(lambda: S @ torch.ones(5), "x: expected dimension -1 of size 6; got shape (5,)"),
    "x of another size on the left": value(lambda: torch.ones(6, 2) @ S, "x: expected dimension -1 of size 6; got shape (6, 2)"),
    "x of another dtype": wrong_type(lambda: S @ torch.ones(6).double(), "x: expected factors[0]'s dtype torch.float32; got torch.float64"),
    "an operator": wrong_type(
        lambda: S @ S,
        "x: expected an array: a Kronecker sum times an operator is neither a sum nor a product; got "
        "fastkron_py.kron.operators.kronecker_sum.KroneckerSum",
    ),
    "b of another size": value(
        lambda: S.solve(torch.ones(5)), "b: expected dimension -1 of size 6, the product of the factors' sizes; got shape (5,)"
    ),
    "half solve": wrong_type(
        lambda: S.to(torch.bfloat16).solve(torch.ones(6).bfloat16()),
        "factors: expected a dtype among float32, float64, complex64, complex128 for eigenvectors; got torch.bfloat16",
    ),
    "eigh of what is not symmetric": value(
        lambda: KroneckerSum([B, SKEW]).eigh(),
        "factors[1]: expected a symmetric matrix for eigenvalues that are real; got one that differs from its conjugate transpose",
    ),
    "expm of pairs": value(
        lambda: KroneckerSum([A], masses=[A]).expm(),
        "masses: expected none for expm: give factors Mi^-1 Ai, the generator of M u' = S u; got mass matrices",
    ),
    "t is no number": wrong_type(lambda: S.expm("1"), "t: expected a number or a 0-dimensional floating-point tensor; got str"),
    "a complex shift": wrong_type(lambda: S.add_diagonal(1j), "s: expected a real number, since factors[0] is of torch.float32; got 1j"),
    "division by 0": value(lambda: S / 0, "scalar: expected a divisor other than 0; got 0.0"),
    "too large": value(
        lambda: KroneckerSum([torch.eye(100)] * 2).to_dense(),
        "max_elements: expected at least 100000000 to build a matrix of shape (10000, 10000); got 67108864",
    ),
    "under vmap": value(
        lambda: torch.func.vmap(lambda f: KroneckerSum([f, B]).solve(torch.ones(6)))(A.expand(2, 2, 2)),
        "factors: expected batch dimensions in place of torch.func.vmap, under which no value can be read; got a vmap",
    ),
}


def test_refusals():
    for refusal in REFUSED.values():
        assert_refused(*refusal)
