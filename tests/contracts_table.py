"""The table of contracts: every public function, with random arguments, its definition, and what it does not support.

A contract is what users of torch expect of any function: test_functions.py states each once, for all rows. Rooms' own tests add what is
theirs alone. docs/reference/contracts.md is made of this table by page.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastkron_py
from fastkron_py import KroneckerProduct, KroneckerSum, reference
from fastkron_py.functional import gated_mlp, layer_norm_rational, linear_rational, rational_linear

HALF = (torch.float16, torch.bfloat16)
REAL = (torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)

Draw = Callable[..., Tensor]
"""From a shape to random numbers of a case's dtype."""


CONTRACTS = {
    "values": "float16, bfloat16, float32, float64 and complex numbers as listed, on both backends, agree with the definition in float64",
    "gradients": "`torch.autograd.gradcheck` on both backends; a second backward pass gives the same, and one for a tensor alone",
    "second derivatives": "`torch.autograd.gradgradcheck`",
    "third derivatives": "of a loss of the result, against those of the definition",
    "batches of gradients": "`torch.autograd.grad(is_grads_batched=True)`, also of gradients, and vectorized Jacobians in both modes",
    "writes in place": "to the result or an argument before the backward pass, which raises or is right",
    "jvp": "`torch.func.jvp`, and tangents of the incoming gradient of a cached call",
    "vmap": "`torch.func.vmap` over all tensors, and over the first alone; also inside `torch.compile`, with gradients",
    "opcheck": "`torch.library.opcheck` of each operator that the call and its backward pass use, without what those below compile",
    "compile": "`torch.compile(fullgraph=True)`, forward and backward",
    "compile, any number of rows": "the same with `dynamic=True`: one graph for all numbers of rows",
    "export": "`torch.export.export`, saved, loaded, run on other tensors, of any number of rows",
    "export, strict": "the same with `strict=True`",
    "jit.trace": "`torch.jit.trace`, run on other tensors",
    "fake tensors": "under `FakeTensorMode`, before and after a real call; the real call stays right",
    "meta tensors": "tensors on the device meta give the result's shape, dtype and device",
    "functionalize": "`torch.func.functionalize`, and a plain call afterwards; with another transform it is right or raises an error",
    "default device": 'inside `torch.device("meta")`, and a plain call afterwards',
    "inference mode": "inside `torch.inference_mode()`, and a call with gradients afterwards",
    "autocast": "inside `torch.autocast` to bfloat16, twice",
    "arrays": "NumPy arrays that are read-only; the result shares no memory with them, or is read-only",
    "arrays of the other byte order": "NumPy arrays of `>f8`",
    "no rows": "a first tensor without rows: an empty result, and gradients of zeros",
    "strides": "tensors with gaps between elements, and transposed ones, on both backends",
    "conjugate and negative views": "`t.conj()` and `t.conj().imag`, twice",
    "sparse tensors": "a sparse first tensor raises an error that names it, or the result is right",
    "dtypes that differ": "integers with float64 raise an error that names them",
}
"""What test_functions.py checks, by name."""


class Unsupported(NamedTuple):
    """What a function does not support: the error that it raises, part of its text, and the reason in a phrase.

    Without an error the contract has no meaning for the function, such as a gradient of rounded values.
    """

    reason: str
    error: type[BaseException] | tuple[type[BaseException], ...] | None = None
    text: str = ""


