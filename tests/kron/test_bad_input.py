"""Malformed calls: each has to raise, and to say which argument, what was expected and what came."""

import re

import numpy as np
import pytest
import torch
from refusals import assert_refused, value, wrong_type

import fastkron_py
from fastkron_py import KroneckerProduct, gekmm, gemkm, kron_matmul, kron_matmul_left
from fastkron_py.runtime.backend import is_interpreting

X = torch.randn(5, 6)  # fits F = [2 x 3, 3 x 2] from the right: [5, 6] @ [6, 6]
F = [torch.randn(2, 3), torch.randn(3, 2)]
L = torch.randn(6, 4)  # and from the left
NX, NF = X.numpy(), [f.numpy() for f in F]
Z = torch.randn(5, 6)
SQUARE = KroneckerProduct([torch.eye(2), torch.eye(3)])
WIDE = KroneckerProduct(F)
DTYPES = "float16, bfloat16, float32, float64, complex64, complex128"
NUMBER = "a number or a 0-dimensional floating-point tensor"

# Texts that several messages share.
LIST = "a list or tuple of matrices"
ARRAY = "a torch tensor, a NumPy array or a CuPy array"
ROWS = "dimension -1 of size 6 = 2 * 3, the product of the rows of factors"
COLUMNS = "dimension -2 of size 6 = 3 * 2, the product of the columns of factors"
MATRIX = "a matrix [P, Q] or a batch [*batch, P, Q]"
BATCHES = "expected batch dimensions that broadcast"
RESULT = "a shape that broadcasts to the result (5, 6)"
NEEDED = "a tensor that broadcasts to the result (5, 6), since beta is not 0"
NUMPY_DTYPES = "float16, float32, float64, complex64, complex128"
LINALG = "expected a dtype among float32, float64, complex64, complex128"
PRECISIONS = "None or one of highest, high, medium"
BACKENDS = "one of auto, triton, torch"
CHAIN = "one by one the columns of this operator's"
REAL = "a real number, since x is of torch.float32"
DENSE = "a dense (strided) tensor"


