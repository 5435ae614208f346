"""Refused arguments: each error names the argument, the expectation and what came."""

from __future__ import annotations

import math

import numpy as np
import torch
from refusals import Refusal, assert_all_refused, assert_refused, value, wrong_type

from fastkron_py import lokr_linear

X, W1, W2, BASE = torch.ones(3, 6), torch.ones(2, 3), torch.ones(5, 2), torch.ones(3, 10)
LOW = (torch.ones(5, 1), torch.ones(1, 2))
PAIR = "a matrix [out, in] or a pair of matrices [out, rank] and [rank, in]"
LAST = "a last dimension of 6 = 3 * 2, the columns of w1 and w2"

REFUSED: dict[str, Refusal] = {
    "x_is_list": wrong_type(lambda: lokr_linear([1.0], W1, W2), "x: expected a torch tensor, a NumPy array or a CuPy array; got list"),
    "x_of_integers": wrong_type(
        lambda: lokr_linear(X.int(), W1, W2),
        "x: expected a dtype among float16, bfloat16, float32, float64, complex64, complex128; got torch.int32",
    ),
    "x_too_wide": value(lambda: lokr_linear(torch.ones(3, 7), W1, W2), f"x: expected {LAST}; got shape (3, 7)"),
    "x_without_dimensions": value(lambda: lokr_linear(torch.ones(()), W1, W2), f"x: expected {LAST}; got shape ()"),
    "w1_is_none": wrong_type(lambda: lokr_linear(X, None, W2), "w1: expected a torch tensor, a NumPy array or a CuPy array; got None"),
    "w2_half_a_pair": wrong_type(
        lambda: lokr_linear(X, W1, (LOW[0], None)), "w2[1]: expected a torch tensor, a NumPy array or a CuPy array; got None"
    ),
    "w1_is_numpy": wrong_type(lambda: lokr_linear(X, W1.numpy(), W2), "w1: expected a torch tensor, like x; got numpy.ndarray"),
    "w1_is_tensor_beside_numpy": wrong_type(
        lambda: lokr_linear(X.numpy(), W1, W2.numpy()), "w1: expected a NumPy array, like x; got torch.Tensor"
    ),
    "w1_of_three": wrong_type(lambda: lokr_linear(X, (W1, W1, W1), W2), f"w1: expected {PAIR}; got 3 of them"),
    "w1_a_batch": value(
        lambda: lokr_linear(X, torch.ones(1, 2, 3), W2),
        "w1 and w2: expected two matrices, or as many terms [terms, out, in] of each; got shapes (1, 2, 3) and (5, 2)",
    ),
    "w1_sparse": wrong_type(lambda: lokr_linear(X, W1.to_sparse(), W2), "w1: expected a dense (strided) tensor; got torch.sparse_coo"),
    "w2_does_not_chain": value(
        lambda: lokr_linear(X, W1, (LOW[0], torch.ones(2, 2))),
        "w2: expected a pair [out, rank] and [rank, in] of one rank; got shapes (5, 1) and (2, 2)",
    ),
    "w2_of_a_vector": value(
        lambda: lokr_linear(X, W1, (LOW[0], torch.ones(2))),
        "w2[1]: expected a matrix [out, in], or terms of a sum [terms, out, in]; got shape (2,)",
    ),
    "w2_wider": wrong_type(lambda: lokr_linear(X, W1, W2.double()), "w2: expected x's dtype torch.float32; got torch.float64"),
    "w2_narrower": wrong_type(lambda: lokr_linear(X, W1, W2.half()), "w2: expected x's dtype torch.float32; got torch.float16"),
    "w2_float64_beside_half": wrong_type(
        lambda: lokr_linear(X.half(), W1, W2.double()), "w2: expected x's dtype torch.float16 or torch.float32; got torch.float64"
    ),
    "w2_elsewhere": value(lambda: lokr_linear(X, W1, W2.to("meta")), "w2: expected x's device cpu; got meta"),
    "base_of_another_shape": value(
        lambda: lokr_linear(X, W1, W2, base=BASE[0]), "base: expected the result's shape (3, 10); got shape (10,)"
    ),
    "base_of_another_dtype": wrong_type(
        lambda: lokr_linear(X.half(), W1, W2, base=BASE), "base: expected x's dtype torch.float16; got torch.float32"
    ),
    "base_is_a_number": wrong_type(lambda: lokr_linear(X, W1, W2, base=1.0), "base: expected a torch tensor, like x; got float"),
    "scale_is_a_vector": value(
        lambda: lokr_linear(X, W1, W2, scale=torch.ones(2)),
        "scale: expected a number or a 0-dimensional floating-point tensor; got a tensor of shape (2,)",
    ),
    "scale_is_infinite": value(lambda: lokr_linear(X, W1, W2, scale=math.inf), "scale: expected a finite number; got inf"),
    "scale_is_complex": wrong_type(
        lambda: lokr_linear(X, W1, W2, scale=1j), "scale: expected a real number, since x is of torch.float32; got 1j"
    ),
    "precision_unknown": value(
        lambda: lokr_linear(X, W1, W2, precision="low"), "precision: expected None or one of highest, high, medium; got 'low'"
    ),
    "numpy_integers": wrong_type(
        lambda: lokr_linear(np.ones((3, 6), dtype=np.int64), W1.numpy(), W2.numpy()),
        "x: expected a dtype among float16, float32, float64, complex64, complex128; got an array of int64",
    ),
}


def test_refused() -> None:
    assert_all_refused(REFUSED)


def test_no_tensor_under_autocast() -> None:
    """Which looks at dtypes before anything is checked."""
    refused: Refusal = wrong_type(lambda: lokr_linear(X, W1, (LOW[0], "no tensor")), "w2[1]: expected a torch tensor, like x; got str")
    with torch.autocast("cpu", torch.bfloat16):
        assert_refused(*refused)
