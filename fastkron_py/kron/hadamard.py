"""`hadamard`: the Walsh-Hadamard transform of rows of length m * 2^k, a Kronecker product of constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastkron_py.kron import hadamard_factors
from fastkron_py.kron.api import ArrayT, Scalar, kron_matmul
from fastkron_py.kron.hadamard_factors import LEAST_ALONE, shrunk
from fastkron_py.kron.hadamard_program import program
from fastkron_py.runtime.arrays import find_bridge
from fastkron_py.runtime.backend import requested_backend
from fastkron_py.runtime.call_cache import CACHE, about
from fastkron_py.runtime.checks import can_write, check_out, check_scalar, check_tensor, is_same
from fastkron_py.runtime.eager import constants
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.operator import Operator, Saved
from fastkron_py.runtime.precision import autocast_dtype
from fastkron_py.runtime.precision import cast as cast_tensor
from fastkron_py.runtime.program import Program


def hadamard(x: ArrayT, *, scale: Scalar = 1.0, precision: str | None = None, out: ArrayT | None = None) -> ArrayT:
    """Multiply the last dimension with a Hadamard matrix: ``scale * x @ (H_m (x) H_(2^k))``, n = m * 2^k.

    H_(2^k) is Sylvester's matrix, ``H_2 (x) ... (x) H_2`` with ``H_2 = [[1, 1], [1, -1]]``, as in `scipy.linalg.hadamard`.
    m is 1 for powers of two. Else it is the smallest multiple of 4 with n's odd part that is the order of a known matrix:
    12, 20, 28, 36, ... 172 and more. Entries are 1 and -1: with ``scale=n ** -0.5`` the transform is orthogonal, as
    rotations of activations before quantisation are (QuaRot: Ashkboos et al., 2024).

    Args:
        x: ``[*, n]``. A torch tensor, or a NumPy or CuPy array; float16, bfloat16, float32, float64, complex64 or complex128.
        scale: scales the result before it is rounded: a finite number, or a 0-dimensional tensor (which gets a gradient).
        precision: as in `kron_matmul`.
        out: ``[*, n]``, a tensor of the result's dtype: the result is written there. It may be x. No gradient can be recorded, as with
            every ``out=`` of torch.

    Returns:
        ``[*, n]``, out itself or contiguous, of x's array type and dtype (under autocast, of autocast's dtype).

    Raises:
        TypeError: x is no array, or of another dtype; out is no tensor of its dtype.
        ValueError: x has no dimension, n has no such m, or out has another shape or device, or beside arguments that require a gradient.

    Example:
        >>> x = torch.randn(100, 14336)  # 28 * 512
        >>> y = hadamard(x, scale=14336**-0.5)
        >>> torch.allclose(y.square().sum(1), x.square().sum(1), rtol=1e-4)
        True
    """
    if not isinstance(x, Tensor):
        bridge = find_bridge([x], ["x"])
        if isinstance(scale, Tensor):
            raise type_error("scale", f"a number, since x is {bridge.noun}", "a torch tensor")
        if out is not None:
            raise type_error("out", f"None, since x is {bridge.noun}", type_name(out))
        with bridge.context():
            return bridge.give_back(hadamard(bridge.load(x, "x"), scale=scale, precision=precision))  # type: ignore[no-any-return]
    check_tensor("x", x, x, "x")
    if x.ndim == 0:
        raise value_error("x", "at least one dimension", tuple(x.shape))
    dtype = autocast_dtype(x)
    t = x if dtype is None else cast_tensor(x, dtype)
    scale = check_scalar("scale", scale, x)
    if out is not None:
        check_out(out, t.shape, t, [t, scale if isinstance(scale, Tensor) else None])
    y = _transformed(t, scale, precision, cast("Tensor | None", out))
    return cast("ArrayT", y if out is None or y is out else cast("Tensor", out).copy_(y))


def _transformed(x: Tensor, scale: Any, precision: str | None, out: Tensor | None) -> Tensor:
    """By additions where a kernel has them, to out if it can be written; else by the factors."""
    source: Any = hadamard_factors
    n = index(x.shape[-1])  # a graph that is compiled or traced is one of this length
    backend = ""
    make: Callable[..., Sequence[Any]] = _in_graph
    if torch.compiler.is_compiling():
        from fastkron_py.kron import hadamard_constants as source  # whose decorator imports the compiler, and that Triton
    else:
        backend, make = requested_backend(), constants
    m, bits = source.split(n)

    def has_additions(m: int) -> bool:
        return not isinstance(scale, Tensor) and source.has_additions(m, bits, x.dtype, x.device, backend)

    if has_additions(m):
        (matrix,) = make(source.padded_matrix, (m,), x.device)
        if out is not None and x.numel() and can_write([x], out, True):
            return _write(x, matrix, (scale, m, bits, backend), out)
        return _added(x, matrix, (scale, m, bits, backend))
    if x.dtype == torch.float64 and bits >= LEAST_ALONE and has_additions(1):  # faster than factors in as many launches
        parts = kron_matmul(x.reshape(-1, n), [*make(source.matrices, ((m,), x.dtype), x.device), 1 << bits])
        y: Tensor = operator(parts.view(*x.shape[:-1], m, 1 << bits), None, scale, 1, bits, backend)
        return y.view(x.shape)
    sizes = source.factor_sizes(n)
    factors = make(source.matrices, (sizes, x.dtype), x.device)
    y = kron_matmul(x.reshape(-1, n), factors, alpha=scale * shrunk(sizes, x.dtype), precision=precision)
    return y.view(x.shape)


def _added(x: Tensor, matrix: Tensor | None, options: tuple[Any, ...]) -> Tensor:
    """By additions; options are the operator's."""
    if torch.compiler.is_compiling():
        return cast("Tensor", operator(x, matrix, *options))
    given = (x,) if matrix is None else (x, matrix)
    entry = CACHE.find(operator.name, given)  # a program is that of a shape, for any scale
    y: Tensor = operator(x, matrix, *options, key=operator.name) if entry is None else entry(given, options)
    return y


