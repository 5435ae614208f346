"""What `gated_linear` and `gated_mlp` refuse, and in which words."""

from __future__ import annotations

import torch
from refusals import Refusal, assert_all_refused, value, wrong_type

from fastkron_py import gated_linear
from fastkron_py.functional import gated_mlp

X, W, S = torch.randn(5, 3), torch.randn(8, 3), torch.randn(2, 4, 3)
BAD: dict[str, Refusal] = {
    "x of another kind": wrong_type(lambda: gated_linear([1.0], W), "x: expected a torch tensor, a NumPy array or a CuPy array; got list"),
    "no x": wrong_type(lambda: gated_linear(None, W), "x: expected a torch tensor, a NumPy array or a CuPy array; got None"),
    "x of integers": wrong_type(
        lambda: gated_linear(X.long(), W.long()),
        "x: expected a dtype among float16, bfloat16, float32, float64, complex64, complex128; got torch.int64",
    ),
    "complex x": wrong_type(
        lambda: gated_linear(X + 0j, W + 0j), "x: expected a real dtype among float16, bfloat16, float32, float64; got torch.complex64"
    ),
    "a number": value(lambda: gated_linear(X[0, 0], W), "x: expected at least one dimension [..., in]; got a 0-dimensional tensor"),
    "dtypes": wrong_type(lambda: gated_linear(X, W.double()), "weight: expected x's dtype torch.float32; got torch.float64"),
    "stacked for interleaved": value(
        lambda: gated_linear(X, S), "weight: expected [2 * hidden, in], since layout is 'interleaved'; got shape (2, 4, 3)"
    ),
    "odd rows": value(lambda: gated_linear(X, W[:7]), "weight: expected [2 * hidden, in], since layout is 'interleaved'; got shape (7, 3)"),
    "interleaved for stacked": value(
        lambda: gated_linear(X, W, layout="stacked"), "weight: expected [2, hidden, in], since layout is 'stacked'; got shape (8, 3)"
    ),
    "three for stacked": value(
        lambda: gated_linear(X, torch.randn(3, 4, 3), layout="stacked"),
        "weight: expected [2, hidden, in], since layout is 'stacked'; got shape (3, 4, 3)",
    ),
    "inputs": value(lambda: gated_linear(X, torch.randn(8, 5)), "weight: expected a last dimension of x's 3 inputs; got shape (8, 5)"),
    "bias": value(
        lambda: gated_linear(X, S, layout="stacked", bias=torch.randn(8)),
        "bias: expected shape (2, 4), that of the weight's rows; got shape (8,)",
    ),
    "bias of another kind": wrong_type(lambda: gated_linear(X, W, bias=3), "bias: expected a torch tensor, like x; got int"),
    "down": value(lambda: gated_mlp(X, W, torch.randn(3, 8)), "down: expected [out, 4], the weight's hidden size; got shape (3, 8)"),
    "down of another dtype": wrong_type(
        lambda: gated_mlp(X, W, torch.randn(3, 4).half()), "down: expected x's dtype torch.float32; got torch.float16"
    ),
    "down_bias": value(
        lambda: gated_mlp(X, S, torch.randn(3, 4), layout="stacked", down_bias=torch.randn(4)),
        "down_bias: expected shape (3,), that of down's rows; got shape (4,)",
    ),
    "activation": value(
        lambda: gated_linear(X, W, activation="swish"),
        "activation: expected one of clamped_swiglu, gelu, gelu_tanh, identity, mish, quick_gelu, relu, relu2, sigmoid, silu; got 'swish'",
    ),
    "activation of another kind": wrong_type(
        lambda: gated_linear(X, W, activation=torch.nn.functional.silu),
        "activation: expected one of clamped_swiglu, gelu, gelu_tanh, identity, mish, quick_gelu, relu, relu2, sigmoid, silu; got function",
    ),
    "layout": value(lambda: gated_linear(X, W, layout="packed"), "layout: expected one of interleaved, stacked; got 'packed'"),
    "layout of another kind": wrong_type(lambda: gated_linear(X, W, layout=2), "layout: expected one of interleaved, stacked; got int"),
    "backward": value(lambda: gated_linear(X, W, backward="checkpoint"), "backward: expected one of save, recompute; got 'checkpoint'"),
    "precision": value(lambda: gated_linear(X, W, precision="low"), "precision: expected None or one of highest, high, medium; got 'low'"),
}


def test_bad_input() -> None:
    assert_all_refused(BAD)