CASES = {
    # x and the factors: shapes
    "K is not the product": value(lambda: kron_matmul(X[:, :5], F), f"x: expected {ROWS}; got size 5 in shape (5, 5)"),
    "K of a left product": value(lambda: kron_matmul_left(F, L[:5]), f"x: expected {COLUMNS}; got size 5 in shape (5, 4)"),
    "K of a vector": value(lambda: kron_matmul(X[0, :4], F), f"x: expected {ROWS}; got size 4 in shape (4,)"),
    "K of a left vector": value(
        lambda: kron_matmul_left(F, L[:5, 0]),
        "x: expected dimension -1 of size 6 = 3 * 2, the product of the columns of factors; got size 5 in shape (5,)",
    ),
    "x transposed": value(lambda: kron_matmul(X.T, F), f"x: expected {ROWS}; got size 5 in shape (6, 5)"),
    "x of no dimensions": value(
        lambda: kron_matmul(X[0, 0], F), "x: expected a vector, a matrix or a batch of matrices; got a 0-dimensional array"
    ),
    "one factor": value(
        lambda: kron_matmul(X, F[:1]), "x: expected dimension -1 of size 2, the product of the rows of factors; got size 6 in shape (5, 6)"
    ),
    "many factors": value(
        lambda: kron_matmul(X, [torch.ones(2, 2)] * 9),
        f"x: expected dimension -1 of size 512 = {'2 * ' * 8}..., the product of the rows of factors; got size 6 in shape (5, 6)",
    ),
    "x empty where K is not": value(lambda: kron_matmul(X[:, :0], F), f"x: expected {ROWS}; got size 0 in shape (5, 0)"),
    "factor of one dimension": value(lambda: kron_matmul(X, [F[0], F[1][0]]), f"factors[1]: expected {MATRIX}; got shape (2,)"),
    "factor of no dimensions": value(lambda: kron_matmul(X, [F[0][0, 0]]), f"factors[0]: expected {MATRIX}; got shape ()"),
    "batches": value(lambda: kron_matmul(torch.ones(2, 5, 6), [torch.ones(3, 2, 3), F[1]]), f"x, factors: {BATCHES}; got (2,), (3,), ()"),
    "batches of factors": value(
        lambda: kron_matmul_left([torch.ones(2, 2, 3), torch.ones(3, 3, 2)], L), f"x, factors: {BATCHES}; got (), (2,), (3,)"
    ),
    "batches, one empty": value(
        lambda: kron_matmul(torch.ones(0, 5, 6), [torch.ones(3, 2, 3), F[1]]), f"x, factors: {BATCHES}; got (0,), (3,), ()"
    ),
    # the factors as a whole
    "no factors": value(lambda: kron_matmul(X, []), "factors: expected at least one factor; got an empty sequence"),
    "no factors on the left": value(lambda: kron_matmul_left((), X), "factors: expected at least one factor; got an empty sequence"),
    "a tensor as factors": wrong_type(lambda: kron_matmul(X, F[0]), f"factors: expected {LIST}; got torch.Tensor"),
    "an array as factors": wrong_type(lambda: kron_matmul(NX, NF[0]), f"factors: expected {LIST}; got numpy.ndarray"),
    "a generator as factors": wrong_type(lambda: kron_matmul(X, (f for f in F)), f"factors: expected {LIST}; got generator"),
    "a dict as factors": wrong_type(lambda: kron_matmul(X, dict(enumerate(F))), f"factors: expected {LIST}; got dict"),
    "a set as factors": wrong_type(lambda: kron_matmul(X, set(F)), f"factors: expected {LIST}; got set"),
    "a string as factors": wrong_type(lambda: kron_matmul(X, "ab"), f"factors: expected {LIST}; got str"),
    "None as factors": wrong_type(lambda: kron_matmul(X, None), f"factors: expected {LIST}; got None"),
    "an operator as factors": wrong_type(
        lambda: kron_matmul(X, WIDE), f"factors: expected {LIST}; got fastkron_py.kron.operators.product.KroneckerProduct"
    ),
    "swapped arguments": wrong_type(lambda: kron_matmul(F, X), "x: expected an array: the order of arguments is (x, factors); got list"),
    "swapped arguments on the left": wrong_type(
        lambda: kron_matmul_left(X, F), "x: expected an array: the order of arguments is (factors, x); got list"
    ),
    # kinds
    "x is a list": wrong_type(lambda: kron_matmul([[1.0] * 6], F), f"x: expected {ARRAY}; got list"),
    "x is a number": wrong_type(lambda: kron_matmul(1.0, F), f"x: expected {ARRAY}; got float"),
    "x is None": wrong_type(lambda: kron_matmul(None, F), f"x: expected {ARRAY}; got None"),
    "x is a string": wrong_type(lambda: kron_matmul("x", F), f"x: expected {ARRAY}; got str"),
    "a factor is None": wrong_type(lambda: kron_matmul(X, [F[0], None]), "factors[1]: expected a torch tensor, like x; got None"),
    "a factor is a list": wrong_type(lambda: kron_matmul(X, [F[0], [[1.0]]]), "factors[1]: expected a torch tensor, like x; got list"),
    "a factor of a numpy call is None": wrong_type(
        lambda: kron_matmul(NX, [NF[0], None]), "factors[1]: expected a NumPy array, like x; got None"
    ),
    "tensor and array": wrong_type(lambda: kron_matmul(X, [F[0], NF[1]]), "factors[1]: expected a torch tensor, like x; got numpy.ndarray"),
    "array and tensor": wrong_type(lambda: kron_matmul(NX, [NF[0], F[1]]), "factors[1]: expected a NumPy array, like x; got torch.Tensor"),
    "array and tensor as z": wrong_type(lambda: kron_matmul(NX, NF, beta=1, z=Z), "z: expected a NumPy array, like x; got torch.Tensor"),
    "array and a list of lists": wrong_type(
        lambda: kron_matmul(NX, [NF[0], NF[1].tolist()]), "factors[1]: expected a NumPy array, like x; got list"
    ),
    "masked array": wrong_type(
        lambda: kron_matmul(np.ma.masked_array(NX), NF), "x: expected a plain numpy.ndarray; got numpy.ma.MaskedArray"
    ),
    "numpy scalar as x": wrong_type(lambda: kron_matmul(np.float32(1), NF), "x: expected a plain numpy.ndarray; got numpy.float32"),
    # dtypes and layouts
    "integers": wrong_type(lambda: kron_matmul(X.long(), [f.long() for f in F]), f"x: expected a dtype among {DTYPES}; got torch.int64"),
    "bools": wrong_type(lambda: kron_matmul(X > 0, [f > 0 for f in F]), f"x: expected a dtype among {DTYPES}; got torch.bool"),
    "an integer factor": wrong_type(
        lambda: kron_matmul(X, [F[0], F[1].int()]), f"factors[1]: expected a dtype among {DTYPES}; got torch.int32"
    ),
    "two dtypes": wrong_type(
        lambda: kron_matmul(X, [F[0], F[1].double()]), "factors[1]: expected x's dtype torch.float32; got torch.float64"
    ),
    "half and single": wrong_type(
        lambda: kron_matmul_left([f.half() for f in F], L), "factors[0]: expected x's dtype torch.float32; got torch.float16"
    ),
    "real and complex": wrong_type(
        lambda: kron_matmul(X, [F[0].to(torch.complex64), F[1]]), "factors[0]: expected x's dtype torch.float32; got torch.complex64"
    ),
    "integer arrays": wrong_type(
        lambda: kron_matmul(NX.astype(np.int32), NF), f"x: expected a dtype among {NUMPY_DTYPES}; got an array of int32"
    ),
    "object arrays": wrong_type(
        lambda: kron_matmul(NX, [NF[0].astype(object), NF[1]]), f"factors[0]: expected a dtype among {NUMPY_DTYPES}; got an array of object"
    ),
    "long doubles": wrong_type(
        lambda: kron_matmul(NX.astype(np.longdouble), NF), f"x: expected a dtype among {NUMPY_DTYPES}; got an array of float128"
    ),
    "two dtypes of arrays": wrong_type(
        lambda: kron_matmul(NX, [NF[0], NF[1].astype(float)]), "factors[1]: expected x's dtype float32; got float64"
    ),
    "sparse x": wrong_type(lambda: kron_matmul(X.to_sparse(), F), f"x: expected {DENSE}; got torch.sparse_coo"),
    "sparse factor": wrong_type(
        lambda: kron_matmul(X, [F[0].to_sparse_csr(), F[1]]), f"factors[0]: expected {DENSE}; got torch.sparse_csr"
    ),
    "quantized x": wrong_type(
        lambda: kron_matmul(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), F), f"x: expected a dtype among {DTYPES}; got torch.qint8"
    ),
    "nested x": wrong_type(lambda: kron_matmul(nested(), F), f"x: expected {DENSE}; got a nested or torch.strided one"),
    # devices
    "x elsewhere": value(lambda: kron_matmul(X.to("meta"), F), "factors[0]: expected x's device meta; got cpu"),
    "a factor elsewhere": value(lambda: kron_matmul(X, [F[0], F[1].to("meta")]), "factors[1]: expected x's device cpu; got meta"),
    "z elsewhere": value(lambda: kron_matmul(X, F, beta=1, z=Z.to("meta")), "z: expected x's device cpu; got meta"),
    "alpha elsewhere": value(lambda: kron_matmul(X, F, alpha=torch.ones((), device="meta")), "alpha: expected x's device cpu; got meta"),
    # z and beta
    "beta without z": value(lambda: kron_matmul(X, F, beta=1.0), f"z: expected {NEEDED}; got None"),
    "beta tensor without z": value(lambda: kron_matmul(X, F, beta=torch.zeros(())), f"z: expected {NEEDED}; got None"),
    "z of another shape": value(lambda: kron_matmul(X, F, beta=1, z=Z[:4]), f"z: expected {RESULT}; got shape (4, 6)"),
    "z larger than the result": value(
        lambda: kron_matmul(X, F, beta=1, z=torch.ones(2, 5, 6)), f"z: expected {RESULT}; got shape (2, 5, 6)"
    ),
    "z would widen the result": value(
        lambda: kron_matmul(X[:1], F, beta=1, z=Z), "z: expected a shape that broadcasts to the result (1, 6); got shape (5, 6)"
    ),
    "z of a wrong shape, not read": value(lambda: kron_matmul(X, F, beta=0, z=Z[:4]), f"z: expected {RESULT}; got shape (4, 6)"),
    "z of another dtype": wrong_type(
        lambda: kron_matmul(X, F, beta=1, z=Z.double()), "z: expected x's dtype torch.float32; got torch.float64"
    ),
    "z is a number": wrong_type(lambda: kron_matmul(X, F, beta=1, z=1.0), "z: expected a torch tensor, like x; got float"),
    "z is an array": wrong_type(lambda: kron_matmul(X, F, beta=1, z=Z.numpy()), "z: expected a torch tensor, like x; got numpy.ndarray"),
    # alpha and beta
    "alpha is NaN": value(lambda: kron_matmul(X, F, alpha=float("nan")), "alpha: expected a finite number; got nan"),
    "alpha is infinite": value(lambda: kron_matmul(X, F, alpha=float("inf")), "alpha: expected a finite number; got inf"),
    "beta is infinite": value(lambda: kron_matmul(X, F, beta=-float("inf"), z=Z), "beta: expected a finite number; got -inf"),
    "alpha is a NumPy NaN": value(lambda: kron_matmul(X, F, alpha=np.float32("nan")), "alpha: expected a finite number; got nan"),
    "alpha is a huge integer": value(
        lambda: kron_matmul(X, F, alpha=10**400), "alpha: expected a finite number; got an integer too large for a float"
    ),
    "alpha is a complex infinity": value(
        lambda: kron_matmul(X.to(torch.complex64), [f.to(torch.complex64) for f in F], alpha=complex(0, float("inf"))),
        "alpha: expected a finite number; got infj",
    ),
    "alpha is a bool": wrong_type(lambda: kron_matmul(X, F, alpha=True), f"alpha: expected {NUMBER}; got bool"),
    "alpha is a NumPy bool": wrong_type(lambda: kron_matmul(X, F, alpha=np.bool_(True)), f"alpha: expected {NUMBER}; got numpy.bool"),
    "alpha is a string": wrong_type(lambda: kron_matmul(X, F, alpha="1"), f"alpha: expected {NUMBER}; got str"),
    "alpha is None": wrong_type(lambda: kron_matmul(X, F, alpha=None), f"alpha: expected {NUMBER}; got None"),
    "alpha is a list": wrong_type(lambda: kron_matmul(X, F, alpha=[1.0]), f"alpha: expected {NUMBER}; got list"),
    "alpha is an array": wrong_type(lambda: kron_matmul(NX, NF, alpha=np.ones(1)), f"alpha: expected {NUMBER}; got numpy.ndarray"),
    "alpha is a vector": value(
        lambda: kron_matmul(X, F, alpha=torch.ones(1, requires_grad=True)), f"alpha: expected {NUMBER}; got a tensor of shape (1,)"
    ),
    "beta is a matrix": value(lambda: kron_matmul(X, F, beta=Z, z=Z), f"beta: expected {NUMBER}; got a tensor of shape (5, 6)"),
    "alpha is an integer tensor": wrong_type(
        lambda: kron_matmul(X, F, alpha=torch.tensor(2)), f"alpha: expected {NUMBER}; got a tensor of torch.int64"
    ),
    "alpha is complex": wrong_type(lambda: kron_matmul(X, F, alpha=2j), f"alpha: expected {REAL}; got 2j"),
    "beta is a complex tensor": wrong_type(
        lambda: kron_matmul(X, F, beta=torch.tensor(2j), z=Z), f"beta: expected {REAL}; got a tensor of torch.complex64"
    ),
    "alpha is complex for arrays": wrong_type(
        lambda: kron_matmul(NX, NF, alpha=2j), f"alpha: expected {REAL.replace('torch.', '')}; got 2j"
    ),
    "alpha is a tensor for arrays": wrong_type(
        lambda: kron_matmul(NX, NF, alpha=torch.tensor(2.0)), "alpha: expected a number, since x is a NumPy array; got a torch tensor"
    ),
    # precision and backends
    "unknown precision": value(lambda: kron_matmul(X, F, precision="tf32"), f"precision: expected {PRECISIONS}; got 'tf32'"),
    "precision is a number": wrong_type(lambda: kron_matmul(X, F, precision=1), f"precision: expected {PRECISIONS}; got int"),
    "precision is a dtype": wrong_type(
        lambda: kron_matmul(X, F, precision=torch.float32), f"precision: expected {PRECISIONS}; got torch.dtype"
    ),
    "unknown default backend": value(lambda: fastkron_py.set_backend("cuda"), f"backend: expected {BACKENDS}; got 'cuda'"),
    "default backend of another type": wrong_type(lambda: fastkron_py.set_backend(None), f"backend: expected {BACKENDS}; got NoneType"),
    "empty default backend": value(lambda: fastkron_py.set_backend(""), f"backend: expected {BACKENDS}; got ''"),
    "unknown backend": value(lambda: enter(fastkron_py.backend("Torch")), f"backend: expected {BACKENDS}; got 'Torch'"),
    "backend of another type": wrong_type(lambda: enter(fastkron_py.backend(0)), f"backend: expected {BACKENDS}; got int"),
    # FastKron's call forms use their own names
    "gemkm: K": value(
        lambda: gemkm(X[:, :5], F), "x: expected dimension -1 of size 6 = 2 * 3, the product of the rows of fs; got size 5 in shape (5, 5)"
    ),
    "gemkm: y missing": value(lambda: gemkm(X, F, 1.0, 1.0), f"y: expected {NEEDED}; got None"),
    "gemkm: y's shape": value(lambda: gemkm(X, F, 1.0, 1.0, Z.T), f"y: expected {RESULT}; got shape (6, 5)"),
    "gemkm: fs": wrong_type(lambda: gemkm(X, F[0]), f"fs: expected {LIST}; got torch.Tensor"),
    "gekmm: fs": value(lambda: gekmm([], L), "fs: expected at least one factor; got an empty sequence"),
    "gekmm: a factor": wrong_type(lambda: gekmm([F[0], F[1].double()], L), "fs[1]: expected x's dtype torch.float32; got torch.float64"),
    "gekmm: K": value(
        lambda: gekmm(F, L[:5]), "x: expected dimension -2 of size 6 = 3 * 2, the product of the columns of fs; got size 5 in shape (5, 4)"
    ),
    "gekmm: alpha": value(lambda: gekmm(F, L, float("nan")), "alpha: expected a finite number; got nan"),
    # KroneckerProduct
    "operator of nothing": value(lambda: KroneckerProduct([]), "factors: expected at least one factor; got an empty sequence"),
    "operator of a tensor": wrong_type(lambda: KroneckerProduct(F[0]), f"factors: expected {LIST}; got torch.Tensor"),
    "operator of lists": wrong_type(lambda: KroneckerProduct([[[1.0]]]), f"factors[0]: expected {ARRAY}; got list"),
    "operator of integers": wrong_type(
        lambda: KroneckerProduct([torch.ones(2, 2).long()]), f"factors[0]: expected a dtype among {DTYPES}; got torch.int64"
    ),
    "operator of two dtypes": wrong_type(
        lambda: KroneckerProduct([F[0], F[1].double()]), "factors[1]: expected factors[0]'s dtype torch.float32; got torch.float64"
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
    "array @ K": wrong_type(lambda: NX @ WIDE, "factors[0]: expected a NumPy array, like x; got torch.Tensor"),
    "K @ K that does not chain": value(
        lambda: WIDE @ WIDE, f"other: expected factors with [3, 2] rows, {CHAIN}; got factors with [2, 3] rows"
    ),
    "K @ K of other length": value(
        lambda: SQUARE @ KroneckerProduct([torch.eye(6)]), f"other: expected factors with [2, 3] rows, {CHAIN}; got factors with [6] rows"
    ),
    "K @ K of other dtype": wrong_type(
        lambda: SQUARE @ SQUARE.double(), "other.factors[0]: expected factors[0]'s dtype torch.float32; got torch.float64"
    ),
    "kron of a tensor": wrong_type(lambda: SQUARE.kron(F[0]), "other: expected a KroneckerProduct; got torch.Tensor"),
    "K * vector": value(lambda: SQUARE * torch.ones(6), f"scalar: expected {NUMBER}; got a tensor of shape (6,)"),
    "K * string": wrong_type(lambda: SQUARE * "2", f"scalar: expected {NUMBER}; got str"),
    "K * complex": wrong_type(lambda: SQUARE * 2j, "scalar: expected a real number, since factors[0] is of torch.float32; got 2j"),
    "K * NaN": value(lambda: float("nan") * SQUARE, "scalar: expected a finite number; got nan"),
    "array * K": wrong_type(lambda: NX * SQUARE, f"scalar: expected {NUMBER}; got numpy.ndarray"),
    "K of arrays * complex": wrong_type(
        lambda: KroneckerProduct(NF) * 2j, "scalar: expected a real number, since the factors are of float32; got 2j"
    ),
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
    "inverse of a rectangle": value(
        lambda: KroneckerProduct([torch.eye(2), F[0]]).inverse(), "factors[1]: expected a square matrix for inverse; got shape (2, 3)"
    ),
    "solve with rectangles": value(lambda: WIDE.solve(L), "factors[0]: expected a square matrix for solve; got shape (2, 3)"),
    "cholesky of rectangles": value(lambda: WIDE.cholesky(), "factors[0]: expected a square matrix for cholesky; got shape (2, 3)"),
    "eigh of rectangles": value(lambda: WIDE.eigh(), "factors[0]: expected a square matrix for eigh; got shape (2, 3)"),
    "power of rectangles": value(lambda: WIDE.matrix_power(2), "factors[0]: expected a square matrix for matrix_power; got shape (2, 3)"),
    "power of no integer": wrong_type(lambda: SQUARE.matrix_power(0.5), "n: expected an integer; got float"),
    "solve for a wrong size": value(
        lambda: SQUARE.solve(torch.ones(5, 2)), "b: expected dimension -2 of size 6, the product of the factors' sizes; got shape (5, 2)"
    ),
    "solve for a wrong vector": value(
        lambda: SQUARE.solve(torch.ones(5)), "b: expected dimension -1 of size 6, the product of the factors' sizes; got shape (5,)"
    ),
    "solve for a scalar": value(
        lambda: SQUARE.solve(torch.ones(())), "b: expected dimension -2 of size 6, the product of the factors' sizes; got shape ()"
    ),
    "solve for a list": wrong_type(lambda: SQUARE.solve([1.0] * 6), "b: expected a torch tensor, like factors[0]; got list"),
    "solve for another dtype": wrong_type(
        lambda: SQUARE.solve(torch.ones(6).double()), "b: expected factors[0]'s dtype torch.float32; got torch.float64"
    ),
    "solve for other batches": value(
        lambda: KroneckerProduct([torch.eye(2).expand(3, 2, 2)]).solve(torch.ones(4, 2, 1)), f"b, factors: {BATCHES}; got (3,), (4,)"
    ),
    "logdet in half precision": wrong_type(
        lambda: KroneckerProduct([torch.eye(2).half()]).logdet(), f"factors: {LINALG} for a determinant; got torch.float16"
    ),
    "solve in half precision": wrong_type(
        lambda: KroneckerProduct([torch.eye(2).bfloat16()]).solve(torch.ones(2).bfloat16()),
        f"factors: {LINALG} for solve; got torch.bfloat16",
    ),
    "unknown norm": value(lambda: SQUARE.norm("max"), "ord: expected one of 'fro', 'nuc', 1, 2, inf; got 'max'"),
    "dense above the limit": value(
        lambda: KroneckerProduct([torch.ones(8, 8)] * 5).to_dense(),
        "max_elements: expected at least 1073741824 to build a matrix of shape (32768, 32768); got 67108864",
    ),
    "dense above a limit": value(
        lambda: SQUARE.to_dense(max_elements=35), "max_elements: expected at least 36 to build a matrix of shape (6, 6); got 35"
    ),
    "dense limit of no integer": wrong_type(
        lambda: SQUARE.to_dense(max_elements=1e9), "max_elements: expected an integer or None; got float"
    ),
    "operator of arrays moved": wrong_type(
        lambda: KroneckerProduct(NF).to("cuda"), "factors[0]: expected a torch tensor, to be moved or converted; got numpy.ndarray"
    ),
    "operator converted to integers": wrong_type(
        lambda: SQUARE.to(torch.int32), f"factors[0]: expected a dtype among {DTYPES}; got torch.int32"
    ),
    "operator as an array": wrong_type(
        lambda: np.asarray(SQUARE), "a KroneckerProduct is not converted to an array by itself; call its to_dense()"
    ),
}