class Function(NamedTuple):
    """A public function.

    Attributes:
        name: as a user writes it.
        make: its tensors, random; the first has the rows.
        call: the function of these tensors.
        definition: the same in plain torch, for float64.
        dtypes: of the tensors.
        steps: roundings on the way, for tolerances of 16-bit floats (`fastkron_py.testing`).
        slack: a factor on the tolerance, where a definition's condition is worse than a product's.
        within: the RMS error of every dtype instead, where the function rounds by itself.
        unsupported: by contract.
        rows: whether the first tensor's first dimension is any number, also 0, and the result's first, too.
        arrays: whether it takes NumPy arrays.
        autocast: whether autocast's dtype is the result's.
        backends: whose kernels differ.
    """

    name: str
    make: Callable[[Draw], Sequence[Tensor]]
    call: Callable[..., Any]
    definition: Callable[..., Tensor]
    dtypes: Sequence[torch.dtype] = (*HALF, *REAL)
    steps: int = 2
    slack: float = 1.0
    within: float | None = None
    unsupported: Mapping[str, Unsupported] = {}
    rows: bool = True
    arrays: bool = True
    autocast: bool = True
    backends: Sequence[str] = ("torch", "triton")


OfOperator = partial(Function, slack=10, rows=False, arrays=False)
"""A method of a lazy operator, which solves or decomposes."""


def _dense_modes(x: Tensor, f0: Tensor, f2: Tensor) -> Tensor:
    return torch.einsum("abc,aA,cC->AbC", x, f0, f2)


def _hadamard(x: Tensor) -> Tensor:
    h = torch.ones(1, 1, dtype=x.dtype)
    while h.shape[0] < x.shape[-1]:
        h = reference.kron_dense([torch.tensor([[1, 1], [1, -1]], dtype=x.dtype), h])
    return x @ h / x.shape[-1] ** 0.5


def _gate(x: Tensor, up: Tensor, gate: Tensor) -> Tensor:
    return F.silu(x @ gate.mT) * (x @ up.mT)


def _chebyshev(x: Tensor, c: Tensor, bias: Tensor) -> Tensor:
    t, values = x.tanh(), [torch.ones_like(x), x.tanh()]
    while len(values) < len(c):
        values.append(2 * t * values[-1] - values[-2])
    return torch.einsum("d...j,doj->...o", torch.stack(values[: len(c)]), c) + bias


def _spd(f: Tensor) -> Tensor:
    """A Hermitian positive definite matrix from any."""
    return f @ f.mH / f.shape[-1] + torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)


def _regular(f: Tensor) -> Tensor:
    """A well-conditioned matrix that is not symmetric."""
    return f / (2 * f.shape[-1]) + torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    eye = [torch.eye(len(m), dtype=m.dtype, device=m.device) for m in (a, b)]
    return reference.kron_dense([a, eye[1]]) + reference.kron_dense([eye[0], b])


def _eye(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)


def _two(fs: Sequence[Tensor]) -> Any:
    return KroneckerProduct([_spd(f) for f in fs[:2]]) + KroneckerProduct([_spd(f) for f in fs[2:]])


def _two_dense(fs: Sequence[Tensor]) -> Tensor:
    return reference.kron_dense([_spd(f) for f in fs[:2]]) + reference.kron_dense([_spd(f) for f in fs[2:]])


def _tall(f: Tensor) -> Tensor:
    """A well-conditioned matrix of full rank."""
    return f / 4 + torch.eye(*f.shape, dtype=f.dtype, device=f.device)


def _edges(f: Tensor) -> Tensor:
    """A Laplacian of a path, whose null vectors are constants, with weights from a matrix."""
    d = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).diff(dim=0)
    return d.mT @ ((1 + f[..., :1].abs() ** 2) * d)


KEPT = [0, 1, 3, 4, 6, 9, 10, 11]


def _gaps(k: KroneckerProduct) -> Any:
    return k.masked(rows=KEPT, columns=KEPT).add_diagonal(0.5)


def _density(b: Tensor, a: Tensor) -> Tensor:
    return b @ torch.linalg.solve(a, b) + torch.linalg.slogdet(a)[1]


