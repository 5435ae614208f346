"""`hadamard`: the Walsh-Hadamard transform of rows of length m * 2^k, a Kronecker product of constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import index
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastkron_py.kron.api import ArrayT, kron_matmul
from fastkron_py.kron.api import Scalar as Scale
from fastkron_py.kron.families.butterfly import takes_transform, transform
from fastkron_py.kron.hadamard_orders import constants_of, factor_sizes, matrices, padded_matrix, shrunk, split
from fastkron_py.kron.plan.steps import is_even
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.arrays import find_bridge, through_bridge
from fastkron_py.runtime.backend import backend_of_call, choose_backend, is_interpreting
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.call_cache import CACHE, about
from fastkron_py.runtime.checks import HALF_DTYPES, can_write, check_out, check_scalar, check_tensor, is_same
from fastkron_py.runtime.eager import takes_fast_path
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.kernels import LaunchConfig, gluon_kernel
from fastkron_py.runtime.operator import GradientCall, Operator, Saved
from fastkron_py.runtime.precision import autocast_dtype
from fastkron_py.runtime.precision import cast as cast_tensor
from fastkron_py.runtime.program import Program, Scalar
from fastkron_py.runtime.torch_internals import constant_in_graphs

if TYPE_CHECKING:
    from fastkron_py.runtime.launch import Launcher

_LEAST_ALONE: Final = 6  # bits that are transformed by a launch of their own in float64: faster than factors in as many launches
kernel: Final = partial(gluon_kernel, "kron.kernels.butterfly", "_hadamard_fwd_kernel")  # None where this Triton cannot compile it
_REGISTERS: Final = 128  # of a thread with m > 1, at most: two programs on a multiprocessor


def hadamard(
    x: ArrayT,
    *,
    scale: Scale = 1.0,
    transpose: bool = False,
    signs: ArrayT | None = None,
    precision: str | None = None,
    out: ArrayT | None = None,
) -> ArrayT:
    """Multiply the last dimension with a Hadamard matrix: ``scale * (signs * x) @ (H_m (x) H_(2^k))``, n = m * 2^k.

    H_(2^k) is Sylvester's matrix, ``H_2 (x) ... (x) H_2`` with ``H_2 = [[1, 1], [1, -1]]``, as in `scipy.linalg.hadamard`.
    m is 1 for powers of two. Else it is the smallest multiple of 4 with n's odd part that is the order of a known matrix:
    12, 20, 28, 36, ... 172 and more, up to 1024. Entries are 1 and -1. With ``scale=n ** -0.5`` the transform is orthogonal, as in
    rotations of activations before quantization (QuaRot: Ashkboos et al., 2024). For most m (12, 20, 44, 52, 60 and 68 among them) H is
    not symmetric, and its inverse is ``transpose=True``.

    Args:
        x: ``[*, n]``. A torch tensor, or a NumPy or CuPy array; float16, bfloat16, float32, float64, complex64 or complex128.
        scale: scales the result before it is rounded: a finite number, or a 0-dimensional tensor (which gets a gradient).
        transpose: multiply with the transposed matrix, and by the signs afterwards: with ``scale=1 / n`` the inverse, for the same signs.
        signs: ``[n]`` of x's dtype, 1 and -1 as a rule: multiplies x's columns first (a random diagonal). It takes a launch of its own.
        precision: as in `kron_matmul`.
        out: ``[*, n]``, a tensor of the result's dtype: the result is written there. It may be x. No gradient can be recorded, as with
            every ``out=`` of torch.

    Returns:
        ``[*, n]``, out itself or contiguous, of x's array type and dtype (under autocast, of autocast's dtype).

    Raises:
        TypeError: x is not an array, or has another dtype; signs or out is not a tensor of its dtype; transpose is not a bool.
        ValueError: x has no dimension, n has no such m, signs has another shape, or out has another shape or device, or out is given
            while another argument requires a gradient.

    Example:
        >>> x = torch.randn(100, 14336)  # 28 * 512
        >>> y = hadamard(x, scale=14336**-0.5)
        >>> torch.allclose(y.square().sum(1), x.square().sum(1), rtol=1e-4)
        True
    """
    key = None
    if out is None and signs is None and type(scale) is float and not torch.compiler.is_compiling():
        key = "hadamard", scale, transpose, precision
        entry = CACHE.find(key, (x,))
        if entry is not None:
            return cast("ArrayT", entry.call((x,), entry.options))
    if not isinstance(x, Tensor):
        if out is not None:
            raise type_error("out", f"None, since x is {find_bridge([x], ['x']).noun}", type_name(out))
        transformed = partial(hadamard, scale=scale, transpose=transpose, precision=precision)
        arrays = {"x": x} if signs is None else {"x": x, "signs": signs}
        found = through_bridge(arrays, lambda loaded: transformed(loaded["x"], signs=loaded.get("signs")), {"scale": scale})
        return cast("ArrayT", found)
    check_tensor("x", x, x, "x")
    if x.ndim == 0:
        raise value_error("x", "at least one dimension", tuple(x.shape))
    if not isinstance(transpose, bool):
        raise type_error("transpose", "a bool", type_name(transpose))
    if signs is not None:
        return cast("ArrayT", _with_signs(x, signs, transpose, out, {"scale": scale, "precision": precision}))
    dtype = autocast_dtype(x)
    t = x if dtype is None else cast_tensor(x, dtype)
    scale = check_scalar("scale", scale, x)
    if out is not None:
        check_out(out, t.shape, t, [t, scale if isinstance(scale, Tensor) else None])
    function = _transform(t, scale, transpose, precision, cast("Tensor | None", out))
    y = function(t)
    if key is not None and dtype is None and takes_fast_path((x,)):
        m, bits = split(x.shape[-1])
        entry = operator.entry((x, None), (scale, m, bits, backend_of_call()))  # of additions without a matrix: that call, with this scale
        if entry is None:
            CACHE.keep(key, (x,), None, lambda given, _: function(*given), (), operator.name)
        else:
            CACHE.keep(key, (x,), entry.program, entry.call, (scale, *entry.options[1:]), operator.name)
    return cast("ArrayT", y if out is None or y is out else cast("Tensor", out).copy_(y))


def _with_signs(x: Tensor, signs: Any, transpose: bool, out: Any, options: dict[str, Any]) -> Any:
    """The transform with a diagonal matrix before it, or behind the transposed one; options are scale and precision."""
    check_tensor("signs", signs, x, "x")
    if signs.shape != x.shape[-1:]:
        raise value_error("signs", f"shape {tuple(x.shape[-1:])}, one for each column of x", f"shape {tuple(signs.shape)}")
    if not transpose:
        return hadamard(x * signs, out=out, **options)
    if out is not None:
        check_out(out, x.shape, out, [x, signs])
        signs = signs if can_write([signs], out, False) else signs.clone()  # which may lie in out
    y = hadamard(x, transpose=True, out=out, **options)
    return y * signs.to(y.dtype) if out is None else y.mul_(signs)


def _transform(x: Tensor, scale: Any, transpose: bool, precision: str | None, out: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The transform of tensors like x: by additions where a kernel has them, to out if it can be written; else by the factors."""
    n, shape = index(x.shape[-1]), x.shape  # a graph that is compiled or traced is one of this length
    backend = backend_of_call()
    m, bits = split(n)
    adds = not isinstance(scale, Tensor)
    if adds and has_additions(m, bits, x.dtype, x.device, backend):
        (matrix,) = _turned(constants_of(padded_matrix, (m,), x.device), transpose)
        options = scale, m, bits, backend
        if out is not None and x.numel() and can_write([x], out, True):
            return lambda x: _write(x, matrix, options, out)
        return lambda x: cast("Tensor", operator(x, matrix, *options))
    if adds and x.dtype == torch.float64 and bits >= _LEAST_ALONE and has_additions(1, bits, x.dtype, x.device, backend):
        parts = [*_turned(constants_of(matrices, ((m,), x.dtype), x.device), transpose), 1 << bits]

        def by_parts(x: Tensor) -> Tensor:
            y: Tensor = operator(kron_matmul(x.reshape(-1, n), parts).view(*shape[:-1], m, 1 << bits), None, scale, 1, bits, backend)
            return y.view(shape)

        return by_parts
    sizes = factor_sizes(n, x.device.type)
    factors, alpha = _turned(constants_of(matrices, (sizes, x.dtype), x.device), transpose), scale * shrunk(sizes, x.dtype)
    return lambda x: kron_matmul(x.reshape(-1, n), factors, alpha=alpha, precision=precision).view(shape)