def nested():
    return torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)])


def enter(context):
    with context:
        pass


def with_triton(call):
    with fastkron_py.backend("triton"):
        return call()


def assert_all_refused():
    for refusal in CASES.values():
        assert_refused(*refusal)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning", "ignore:.*nested tensors.*:UserWarning", "ignore:.*quantize.*")
def test_malformed_calls():
    assert_all_refused()


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning", "ignore:.*nested tensors.*:UserWarning", "ignore:.*quantize.*")
def test_malformed_calls_after_good_ones():
    """Calls that are recognised have their checks skipped; a malformed one is never recognised."""
    with fastkron_py.backend("triton" if is_interpreting() else "torch"):  # these tensors are on the CPU
        for _ in range(2):
            kron_matmul(X, F)
            kron_matmul(X, F, alpha=2.0)
            kron_matmul_left(F, L)
            kron_matmul(X[0], F)
        assert_all_refused()


def test_messages_name_an_argument_an_expectation_and_what_came():
    """All but the last."""
    assert (
        sum(re.fullmatch(r"[\w\[\], .]+: expected .+; got .+", message) is not None for _, _, message in CASES.values()) == len(CASES) - 1
    )


def test_failures_of_a_factorisation_name_the_factor():
    for call, message in [
        (lambda: KroneckerProduct([torch.eye(2), torch.zeros(3, 3)]).inverse(), r"factors\[1\] of shape \(3, 3\): .*singular"),
        (lambda: KroneckerProduct([torch.zeros(2, 2), torch.eye(3)]).solve(torch.ones(6)), r"factors\[0\] of shape \(2, 2\): .*singular"),
        (lambda: KroneckerProduct([torch.eye(2), -torch.eye(3)]).cholesky(), r"factors\[1\] of shape \(3, 3\): .*positive-definite"),
    ]:
        with pytest.raises(torch.linalg.LinAlgError, match=message):
            call()


