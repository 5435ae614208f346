"""What `rational` refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastkron_py import rational
from fastkron_py.rational.denominators.registry import denominator_names

NAMES = ", ".join(denominator_names())

X, A, B = torch.ones(3, 8), torch.ones(2, 6), torch.ones(2, 4)

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "x is a list": ({"x": [1.0]}, TypeError, "x: expected a torch tensor, a NumPy array or a CuPy array; got list"),
    "x of integers": ({"x": X.int()}, TypeError, "x: expected a dtype among float16, bfloat16, float32, float64; got torch.int32"),
    "complex x": ({"x": X.to(torch.complex64)}, TypeError, "x: expected a dtype among .* got torch.complex64"),
    "sparse x": ({"x": X.to_sparse()}, TypeError, r"x: expected a dense \(strided\) tensor; got torch.sparse_coo"),
    "scalar x": ({"x": torch.tensor(1.0)}, ValueError, r"x: expected at least one dimension, \[..., C\]; got a 0-dimensional tensor"),
    "groups do not divide C": (
        {"x": torch.ones(3, 9)},
        ValueError,
        "x: expected a last dimension that the number of groups 2 divides; got 9",
    ),
    "numerator is a list": ({"numerator": [1.0]}, TypeError, "numerator: expected a torch tensor, like x; got list"),
    "denominator is None": ({"denominator": None}, TypeError, "denominator: expected a torch tensor, like x; got None"),
    "tensor beside arrays": (
        {"x": X.numpy(), "numerator": A.numpy()},
        TypeError,
        r"denominator: expected a NumPy array, like x; got torch\.Tensor",
    ),
    "vector of coefficients": (
        {"numerator": torch.ones(6)},
        ValueError,
        r"numerator: expected a matrix \[G, coefficients\]; got shape \(6,\)",
    ),
    "no denominator": ({"denominator": torch.ones(2, 0)}, ValueError, r"denominator: expected \[G, 1 to 16\] .*; got shape \(2, 0\)"),
    "no group": ({"numerator": torch.ones(0, 6)}, ValueError, r"numerator: expected \[G, 1 to 17\] with G at least 1; got shape \(0, 6\)"),
    "degree too high": ({"numerator": torch.ones(2, 18)}, ValueError, r"numerator: expected \[G, 1 to 17\] .*; got shape \(2, 18\)"),
    "degree of the denominator": ({"denominator": torch.ones(2, 17)}, ValueError, r"denominator: expected \[G, 1 to 16\]"),
    "groups disagree": (
        {"denominator": torch.ones(4, 4)},
        ValueError,
        "denominator: expected as many groups as numerator's 2, or 1; got 4",
    ),
    "double coefficients": (
        {"numerator": A.double()},
        TypeError,
        "numerator: expected float64 where x is float64, and only there, since x is of torch.float32; got torch.float64",
    ),
    "double x": ({"x": X.double()}, TypeError, "numerator: expected float64 where x is float64, .*; got torch.float32"),
    "integer coefficients": ({"denominator": B.int()}, TypeError, "denominator: expected a dtype among .*; got torch.int32"),
    "another device": ({"numerator": A.to("meta")}, ValueError, "numerator: expected x's device cpu; got meta"),
    "unknown version": ({"version": "E"}, ValueError, f"version: expected one of {NAMES}; got 'E'"),
    "version of another type": ({"version": 2}, TypeError, f"version: expected one of {NAMES}; got int"),
    "noise out of range": ({"noise": 1.5}, ValueError, "noise: expected a number from 0 to 1; got 1.5"),
    "noise of another type": ({"noise": "much"}, TypeError, "noise: expected a number from 0 to 1; got str"),
}


def test_refused() -> None:
    for changed, error, message in REFUSED.values():
        with pytest.raises(error, match=message):
            rational(**{"x": X, "numerator": A, "denominator": B} | changed)


def test_denominators_of_version_c_have_one_more() -> None:
    assert rational(X, A, torch.ones(2, 17), version="C").shape == X.shape
    with pytest.raises(ValueError, match=r"denominator: expected \[G, 1 to 17\]"):
        rational(X, A, torch.ones(2, 18), version="C")
