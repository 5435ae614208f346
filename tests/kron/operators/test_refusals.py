"""Malformed calls of lazy operators: each error says which argument, what was expected and what came."""

import re

import numpy as np
import pytest
import torch
from refusals import ARRAY, BATCHES, COLUMNS, DTYPES, LIST, MATRIX, NUMBER, ROWS, assert_refused, value, wrong_type

from fastkron_py import KroneckerProduct, KroneckerSum

X, L = torch.ones(5, 6), torch.ones(6, 4)
F = [torch.ones(2, 3), torch.ones(3, 2)]
NX, NF = X.numpy(), [f.numpy() for f in F]
SQUARE, WIDE = KroneckerProduct([torch.eye(2), torch.eye(3)]), KroneckerProduct(F)
A, B = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.eye(3)
PRODUCT, SUM = KroneckerProduct([A, B]), KroneckerSum([A, B])
LAPLACE, SKEW = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([[2.0, 1.0], [0.0, 2.0]])
ONES = torch.ones(6)

# Texts that several messages share.
LINALG = "expected a dtype among float32, float64, complex64, complex128"
CHAIN = "one by one the columns of this operator's"

OF_PRODUCTS = {
    "operator of nothing": value(lambda: KroneckerProduct([]), "factors: expected at least one factor; got an empty sequence"),
    "operator of a tensor": wrong_type(lambda: KroneckerProduct(F[0]), f"factors: expected {LIST}; got torch.Tensor"),
    "operator of lists": wrong_type(lambda: KroneckerProduct([[[1.0]]]), f"factors[0]: expected {ARRAY}; got list"),
    "operator of integers": wrong_type(
        lambda: KroneckerProduct([torch.ones(2, 2).long()]), f"factors[0]: expected a dtype among {DTYPES}; got torch.int64"
    ),
    "operator of two kinds": wrong_type(
        lambda: KroneckerProduct([F[0], NF[1]]), "factors[1]: expected a torch tensor, like factors[0]; got numpy.ndarray"
    ),
    "operator on two devices": value(
        lambda: KroneckerProduct([F[0], F[1].to("meta")]), "factors[1]: expected factors[0]'s device cpu; got meta"
    ),
    "operator of a vector": value(lambda: KroneckerProduct([F[0], F[1][0]]), f"factors[1]: expected {MATRIX}; got shape (2,)"),
    "operator of batches": value(
        lambda: KroneckerProduct([torch.ones(2, 3, 3), torch.ones(3, 3, 3)]), f"factors: {BATCHES}; got (2,), (3,)"
    ),
    "K @ x": value(lambda: WIDE @ L[:5], f"x: expected {COLUMNS}; got size 5 in shape (5, 4)"),
    "x @ K": value(lambda: X[:, :5] @ WIDE, f"x: expected {ROWS}; got size 5 in shape (5, 5)"),
    "K @ list": wrong_type(lambda: WIDE @ [1.0] * 6, f"x: expected {ARRAY}; got list"),
    "K @ array": wrong_type(lambda: WIDE @ NX.T, "factors[0]: expected a NumPy array, like x; got torch.Tensor"),
    "K @ K that does not chain": value(
        lambda: WIDE @ WIDE, f"other: expected factors with [3, 2] rows, {CHAIN}; got factors with [2, 3] rows"
    ),
    "K @ K of other dtype": wrong_type(
        lambda: SQUARE @ SQUARE.double(), "other.factors[0]: expected factors[0]'s dtype torch.float32; got torch.float64"
    ),
    "kron of a tensor": wrong_type(lambda: SQUARE.kron(F[0]), "other: expected a KroneckerProduct; got torch.Tensor"),
    "K * vector": value(lambda: SQUARE * torch.ones(6), f"scalar: expected {NUMBER}; got a tensor of shape (6,)"),
    "K * complex": wrong_type(lambda: SQUARE * 2j, "scalar: expected a real number, since factors[0] is of torch.float32; got 2j"),
    "K of arrays * tensor": wrong_type(
        lambda: KroneckerProduct(NF) * torch.tensor(2.0),
        "scalar: expected a number, since the factors are not torch tensors; got a torch tensor",
    ),
    "K / 0": value(lambda: SQUARE / 0, "scalar: expected a divisor other than 0; got 0.0"),
    "T of a batch": value(
        lambda: KroneckerProduct([torch.ones(2, 3, 3)]).T,
        "T: expected an operator without batch dimensions (mT transposes each matrix); got shape (2, 3, 3)",
    ),
    "trace of a rectangle": value(
        lambda: KroneckerProduct([F[0]]).trace(), "factors: expected a square product for trace; got a product of 2 x 3"
    ),
    "logdet of rectangles": value(lambda: WIDE.logdet(), "factors[0]: expected a square matrix for a determinant; got shape (2, 3)"),
    "power of no integer": wrong_type(lambda: SQUARE.matrix_power(0.5), "n: expected an integer; got float"),
    "solve for a wrong size": value(
        lambda: SQUARE.solve(torch.ones(5, 2)), "b: expected dimension -2 of size 6, the product of the factors' sizes; got shape (5, 2)"
    ),
    "solve for a wrong vector": value(
        lambda: SQUARE.solve(torch.ones(5)), "b: expected dimension -1 of size 6, the product of the factors' sizes; got shape (5,)"
    ),
    "solve for a list": wrong_type(lambda: SQUARE.solve([1.0] * 6), "b: expected a torch tensor, like factors[0]; got list"),
    "solve for other batches": value(
        lambda: KroneckerProduct([torch.eye(2).expand(3, 2, 2)]).solve(torch.ones(4, 2, 1)), f"b, factors: {BATCHES}; got (3,), (4,)"
    ),
    "logdet in half precision": wrong_type(
        lambda: KroneckerProduct([torch.eye(2).half()]).logdet(), f"factors: {LINALG} for a determinant; got torch.float16"
    ),
    "unknown norm": value(lambda: SQUARE.norm("max"), "ord: expected one of 'fro', 'nuc', 1, 2, inf; got 'max'"),
    "dense above the limit": value(
        lambda: KroneckerProduct([torch.ones(8, 8)] * 5).to_dense(),
        "max_elements: expected at least 1073741824 to build a matrix of shape (32768, 32768); got 67108864",
    ),
    "dense above a limit": value(
        lambda: SQUARE.to_dense(max_elements=35), "max_elements: expected at least 36 to build a matrix of shape (6, 6); got 35"
    ),
    "operator of arrays moved": wrong_type(
        lambda: KroneckerProduct(NF).to("cuda"), "factors[0]: expected a torch tensor, to be moved or converted; got numpy.ndarray"
    ),
    "operator as an array": wrong_type(
        lambda: np.asarray(SQUARE), "a KroneckerProduct does not become an array implicitly; call to_dense()"
    ),
}
OF_DIAGONALS_AND_FUNCTIONS = {
    "not square": value(
        lambda: KroneckerProduct([torch.ones(2, 3)]).add_diagonal(1.0),
        "factors: expected a square product to add a diagonal to; got shape (2, 3)",
    ),
    "a word": wrong_type(lambda: PRODUCT.add_diagonal("1"), "s: expected a number or a 0-dimensional floating-point tensor; got str"),
    "infinite": value(lambda: PRODUCT.add_diagonal(float("inf")), "s: expected a finite number; got inf"),
    "another size": value(lambda: PRODUCT.add_diagonal(torch.ones(5)), "s: expected a vector [6] or [*batch, 1]; got shape (5,)"),
    "too few vectors": value(lambda: PRODUCT.add_diagonal([torch.ones(2)]), "s: expected 2 vectors, one for each factor; got 1"),
    "a vector of another size": value(
        lambda: PRODUCT.add_diagonal([torch.ones(2), torch.ones(2)]),
        "s[1]: expected a vector [3], the diagonal that is added to factors[1]; got shape (2,)",
    ),
    "an operator that is not diagonal": value(
        lambda: PRODUCT.add_diagonal(PRODUCT), "s.factors[0]: expected a diagonal matrix; got one with other elements"
    ),
    "an array beside tensors": wrong_type(
        lambda: PRODUCT.add_diagonal(np.ones(6, np.float32)), "s: expected a torch tensor, like factors[0]; got numpy.ndarray"
    ),
    "a negative Kronecker diagonal": value(
        lambda: PRODUCT.add_diagonal([torch.ones(2), -torch.ones(3)]).solve(ONES), "s[1]: expected positive numbers; got -1"
    ),
    "a singular shift": (
        lambda: PRODUCT.add_diagonal(-1.0).solve(ONES),
        torch.linalg.LinAlgError,
        "s: expected an invertible matrix for solve; got eigenvalues of 0 to 2 in absolute value",
    ),
    "indefinite": value(
        lambda: PRODUCT.add_diagonal(-2 * ONES).solve(torch.arange(6.0)),
        "factors, s: expected a positive definite K + diag(s) and preconditioner; got a direction without positive curvature in iteration "
        "1",
    ),
    "a negative preconditioner": value(
        lambda: PRODUCT.add_diagonal(torch.arange(1.0, 7.0)).solve(ONES, preconditioner=lambda r: -r),
        "factors, s: expected a positive definite K + diag(s) and preconditioner; got a direction without positive curvature in iteration "
        "1",
    ),
    "not symmetric": value(
        lambda: KroneckerProduct([SKEW, B]).add_diagonal(ONES).solve(ONES),
        "factors[0]: expected a symmetric matrix for conjugate gradients; got one that differs from its conjugate transpose",
    ),
    "a sample of what is indefinite": value(
        lambda: PRODUCT.add_diagonal(-2.0).sample(),
        "factors, s: expected a positive semi-definite matrix for sample; got an eigenvalue of -1",
    ),
    "b of another size": value(
        lambda: PRODUCT.add_diagonal(1.0).solve(torch.ones(5)),
        "b: expected dimension -1 of size 6, the product of the factors' sizes; got shape (5,)",
    ),
    "b that is not finite": value(lambda: PRODUCT.add_diagonal(ONES).solve(ONES / 0), "b: expected finite numbers; got NaN or an infinity"),
    "a mask of numbers": wrong_type(
        lambda: PRODUCT.add_diagonal(1.0).solve(ONES, mask=ONES), "mask: expected a tensor of bool; got torch.float32"
    ),
    "a mask of another size": value(
        lambda: PRODUCT.add_diagonal(1.0).solve(ONES, mask=torch.ones(5).bool()), "mask: expected dimension -1 of size 6; got shape (5,)"
    ),
    "an empty mask": value(
        lambda: PRODUCT.add_diagonal(1.0).solve(ONES, mask=ONES < 0),
        "mask: expected one that is true somewhere; got one that is false everywhere",
    ),
    "a negative tolerance": value(
        lambda: PRODUCT.add_diagonal(ONES).solve(ONES, tolerance=-1), "tolerance: expected a finite number, 0 or more; got -1"
    ),
    "a preconditioner that is none": wrong_type(
        lambda: PRODUCT.add_diagonal(ONES).solve(ONES, preconditioner="eigen"),
        "preconditioner: expected True, False or a function; got str",
    ),
    "progress that is no function": wrong_type(
        lambda: PRODUCT.add_diagonal(ONES).solve(ONES, progress=1),
        "progress: expected a function of (iteration, residual) or None; got int",
    ),
    "a determinant that is too large": value(
        lambda: KroneckerProduct([torch.eye(100)] * 2).add_diagonal(torch.ones(10_000)).logdet(),
        "probes: expected a number of probe vectors, such as 32: matrices with a vector D are factorized up to 67108864 elements in all; "
        "got None for shape (10000, 10000)",
    ),
    "probes of what is indefinite": value(
        lambda: KroneckerProduct([-torch.eye(8).double()]).add_diagonal(torch.rand(8).double()).logdet(probes=2),
        "factors, s: expected a positive definite matrix for logdet; got an eigenvalue near ",
    ),
    "eigenvectors of a vector": value(
        lambda: PRODUCT.add_diagonal(ONES).eigh(),
        "s: expected one number: other sums have no Kronecker product of eigenvectors; got a vector",
    ),
    "a sample shape": wrong_type(lambda: PRODUCT.add_diagonal(1.0).sample(3), "sample_shape: expected a sequence of integers; got int"),
    "f is none": wrong_type(lambda: PRODUCT.apply_function(2), "f: expected a function of eigenvalues; got int"),
    "f changes the shape": value(
        lambda: PRODUCT.apply_function(torch.sum) @ ONES, "f: expected a function that keeps the shape (6,); got one to shape ()"
    ),
    "f of what is not symmetric": value(
        lambda: KroneckerProduct([SKEW]).apply_function(torch.sqrt) @ ONES[:2],
        "factors[0]: expected a symmetric matrix for eigenvalues that are real; got one that differs from its conjugate transpose",
    ),
}
OF_SUMS = {
    "not square": value(
        lambda: KroneckerSum([A, torch.ones(2, 3)]), "factors[1]: expected a square matrix for a Kronecker sum; got shape (2, 3)"
    ),
    "too few masses": value(lambda: KroneckerSum([A, B], masses=[A]), "masses: expected 2 matrices, one for each factor; got 1"),
    "a mass of another size": value(
        lambda: KroneckerSum([A, B], masses=[A, A]), "masses[1]: expected a matrix [3, 3], as factors[1]; got shape (2, 2)"
    ),
    "an indefinite mass": value(
        lambda: KroneckerSum([A], masses=[-A]).solve(torch.ones(2)),
        "masses[0]: expected a positive definite matrix; got one that has no Cholesky decomposition",
    ),
    "singular": (
        lambda: KroneckerSum([LAPLACE, LAPLACE]).solve(torch.ones(4)),
        torch.linalg.LinAlgError,
        "factors: expected an invertible matrix for solve without rcond=; got eigenvalues of 0 to 4 in absolute value",
    ),
    "x of another size": value(lambda: SUM @ torch.ones(5), "x: expected dimension -1 of size 6; got shape (5,)"),
    "x of another dtype": wrong_type(
        lambda: SUM @ torch.ones(6).double(), "x: expected factors[0]'s dtype torch.float32; got torch.float64"
    ),
    "an operator": wrong_type(
        lambda: SUM @ SUM,
        "x: expected an array: a Kronecker sum times an operator is neither a sum nor a product; got "
        "fastkron_py.kron.operators.kronecker_sum.KroneckerSum",
    ),
    "b of another size": value(
        lambda: SUM.solve(torch.ones(5)), "b: expected dimension -1 of size 6, the product of the factors' sizes; got shape (5,)"
    ),
    "eigh of what is not symmetric": value(
        lambda: KroneckerSum([B, SKEW]).eigh(),
        "factors[1]: expected a symmetric matrix for eigenvalues that are real; got one that differs from its conjugate transpose",
    ),
    "expm of pairs": value(
        lambda: KroneckerSum([A], masses=[A]).expm(),
        "masses: expected none for expm: give factors Mi^-1 Ai, the generator of M u' = S u; got mass matrices",
    ),
    "t is no number": wrong_type(lambda: SUM.expm("1"), "t: expected a number or a 0-dimensional floating-point tensor; got str"),
    "under vmap": value(
        lambda: torch.func.vmap(lambda f: KroneckerSum([f, B]).solve(torch.ones(6)))(A.expand(2, 2, 2)),
        "factors: expected batch dimensions in place of torch.func.vmap, under which no value can be read; got a vmap",
    ),
}


@pytest.mark.parametrize("refusals", [OF_PRODUCTS, OF_DIAGONALS_AND_FUNCTIONS, OF_SUMS], ids=["products", "diagonals", "sums"])
def test_refusals(refusals):
    for call, error, message in refusals.values():
        if message.endswith(" "):  # a number follows
            with pytest.raises(error, match=re.escape(message)):
                call()
        else:
            assert_refused(call, error, message)


def test_failures_of_a_factorisation_name_the_factor():
    for call, message in [
        (lambda: KroneckerProduct([torch.eye(2), torch.zeros(3, 3)]).inverse(), r"factors\[1\] of shape \(3, 3\): .*singular"),
        (lambda: KroneckerProduct([torch.zeros(2, 2), torch.eye(3)]).solve(torch.ones(6)), r"factors\[0\] of shape \(2, 2\): .*singular"),
        (lambda: KroneckerProduct([torch.eye(2), -torch.eye(3)]).cholesky(), r"factors\[1\] of shape \(3, 3\): .*positive semi-definite"),
    ]:
        with pytest.raises(torch.linalg.LinAlgError, match=message):
            call()
