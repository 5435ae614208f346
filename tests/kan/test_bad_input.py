"""What `poly_kan` refuses, and what it says."""

from __future__ import annotations

import math

import torch
from refusals import Refusal, assert_all_refused, value, wrong_type

from fastkron_py import poly_kan
from fastkron_py.kan.bases.registry import basis_names

X, C = torch.randn(5, 3), torch.randn(4, 2, 3)
BASIS_NAMES = ", ".join(basis_names())
BAD: dict[str, Refusal] = {
    "degree 0": value(lambda: poly_kan(X, C[:1]), "degree: expected 1 to 64; got 0"),
    "degree 65": value(lambda: poly_kan(X, torch.randn(66, 2, 3)), "degree: expected 1 to 64; got 65"),
    "no inputs": value(lambda: poly_kan(X.sum(), C), "x: expected at least one dimension [..., in]; got a 0-dimensional tensor"),
    "two dimensions": value(lambda: poly_kan(X, C[0]), "coefficients: expected a tensor [degree + 1, out, in]; got shape (2, 3)"),
    "other inputs": value(
        lambda: poly_kan(X, torch.randn(4, 3, 2)), "coefficients: expected a last dimension of x's 3 inputs; got shape (4, 3, 2)"
    ),
    "other dtype": wrong_type(lambda: poly_kan(X, C.double()), "coefficients: expected x's dtype torch.float32; got torch.float64"),
    "complex": wrong_type(
        lambda: poly_kan(X + 0j, C + 0j), "x: expected a real dtype among float16, bfloat16, float32, float64; got torch.complex64"
    ),
    "no tensor": wrong_type(lambda: poly_kan(X, [1.0]), "coefficients: expected a torch tensor, like x; got list"),
    "bias": value(lambda: poly_kan(X, C, bias=X[0]), "bias: expected shape (2,), the coefficients' outputs; got shape (3,)"),
    "basis": value(lambda: poly_kan(X, C, basis="tchebychev"), f"basis: expected one of {BASIS_NAMES}; got 'tchebychev'"),
    "basis of another kind": wrong_type(lambda: poly_kan(X, C, basis=3), f"basis: expected one of {BASIS_NAMES}; got int"),
    "jacobi": value(
        lambda: poly_kan(X, C, basis="jacobi", basis_parameters={"a": -1.0}),
        "basis_parameters: expected Jacobi's a and b above -1; got a -1.0, b 0.0",
    ),
    "gegenbauer": value(
        lambda: poly_kan(X, C, basis="gegenbauer", basis_parameters={"alpha": 0}),
        "basis_parameters: expected Gegenbauer's alpha above -0.5 and not 0; got alpha 0.0",
    ),
    "order": value(
        lambda: poly_kan(X, C, basis="bspline", basis_parameters={"order": 4}),
        "basis_parameters: expected a B-spline's order of 1, 2 or 3; got order 4.0",
    ),
    "few splines": value(
        lambda: poly_kan(X, C[:3], basis="bspline"),
        "coefficients: expected at least 4 functions (degree 3) for B-splines of order 3; got 3",
    ),
    "width": value(
        lambda: poly_kan(X, C, basis="rbf", basis_parameters={"width": 0}),
        "basis_parameters: expected a positive finite width; got width 0.0",
    ),
    "unknown parameter": value(
        lambda: poly_kan(X, C, basis="jacobi", basis_parameters={"c": 1}), "basis_parameters: expected a, b, for basis jacobi; got 'c'"
    ),
    "no parameters": value(
        lambda: poly_kan(X, C, basis_parameters={"a": 1}), "basis_parameters: expected no parameters, for basis chebyshev; got 'a'"
    ),
    "parameter of another kind": wrong_type(
        lambda: poly_kan(X, C, basis="jacobi", basis_parameters={"a": "1"}), "basis_parameters['a']: expected a number; got str"
    ),
    "infinite parameter": value(
        lambda: poly_kan(X, C, basis="jacobi", basis_parameters={"a": math.inf}), "basis_parameters['a']: expected a finite number; got inf"
    ),
    "parameters": wrong_type(
        lambda: poly_kan(X, C, basis="jacobi", basis_parameters=[1, 2]),
        "basis_parameters: expected a mapping of names to numbers; got list",
    ),
    "normalization": value(
        lambda: poly_kan(X, C, normalization="sigmoid"),
        "normalization: expected one of tanh, clamp, minmax, layer_norm, none; got 'sigmoid'",
    ),
    "evaluation": value(lambda: poly_kan(X, C, evaluation="table"), "evaluation: expected one of recurrence, lut; got 'table'"),
    "lut_size": value(lambda: poly_kan(X, C, evaluation="lut", lut_size=1), "lut_size: expected 2 to 1048576; got 1"),
    "lut without range": value(
        lambda: poly_kan(X, C, evaluation="lut", normalization="none"),
        "evaluation: expected 'recurrence', since a table covers [-1, 1] and normalization is 'none'; got 'lut'",
    ),
    "bounds without minmax": value(
        lambda: poly_kan(X, C, bounds=(0, 1)), "bounds: expected None, since normalization is not 'minmax'; got tuple"
    ),
    "bounds": wrong_type(lambda: poly_kan(X, C, normalization="minmax", bounds=3), "bounds: expected a pair (lowest, highest); got int"),
    "bounds' shape": value(
        lambda: poly_kan(X, C, normalization="minmax", bounds=(torch.zeros(2), 1)),
        "bounds[0]: expected a shape that broadcasts to (3,); got shape (2,)",
    ),
    "falling bounds": value(
        lambda: poly_kan(X, C, normalization="minmax", bounds=(2, -1)),
        "bounds: expected the lowest number not above the highest; got (2.0, -1.0)",
    ),
    "infinite bounds": value(
        lambda: poly_kan(X, C, normalization="minmax", bounds=(0, math.inf)), "bounds[1]: expected a finite number; got inf"
    ),
    "NaN for a bound": value(
        lambda: poly_kan(X, C, normalization="minmax", bounds=(math.nan, 1)), "bounds[0]: expected a finite number; got nan"
    ),
    "bounds of another library": wrong_type(
        lambda: poly_kan(X.numpy(), C.numpy(), normalization="minmax", bounds=(X[0], 1)),
        "bounds[0]: expected a NumPy array, like x; got torch.Tensor",
    ),
    "bounds' kind": wrong_type(
        lambda: poly_kan(X, C, normalization="minmax", bounds=(0, "1")), "bounds[1]: expected a number or a tensor; got str"
    ),
    "precision": value(lambda: poly_kan(X, C, precision="low"), "precision: expected None or one of highest, high, medium; got 'low'"),
}


def test_bad_input() -> None:
    assert_all_refused(BAD)