_READ = "reads indices by NumPy"
_CHECKED = "checks the points when the operator is made"
_READS = "reads from the factors' values whether they are Hermitian"
_DATA = r"[Dd]ata.dependent|_local_scalar_dense|tolist|guard"
EIGENVECTORS = {
    "vmap": Unsupported(_READS + "; factors take batch dimensions instead", ValueError, "batch dimensions in place of torch.func.vmap"),
    "functionalize": Unsupported(_READS, (ValueError, RuntimeError), "value can be read|Functionalize"),
    **{c: Unsupported(_READS, Exception, _DATA) for c in ("compile", "export", "export, strict", "fake tensors")},
}
NO_JVP = Unsupported("there is no forward mode", NotImplementedError, "jvp")
OF_LOGDET = {
    "jvp": NO_JVP,
    "third derivatives": Unsupported("derivatives are of two orders", NotImplementedError, "logdet: .* the third are not"),
}
FIRST_ORDER = Unsupported("derivatives by factors are of the first order", NotImplementedError, "none of the second")

NO_GRADIENT = Unsupported("rounded values have no gradient")
ROUNDED = {
    c: NO_GRADIENT for c in ("gradients", "second derivatives", "third derivatives", "batches of gradients", "writes in place", "jvp")
}

FUNCTIONS: list[Function] = [
    Function(
        "kron_matmul(x, factors)",
        lambda draw: [draw(6, 12), draw(3, 4), draw(4, 5)],
        lambda x, *fs: fastkron_py.kron_matmul(x, fs),
        lambda x, *fs: reference.kron_matmul(x, fs),
        (*HALF, *REAL, *COMPLEX),
    ),
    Function(
        "kron_matmul(x, factors, alpha=, beta=, z=)",
        lambda draw: [draw(6, 12), draw(3, 4), draw(4, 2), draw(6, 8)],
        lambda x, a, b, z: fastkron_py.kron_matmul(x, [a, b], alpha=1.5, beta=-0.5, z=z),
        lambda x, a, b, z: 1.5 * reference.kron_matmul(x, [a, b]) - 0.5 * z,
        (*HALF, *REAL, *COMPLEX),
        steps=3,
    ),
    Function(
        "kron_matmul_left(factors, x)",
        lambda draw: [draw(12, 6), draw(4, 3), draw(5, 4)],
        lambda x, *fs: fastkron_py.kron_matmul_left(fs, x),
        lambda x, *fs: reference.kron_matmul(x, fs, left=True),
        (*HALF, *REAL, *COMPLEX),
        rows=False,
    ),
    Function(
        "mode_matmul(x, {0: f0, 2: f2})",
        lambda draw: [draw(3, 5, 4), draw(3, 2), draw(4, 6)],
        lambda x, a, b: fastkron_py.mode_matmul(x, {0: a, 2: b}),
        _dense_modes,
        (*HALF, *REAL, *COMPLEX),
        rows=False,
    ),
    Function(
        "mode_matmul(x, {(0, 2): f}, sizes=)",
        lambda draw: [draw(3, 5, 4), draw(12, 10)],
        lambda x, f: fastkron_py.mode_matmul(x, {(0, 2): f}, sizes={(0, 2): (2, 5)}),
        lambda x, f: torch.einsum("abc,acAC->AbC", x, f.reshape(3, 4, 2, 5)),
        (*HALF, *REAL, *COMPLEX),
        rows=False,
    ),
    Function(
        "mode_matmul(x, {1: a batch, 2: f2})",
        lambda draw: [draw(3, 5, 4), draw(3, 5, 2), draw(4, 6)],
        lambda x, a, b: fastkron_py.mode_matmul(x, {1: a, 2: b}),
        lambda x, a, b: torch.einsum("abc,abB,cC->aBC", x, a, b),
        (*HALF, *REAL, *COMPLEX),
        rows=False,
    ),
    Function(
        "khatri_rao_matmul(matrices, coefficients)",
        lambda draw: [draw(6, 3), draw(6, 4), draw(12, 2)],
        lambda a, b, c: fastkron_py.khatri_rao_matmul([a, b], c),
        lambda a, b, c: torch.einsum("np,nq->npq", a, b).flatten(1) @ c,
        (*HALF, *REAL, *COMPLEX),
        rows=False,
    ),
    Function(
        "khatri_rao_matmul(matrices, y, transpose=True)",
        lambda draw: [draw(6, 3), draw(6, 4), draw(6, 2)],
        lambda a, b, y: fastkron_py.khatri_rao_matmul([a, b], y, transpose=True),
        lambda a, b, y: torch.einsum("np,nq->npq", a, b).flatten(1).mT @ y,
        (*HALF, *REAL, *COMPLEX),
        rows=False,
    ),
    Function(
        "hadamard(x, scale=)",
        lambda draw: [draw(6, 16)],
        lambda x: fastkron_py.hadamard(x, scale=0.25),
        _hadamard,
        (*HALF, *REAL, *COMPLEX),
    ),
    Function(
        "kron_quantize(x, factors, torch.int8)",
        lambda draw: [draw(6, 12), draw(3, 4), draw(4, 5)],
        lambda x, *fs: fastkron_py.kron_quantize(x, fs, torch.int8).dequantize(),
        lambda x, *fs: reference.kron_matmul(x, fs),
        within=0.01,  # half a step of int8 is 0.4% of a row's largest element
        unsupported=ROUNDED,
        arrays=False,
        autocast=False,
    ),
    Function(
        "kron_quantize(x, [n, Hadamard], torch.int8)",
        lambda draw: [draw(6, 32)],
        lambda x: fastkron_py.kron_quantize(x, [2, fastkron_py.Hadamard(16, 0.25)], torch.int8).dequantize(),
        lambda x: _hadamard(x.unflatten(-1, (2, 16))).flatten(-2),
        within=0.01,
        unsupported=ROUNDED,
        arrays=False,
        autocast=False,
    ),
    Function(
        'kron_quantize(x, [n, Hadamard], torch.float4_e2m1fn_x2, group_size=, scale_format="e8m0")',
        lambda draw: [draw(6, 64)],
        lambda x: fastkron_py.kron_quantize(
            x, [4, fastkron_py.Hadamard(16, 0.25)], torch.float4_e2m1fn_x2, group_size=32, scale_format="e8m0"
        ).dequantize(),
        lambda x: _hadamard(x.unflatten(-1, (4, 16))).flatten(-2),
        within=0.26,  # a step of float4 is a third of its largest number, and up to a quarter of a row's is clipped
        unsupported={
            **ROUNDED,
            **{
                c: Unsupported("torch knows no float4 there", Exception, "float4|aten::view")
                for c in ("export", "export, strict", "jit.trace")
            },
        },
        arrays=False,
        autocast=False,
    ),
    Function(
        'kron_quantize(gate_and_up, [n, Hadamard], torch.int8, prologue=("swiglu",))',
        lambda draw: [draw(6, 64)],
        lambda x: fastkron_py.kron_quantize(x, [2, fastkron_py.Hadamard(16, 0.25)], torch.int8, prologue=("swiglu",)).dequantize(),
        lambda x: _hadamard((F.silu(x[..., :32]) * x[..., 32:]).unflatten(-1, (2, 16))).flatten(-2),
        within=0.01,
        unsupported=ROUNDED,
        arrays=False,
        autocast=False,
    ),
    Function(
        'kron_quantize(x, [n, Hadamard], torch.int8, prologue=("rms_norm", weight, eps))',
        lambda draw: [draw(6, 32), draw(32)],
        lambda x, w: fastkron_py.kron_quantize(
            x, [2, fastkron_py.Hadamard(16, 0.25)], torch.int8, prologue=("rms_norm", w, 1e-5)
        ).dequantize(),
        lambda x, w: _hadamard(F.rms_norm(x, x.shape[-1:], w, 1e-5).unflatten(-1, (2, 16))).flatten(-2),
        within=0.01,
        unsupported=ROUNDED,
        arrays=False,
        autocast=False,
    ),
    Function(
        "kron_quantize(x, factors, torch.int8, group_size=)",
        lambda draw: [draw(6, 12), draw(3, 4), draw(4, 5)],
        lambda x, *fs: fastkron_py.kron_quantize(x, fs, torch.int8, group_size=10).dequantize(),
        lambda x, *fs: reference.kron_matmul(x, fs),
        within=0.01,
        unsupported=ROUNDED,
        arrays=False,
        autocast=False,
    ),
    Function(
        "lokr_linear(x, w1, (a, b), base=)",
        lambda draw: [draw(6, 12), draw(2, 3), draw(5, 2), draw(2, 4), draw(6, 10)],
        lambda x, w1, a, b, base: fastkron_py.lokr_linear(x, w1, (a, b), base=base, scale=0.5),
        lambda x, w1, a, b, base: reference.lokr_linear(x, w1, (a, b), base=base, scale=0.5),
        (*HALF, *REAL, *COMPLEX),
        steps=4,
    ),
    Function(
        "gated_linear(x, (up, gate))",
        lambda draw: [draw(6, 8), draw(5, 8), draw(5, 8)],
        lambda x, up, gate: fastkron_py.gated_linear(x, (up, gate)),
        _gate,
        steps=4,
    ),
    Function(
        "gated_linear(x, weight, layout='stacked', backward='recompute')",
        lambda draw: [draw(6, 8), draw(2, 5, 8)],
        lambda x, w: fastkron_py.gated_linear(x, w, layout="stacked", backward="recompute"),
        lambda x, w: _gate(x, w[0], w[1]),
        steps=4,
    ),
    Function(
        "functional.gated_mlp(x, weight, down)",
        lambda draw: [draw(6, 8), draw(10, 8), draw(3, 5)],
        lambda x, w, down: gated_mlp(x, w, down),
        lambda x, w, down: _gate(x, w[0::2], w[1::2]) @ down.mT,
        steps=6,
    ),
    Function(
        "poly_kan(x, coefficients, bias=)",
        lambda draw: [draw(6, 4), draw(4, 3, 4), draw(3)],
        lambda x, c, bias: fastkron_py.poly_kan(x, c, bias=bias),
        _chebyshev,
        steps=8,
        slack=4,
    ),
    Function(
        "rational(x, numerator, denominator)",
        lambda draw: [draw(6, 8), draw(2, 4), draw(2, 3)],
        lambda x, a, b: fastkron_py.rational(x, a, b),
        reference.rational,
        steps=4,
        slack=4,
    ),
    Function(
        "functional.rational_linear(x, numerator, denominator, weight, bias)",
        lambda draw: [draw(6, 8), draw(2, 4), draw(2, 3), draw(5, 8), draw(5)],
        rational_linear,
        lambda x, a, b, w, bias: reference.rational(x, a, b) @ w.mT + bias,
        steps=6,
        slack=4,
        arrays=False,
    ),
    Function(
        "functional.linear_rational(x, weight, bias, numerator, denominator)",
        lambda draw: [draw(6, 8), draw(4, 8), draw(4), draw(2, 4), draw(2, 3)],
        linear_rational,
        lambda x, w, bias, a, b: reference.rational(x @ w.mT + bias, a, b),
        steps=16,
        slack=16,
        arrays=False,
    ),
    Function(
        "functional.layer_norm_rational(x, weight, bias, numerator, denominator)",
        lambda draw: [draw(6, 8), draw(8), draw(8), draw(2, 4), draw(2, 3)],
        layer_norm_rational,
        lambda x, w, bias, a, b: reference.rational(F.layer_norm(x, x.shape[-1:], w, bias), a, b),
        steps=8,
        slack=8,
        arrays=False,
    ),
    Function(
        "KroneckerProduct(factors) @ b",
        lambda draw: [draw(12, 6), draw(4, 3), draw(5, 4)],
        lambda b, *fs: KroneckerProduct(fs) @ b,
        lambda b, *fs: reference.kron_dense(fs) @ b,
        (*HALF, *REAL, *COMPLEX),
        rows=False,
    ),
    OfOperator(
        "KroneckerProduct(factors).solve(b)",
        lambda draw: [draw(12, 2), draw(3, 3), draw(4, 4)],
        lambda b, f, g: KroneckerProduct([_regular(f), _regular(g)]).solve(b),
        lambda b, f, g: torch.linalg.solve(reference.kron_dense([_regular(f), _regular(g)]), b),
        (*REAL, *COMPLEX),
    ),
    OfOperator(
        "KroneckerProduct(factors).logdet()",
        lambda draw: [draw(3, 3), draw(4, 4)],
        lambda f, g: KroneckerProduct([_spd(f), _spd(g)]).logdet(),
        lambda f, g: torch.linalg.slogdet(reference.kron_dense([_spd(f), _spd(g)]))[1],
        REAL,
    ),
    OfOperator(
        "KroneckerProduct(factors).add_diagonal(s).solve(b)",
        lambda draw: [draw(12, 2), draw(3, 3), draw(4, 4)],
        lambda b, f, g: KroneckerProduct([_spd(f), _spd(g)]).add_diagonal(0.5).solve(b),
        lambda b, f, g: torch.linalg.solve(reference.kron_dense([_spd(f), _spd(g)]) + 0.5 * _eye(12, f), b),
        (*REAL, *COMPLEX),
        unsupported=EIGENVECTORS,
    ),
    OfOperator(
        "KroneckerProduct(factors).add_diagonal(s).logdet()",
        lambda draw: [draw(3, 3), draw(4, 4)],
        lambda f, g: KroneckerProduct([_spd(f), _spd(g)]).add_diagonal(0.5).logdet(),
        lambda f, g: torch.linalg.slogdet(reference.kron_dense([_spd(f), _spd(g)]) + 0.5 * _eye(12, f))[1],
        REAL,
        unsupported={**EIGENVECTORS, **OF_LOGDET},
    ),
    OfOperator(
        "KroneckerProduct(factors).apply_function(torch.exp) @ b",
        lambda draw: [draw(12, 2), draw(3, 3), draw(4, 4)],
        lambda b, f, g: KroneckerProduct([_spd(f) / 4, _spd(g) / 4]).apply_function(torch.exp) @ b,
        lambda b, f, g: torch.linalg.matrix_exp(reference.kron_dense([_spd(f) / 4, _spd(g) / 4])) @ b,
        REAL,
        unsupported={
            **EIGENVECTORS,
            **{c: FIRST_ORDER for c in ("second derivatives", "third derivatives", "batches of gradients")},
        },
    ),
    Function(
        "KroneckerSum(factors) @ b",
        lambda draw: [draw(12, 6), draw(3, 3), draw(4, 4)],
        lambda b, f, g: KroneckerSum([f, g]) @ b,
        lambda b, f, g: _sum(f, g) @ b,
        (*REAL, *COMPLEX),
        slack=4,
        rows=False,
    ),
    OfOperator(
        "KroneckerSum(factors).solve(b)",
        lambda draw: [draw(12, 2), draw(3, 3), draw(4, 4)],
        lambda b, f, g: KroneckerSum([_regular(f), _regular(g)]).solve(b),
        lambda b, f, g: torch.linalg.solve(_sum(_regular(f), _regular(g)), b),
        (*REAL, *COMPLEX),
        unsupported=EIGENVECTORS,
    ),
    OfOperator(
        "KroneckerSum(factors).logdet()",
        lambda draw: [draw(3, 3), draw(4, 4)],
        lambda f, g: KroneckerSum([_spd(f), _spd(g)]).logdet(),
        lambda f, g: torch.linalg.slogdet(_sum(_spd(f), _spd(g)))[1],
        REAL,
        unsupported={**EIGENVECTORS, **OF_LOGDET},
    ),
    OfOperator(
        "KroneckerSum(factors).expm_multiply(b)",
        lambda draw: [draw(12, 2), draw(3, 3), draw(4, 4)],
        lambda b, f, g: KroneckerSum([f / 4, g / 4]).expm_multiply(b),
        lambda b, f, g: torch.linalg.matrix_exp(_sum(f / 4, g / 4)) @ b,
        (*REAL, *COMPLEX),
    ),
    Function(
        "(K1 + K2) @ b",
        lambda draw: [draw(12, 6), draw(3, 3), draw(4, 4), draw(3, 3), draw(4, 4)],
        lambda b, *fs: (KroneckerProduct(fs[:2]) - 2 * KroneckerProduct(fs[2:])) @ b,
        lambda b, *fs: (reference.kron_dense(fs[:2]) - 2 * reference.kron_dense(fs[2:])) @ b,
        (*REAL, *COMPLEX),
        slack=4,
        rows=False,
    ),
    OfOperator(
        "(K1 + K2).solve(b)",
        lambda draw: [draw(12, 2), draw(3, 3), draw(4, 4), draw(3, 3), draw(4, 4)],
        lambda b, *fs: _two(fs).solve(b),
        lambda b, *fs: torch.linalg.solve(_two_dense(fs), b),
        (*REAL, *COMPLEX),
        unsupported=EIGENVECTORS,
    ),
    OfOperator(
        "(K1 + K2).logdet()",
        lambda draw: [draw(3, 3), draw(4, 4), draw(3, 3), draw(4, 4)],
        lambda *fs: _two(fs).logdet(),
        lambda *fs: torch.linalg.slogdet(_two_dense(fs))[1],
        REAL,
        unsupported={**EIGENVECTORS, **OF_LOGDET},
    ),
    OfOperator(
        "KroneckerProduct(factors).masked(rows=, columns=).add_diagonal(s).inv_quad_logdet(b)",
        lambda draw: [draw(8), draw(3, 3), draw(4, 4)],
        lambda b, f, g: sum(_gaps(KroneckerProduct([_spd(f), _spd(g)])).inv_quad_logdet(b)),
        lambda b, f, g: _density(b, (reference.kron_dense([_spd(f), _spd(g)]) + 0.5 * _eye(12, f))[KEPT][:, KEPT]),
        REAL,
        unsupported={
            **{c: Unsupported(_CHECKED, Exception, _DATA) for c in ("compile", "export", "export, strict", "fake tensors")},
            "meta tensors": Unsupported(_CHECKED, RuntimeError, "meta tensors"),
            "default device": Unsupported("indices in a list are read where tensors are made by default", TypeError, "rows: expected"),
        },
    ),
    OfOperator(
        "KroneckerSum(factors).solve(b, rcond=)",
        lambda draw: [draw(12, 2), draw(3, 4), draw(2, 3)],
        lambda b, f, g: KroneckerSum([_edges(f), _edges(g)]).solve(b, rcond=1e-5),
        lambda b, f, g: torch.linalg.pinv(_sum(_edges(f), _edges(g)), rtol=1e-5) @ b,
        (*REAL, *COMPLEX),
        slack=100,
        unsupported=EIGENVECTORS,
    ),
    OfOperator(
        "KroneckerProduct(factors).lstsq(b)",
        lambda draw: [draw(12, 2), draw(3, 2), draw(4, 3)],
        lambda b, f, g: KroneckerProduct([_tall(f), _tall(g)]).lstsq(b),
        lambda b, f, g: torch.linalg.pinv(reference.kron_dense([_tall(f), _tall(g)])) @ b,
        (*REAL, *COMPLEX),
        slack=100,
    ),
    Function(
        "KroneckerProduct(factors)[rows]",
        lambda draw: [draw(3, 2), draw(4, 4)],
        lambda f, g: KroneckerProduct(f, g)[KEPT],
        lambda f, g: reference.kron_dense([f, g])[KEPT],
        (*REAL, *COMPLEX),
        unsupported={
            **{c: Unsupported(_READ, Exception, "ndarray") for c in ("compile", "export, strict")},
        },
        rows=False,
    ),
]