def test_a_refused_default_backend_changes_nothing():
    before = kron_matmul(X, F)
    with pytest.raises(ValueError, match="backend"):
        fastkron_py.set_backend("nonsense")
    assert torch.equal(kron_matmul(X, F), before)


@pytest.mark.parametrize("convert", [lambda t: t, lambda t: t.numpy()], ids=["torch", "numpy"])
def test_hints_for_other_orders_of_arguments(convert):
    x, f = convert(torch.ones(3, 4)), convert(torch.eye(2))
    with pytest.raises(TypeError, match=r"x: expected an array: the order of arguments is \(x, factors\); got list"):
        fastkron_py.kron_matmul([f, f], x)
    with pytest.raises(TypeError, match=r"x: expected an array: the order of arguments is \(factors, x\); got list"):
        fastkron_py.kron_matmul_left(x, [f, f])
    with pytest.raises(TypeError, match=r"x: expected an array: the order of arguments is \(fs, x\); got tuple"):
        fastkron_py.gekmm(x, (f, f))
    with pytest.raises(TypeError, match=r"factors: expected one list, as in kron_matmul\(x, \[F1, F2\]\), and options by name; got 2 arg"):
        fastkron_py.kron_matmul(x, f, f)
    with pytest.raises(TypeError, match=r"factors: expected one list, as in kron_matmul_left\(\[F1, F2\], x\)"):
        fastkron_py.kron_matmul_left(f, f, x)
