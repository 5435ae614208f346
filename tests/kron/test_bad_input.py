"""Malformed calls: each has to raise, and to say which argument, what was expected and what came."""

import re

import numpy as np
import pytest
import torch
from refusals import ARRAY, BATCHES, COLUMNS, DTYPES, LIST, MATRIX, NUMBER, ROWS, assert_all_refused, value, wrong_type

import fastkron_py
from fastkron_py import gekmm, gemkm, kron_matmul, kron_matmul_left
from fastkron_py.runtime.backend import is_interpreting

X = torch.randn(5, 6)  # fits F = [2 x 3, 3 x 2] from the right: [5, 6] @ [6, 6]
F = [torch.randn(2, 3), torch.randn(3, 2)]
L = torch.randn(6, 4)  # and from the left
NX, NF = X.numpy(), [f.numpy() for f in F]
Z = torch.randn(5, 6)

# Texts that several messages share.
RESULT = "a shape that broadcasts to the result (5, 6)"
NEEDED = "a tensor that broadcasts to the result (5, 6), since beta is not 0"
NUMPY_DTYPES = "float16, float32, float64, complex64, complex128"
PRECISIONS = "None or one of highest, high, medium"
BACKENDS = "one of auto, triton, torch"
REAL = "a real number, since x is of torch.float32"
DENSE = "a dense (strided) tensor"