def _write(x: Tensor, matrix: Tensor | None, options: tuple[Any, ...], out: Tensor) -> Tensor:
    """Write the transform to out, which may be x; options are the operator's."""
    given = [t for t in (x, matrix, None if is_same(x, out) else out) if t is not None]
    key = "hadamard_into", is_same(x, out)
    entry = CACHE.find(key, given)
    if entry is None:
        made = CACHE.program((*key, *options[1:], *about(given), x.device), lambda: program((x, matrix), options, out))
        made(given, options[:1])
        CACHE.keep(key, given, made, _run, options, operator.name)
    else:
        entry(given, options)
    increment_version(out)  # a backward pass that has saved x raises, as after torch's own writes
    return out


def _run(made: Program, given: Sequence[Tensor], options: tuple[Any, ...]) -> None:
    """Run a program that returns nothing."""
    made(given, options[:1])


def _in_graph(make: Callable[..., Sequence[Any]], arguments: tuple[Any, ...], device: torch.device) -> list[Any]:
    """Constants of a graph that is being compiled, on a device; None stays what it is."""
    return [None if t is None else t.to(device) for t in make(*arguments)]


# ---- the operator ---------------------------------------------------------------------------------


def _fake(x: Tensor, matrix: Tensor | None, scale: float, m: int, bits: int, backend: str) -> Tensor:
    return x.new_empty(x.shape)


def _backward(saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    _, matrix = saved.tensors
    return operator(dy, None if matrix is None else matrix.mT, *saved.options), None


def _jvp(saved: Saved, tangents: Sequence[Tensor | None]) -> Any:
    return operator(tangents[0], saved.tensors[1], *saved.options)


def _vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    return operator(tensors[0].movedim(dims[0], 0), tensors[1], *options), 0


operator = Operator(
    "hadamard(Tensor x, Tensor? matrix, float scale, int m, int bits, str backend) -> Tensor",
    program=program,
    fake=_fake,
    backward=_backward,
    jvp=_jvp,
    vmap=_vmap,
    unsaved=(0,),
    scalars=(0,),
)