def _turned(made: Sequence[Any], transpose: bool) -> Sequence[Any]:
    """The matrices, transposed if wanted; Sylvester's are symmetric."""
    return [None if t is None else t.mT for t in made] if transpose else made


def _write(x: Tensor, matrix: Tensor | None, options: tuple[Any, ...], out: Tensor) -> Tensor:
    """Write the transform to out, which may be x; options are the operator's."""
    given = [t for t in (x, matrix, None if is_same(x, out) else out) if t is not None]
    key = "hadamard_into", is_same(x, out), *options[1:], *about(given), x.device
    CACHE.program(key, lambda: program((x, matrix), options, out))(given, options[:1])
    increment_version(out)  # a backward pass that has saved x raises, as after torch's own writes
    return out


# ---- the launch -----------------------------------------------------------------------------------


@constant_in_graphs
def has_additions(m: int, bits: int, dtype: torch.dtype, device: torch.device, backend: str) -> bool:
    """Whether rows of m * 2^bits elements are transformed by additions in one launch, rather than multiplied by factors."""
    return device.type == "cuda" and _has_additions(m, bits, dtype, device, backend)


@lru_cache(maxsize=256)
def _has_additions(m: int, bits: int, dtype: torch.dtype, device: torch.device, backend: str) -> bool:
    if is_interpreting() or not torch.cuda.is_available():  # a fake tensor's GPU may not be there
        return False
    return choose_backend(backend, torch.empty(0, dtype=dtype, device=device)) != "torch" and has_launch(m, bits, dtype, device)