CASES = {
    # x and the factors: shapes
    "K is not the product": value(lambda: kron_matmul(X[:, :5], F), f"x: expected {ROWS}; got size 5 in shape (5, 5)"),
    "K of a left product": value(lambda: kron_matmul_left(F, L[:5]), f"x: expected {COLUMNS}; got size 5 in shape (5, 4)"),
    "K of a vector": value(lambda: kron_matmul(X[0, :4], F), f"x: expected {ROWS}; got size 4 in shape (4,)"),
    "x of no dimensions": value(
        lambda: kron_matmul(X[0, 0], F), "x: expected a vector, a matrix or a batch of matrices; got a 0-dimensional array"
    ),
    "one factor": value(
        lambda: kron_matmul(X, F[:1]), "x: expected dimension -1 of size 2, the product of the rows of factors; got size 6 in shape (5, 6)"
    ),
    "factor of one dimension": value(lambda: kron_matmul(X, [F[0], F[1][0]]), f"factors[1]: expected {MATRIX}; got shape (2,)"),
    "factor of no dimensions": value(lambda: kron_matmul(X, [F[0][0, 0]]), f"factors[0]: expected {MATRIX}; got shape ()"),
    "batches": value(lambda: kron_matmul(torch.ones(2, 5, 6), [torch.ones(3, 2, 3), F[1]]), f"x, factors: {BATCHES}; got (2,), (3,), ()"),
    # the factors as a whole
    "no factors": value(lambda: kron_matmul(X, []), "factors: expected at least one factor; got an empty sequence"),
    "a tensor as factors": wrong_type(lambda: kron_matmul(X, F[0]), f"factors: expected {LIST}; got torch.Tensor"),
    "a generator as factors": wrong_type(lambda: kron_matmul(X, (f for f in F)), f"factors: expected {LIST}; got generator"),
    "a string as factors": wrong_type(lambda: kron_matmul(X, "ab"), f"factors: expected {LIST}; got str"),
    # kinds
    "x is a list": wrong_type(lambda: kron_matmul([[1.0] * 6], F), f"x: expected {ARRAY}; got list"),
    "a factor is None": wrong_type(lambda: kron_matmul(X, [F[0], None]), "factors[1]: expected a torch tensor, like x; got None"),
    "tensor and array": wrong_type(lambda: kron_matmul(X, [F[0], NF[1]]), "factors[1]: expected a torch tensor, like x; got numpy.ndarray"),
    "array and tensor as z": wrong_type(lambda: kron_matmul(NX, NF, beta=1, z=Z), "z: expected a NumPy array, like x; got torch.Tensor"),
    "masked array": wrong_type(
        lambda: kron_matmul(np.ma.masked_array(NX), NF), "x: expected a plain numpy.ndarray; got numpy.ma.MaskedArray"
    ),
    # dtypes and layouts
    "integers": wrong_type(lambda: kron_matmul(X.long(), [f.long() for f in F]), f"x: expected a dtype among {DTYPES}; got torch.int64"),
    "two dtypes": wrong_type(
        lambda: kron_matmul(X, [F[0], F[1].double()]), "factors[1]: expected x's dtype torch.float32; got torch.float64"
    ),
    "integer arrays": wrong_type(
        lambda: kron_matmul(NX.astype(np.int32), NF), f"x: expected a dtype among {NUMPY_DTYPES}; got an array of int32"
    ),
    "long doubles": wrong_type(
        lambda: kron_matmul(NX.astype(np.longdouble), NF), f"x: expected a dtype among {NUMPY_DTYPES}; got an array of float128"
    ),
    "sparse x": wrong_type(lambda: kron_matmul(X.to_sparse(), F), f"x: expected {DENSE}; got torch.sparse_coo"),
    "sparse factor": wrong_type(
        lambda: kron_matmul(X, [F[0].to_sparse_csr(), F[1]]), f"factors[0]: expected {DENSE}; got torch.sparse_csr"
    ),
    "quantized x": wrong_type(
        lambda: kron_matmul(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), F), f"x: expected a dtype among {DTYPES}; got torch.qint8"
    ),
    "nested x": wrong_type(lambda: kron_matmul(nested(), F), f"x: expected {DENSE}; got a nested tensor"),
    # devices
    "x elsewhere": value(lambda: kron_matmul(X.to("meta"), F), "factors[0]: expected x's device meta; got cpu"),
    "a factor elsewhere": value(lambda: kron_matmul(X, [F[0], F[1].to("meta")]), "factors[1]: expected x's device cpu; got meta"),
    "z elsewhere": value(lambda: kron_matmul(X, F, beta=1, z=Z.to("meta")), "z: expected x's device cpu; got meta"),
    "alpha elsewhere": value(lambda: kron_matmul(X, F, alpha=torch.ones((), device="meta")), "alpha: expected x's device cpu; got meta"),
    # z and beta
    "beta without z": value(lambda: kron_matmul(X, F, beta=1.0), f"z: expected {NEEDED}; got None"),
    "z of another shape": value(lambda: kron_matmul(X, F, beta=1, z=Z[:4]), f"z: expected {RESULT}; got shape (4, 6)"),
    "z of a wrong shape, not read": value(lambda: kron_matmul(X, F, beta=0, z=Z[:4]), f"z: expected {RESULT}; got shape (4, 6)"),
    "z of another dtype": wrong_type(
        lambda: kron_matmul(X, F, beta=1, z=Z.double()), "z: expected x's dtype torch.float32; got torch.float64"
    ),
    "z is an array": wrong_type(lambda: kron_matmul(X, F, beta=1, z=Z.numpy()), "z: expected a torch tensor, like x; got numpy.ndarray"),
    # alpha and beta
    "alpha is NaN": value(lambda: kron_matmul(X, F, alpha=float("nan")), "alpha: expected a finite number; got nan"),
    "beta is infinite": value(lambda: kron_matmul(X, F, beta=-float("inf"), z=Z), "beta: expected a finite number; got -inf"),
    "alpha is a huge integer": value(
        lambda: kron_matmul(X, F, alpha=10**400), "alpha: expected a finite number; got an integer too large for a float"
    ),
    "alpha is a bool": wrong_type(lambda: kron_matmul(X, F, alpha=True), f"alpha: expected {NUMBER}; got bool"),
    "alpha is a vector": value(
        lambda: kron_matmul(X, F, alpha=torch.ones(1, requires_grad=True)), f"alpha: expected {NUMBER}; got a tensor of shape (1,)"
    ),
    "beta is a matrix": value(lambda: kron_matmul(X, F, beta=Z, z=Z), f"beta: expected {NUMBER}; got a tensor of shape (5, 6)"),
    "alpha is an integer tensor": wrong_type(
        lambda: kron_matmul(X, F, alpha=torch.tensor(2)), f"alpha: expected {NUMBER}; got a tensor of torch.int64"
    ),
    "alpha is complex": wrong_type(lambda: kron_matmul(X, F, alpha=2j), f"alpha: expected {REAL}; got 2j"),
    "alpha is a tensor for arrays": wrong_type(
        lambda: kron_matmul(NX, NF, alpha=torch.tensor(2.0)), "alpha: expected a number, since x is a NumPy array; got a torch tensor"
    ),
    # precision and backends
    "unknown precision": value(lambda: kron_matmul(X, F, precision="tf32"), f"precision: expected {PRECISIONS}; got 'tf32'"),
    "unknown default backend": value(lambda: fastkron_py.set_backend("cuda"), f"backend: expected {BACKENDS}; got 'cuda'"),
    "unknown backend": value(lambda: fastkron_py.backend("Torch"), f"backend: expected {BACKENDS}; got 'Torch'"),
    # FastKron's call forms use their own names
    "gemkm: K": value(
        lambda: gemkm(X[:, :5], F), "x: expected dimension -1 of size 6 = 2 * 3, the product of the rows of fs; got size 5 in shape (5, 5)"
    ),
    "gemkm: y missing": value(lambda: gemkm(X, F, 1.0, 1.0), f"y: expected {NEEDED}; got None"),
    "gemkm: fs": wrong_type(lambda: gemkm(X, F[0]), f"fs: expected {LIST}; got torch.Tensor"),
    "gekmm: fs": value(lambda: gekmm([], L), "fs: expected at least one factor; got an empty sequence"),
    "gekmm: K": value(
        lambda: gekmm(F, L[:5]), "x: expected dimension -2 of size 6 = 3 * 2, the product of the columns of fs; got size 5 in shape (5, 4)"
    ),
    "gekmm: alpha": value(lambda: gekmm(F, L, float("nan")), "alpha: expected a finite number; got nan"),
}


def nested():
    return torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)])


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning", "ignore:.*nested tensors.*:UserWarning", "ignore:.*quantize.*")
def test_malformed_calls():
    assert_all_refused(CASES)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning", "ignore:.*nested tensors.*:UserWarning", "ignore:.*quantize.*")
def test_malformed_calls_after_good_ones():
    """Calls that are recognised have their checks skipped; a malformed one is never recognised."""
    with fastkron_py.backend("triton" if is_interpreting() else "torch"):  # these tensors are on the CPU
        for _ in range(2):
            kron_matmul(X, F)
            kron_matmul(X, F, alpha=2.0)
            kron_matmul_left(F, L)
            kron_matmul(X[0], F)
        assert_all_refused(CASES)


def test_messages_name_an_argument_an_expectation_and_what_came():
    assert [message for _, _, message in CASES.values() if not re.fullmatch(r"[\w\[\], .]+: expected .+; got .+", message)] == []


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