def has_launch(m: int, bits: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a launch for rows of m * 2^bits elements on a GPU that Triton compiles for."""
    gpu = devices.gpu_of(device)
    if gpu.capability is None or dtype.is_complex or not takes_transform(m, bits, dtype.itemsize, gpu.shared_memory):
        return False
    return kernel() is not None


def hadamard_launch(x: Tensor, matrix: Tensor | None, m: int, bits: int) -> Launcher:
    """The launch from x ``[rows, m * 2^bits]``, with neighbours in memory, the padded matrix, None where m is 1, and y, with the scale."""
    from fastkron_py.runtime.launch import Launcher

    found = transform(m, bits, x.element_size())
    at_once = (1 << found.tile) // found.row
    arguments = {
        "rows": x.shape[0],
        "x_stride": x.stride(0),
        "y_stride": x.shape[1],
        "h_strides": (0, 0) if matrix is None else matrix.stride(),
        "M": m,
        "BITS": bits,
        "TILE": found.tile,
        "ROW": found.row,
        "LOADED": tuple(found.loaded),
        "ORDER": found.order,
        "PHASES": tuple([tuple(phase) for phase in found.phases]),
        "COUNT": len(found.phases),
        "EVEN": m << bits == found.row and is_even(x.shape[0], 1, at_once),
        "WARPS": found.num_warps,
        "num_warps": found.num_warps,
        "maxnreg": _REGISTERS if m > 1 else None,
    }
    return Launcher([LaunchConfig(kernel(), (math.ceil(x.shape[0] / at_once),), arguments)])


# ---- the operator ---------------------------------------------------------------------------------


def program(tensors: Sequence[Any], options: tuple[Any, ...], out: Tensor | None = None) -> Program:
    """Tensors are x and the matrix of order m; options the scale, m, k and the backend.

    With out it writes the result there, and returns nothing: to x, or to one more tensor.
    """
    _, m, bits, backend = options
    build = Builder([*tensors, None if out is None or is_same(tensors[0], out) else out])
    x, matrix, target = build.inputs
    if x.numel() == 0 or choose_backend(backend, tensors[0]) == "torch":

        def by_torch(*given: Any) -> Tensor:
            x, *matrices, scale = given
            return _in_torch(x, matrices[0] if matrices else None, scale, m, bits)

        operands = (x,) if matrix is None else (x, matrix)
        return build.program([build.call(by_torch, operands, describe(x.shape, x.dtype), scalars=(Scalar(0),))])
    n = x.shape[-1]
    rows = build.reshape(x, (x.numel() // n, n))
    if rows.stride(1) != 1:
        rows = build.contiguous(rows)
    y = build.empty(rows.shape, x.dtype) if out is None else rows if target is None else target.view(rows.shape)
    build.launch(hadamard_launch(rows, matrix, m, bits), (rows, rows if matrix is None else matrix, y), (Scalar(0),))
    return build.program([y], [x.shape]) if out is None else build.program([])


def _in_torch(x: Tensor, matrix: Tensor | None, scale: float, m: int, bits: int) -> Tensor:
    """The same by torch's operations."""
    y = x.to(torch.float32 if x.dtype in HALF_DTYPES else x.dtype).reshape(-1, m, 1 << bits)
    if matrix is not None:
        y = matrix[:m, :m].to(y.dtype).mT @ y
    for bit in range(bits):
        a, b = y.reshape(-1, 2, 1 << bit).unbind(1)
        y = torch.stack([a + b, a - b], 1)
    return (y.reshape(x.shape) * scale).to(x.dtype)


def _gradient_call(saved: Saved, dy: Tensor) -> GradientCall:
    _, matrix = saved.tensors
    return GradientCall(operator, (dy, None if matrix is None else matrix.mT), saved.options, (0, None))


def _jvp(saved: Saved, tangents: Sequence[Tensor | None]) -> Any:
    return operator(tangents[0], saved.tensors[1], *saved.options)


operator = Operator(
    "hadamard(Tensor x, Tensor? matrix, float scale, int m, int bits, str backend) -> Tensor",
    program=program,
    fake=lambda x, *_: x.new_empty(x.shape),
    gradient_call=_gradient_call,
    jvp=_jvp,
    vmap="rows",
    unsaved=(0,),
    scalars=(0,),
)
