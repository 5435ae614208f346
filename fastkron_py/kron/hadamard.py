"""`hadamard`: the Walsh-Hadamard transform of rows of length m * 2^k, a Kronecker product of constants."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from fastkron_py.kron.api import ArrayT, Scalar, kron_matmul
from fastkron_py.kron.hadamard_factors import factor_sizes, matrices, no_order, shrunk
from fastkron_py.kron.hadamard_matrices import MOST
from fastkron_py.runtime.arrays import find_bridge
from fastkron_py.runtime.checks import check_scalar
from fastkron_py.runtime.eager import TENSOR_TYPES
from fastkron_py.runtime.errors import type_error, value_error


def hadamard(x: ArrayT, *, scale: Scalar = 1.0, precision: str | None = None) -> ArrayT:
    """Multiply the last dimension with a Hadamard matrix: ``scale * x @ (H_m (x) H_(2^k))``, n = m * 2^k.

    H_(2^k) is Sylvester's matrix, ``H_2 (x) ... (x) H_2`` with ``H_2 = [[1, 1], [1, -1]]``, as in `scipy.linalg.hadamard`.
    m is 1 for powers of two. Else it is the smallest multiple of 4 with n's odd part that is the order of a known matrix:
    12, 20, 28, 36, ... 172 and more. Entries are 1 and -1: with ``scale=n ** -0.5`` the transform is orthogonal, as
    rotations of activations before quantisation are (QuaRot: Ashkboos et al., 2024).

    Args:
        x: ``[*, n]``. A torch tensor, or a NumPy or CuPy array; float16, bfloat16, float32, float64, complex64 or complex128.
        scale: scales the result before it is rounded: a finite number, or a 0-dimensional tensor (which gets a gradient).
        precision: as in `kron_matmul`.

    Returns:
        ``[*, n]``, of x's array type and dtype.

    Raises:
        TypeError: x is no array, or of another dtype.
        ValueError: x has no dimension, or n has no such m.

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
        with bridge.context():
            return bridge.give_back(hadamard(bridge.load(x, "x"), scale=scale, precision=precision))  # type: ignore[no-any-return]
    if x.ndim == 0:
        raise value_error("x", "at least one dimension", tuple(x.shape))
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise type_error("x", "a floating-point or complex dtype", x.dtype)
    if torch.compiler.is_compiling():
        from fastkron_py.kron import hadamard_constants  # whose decorator imports the compiler, and that Triton

        sizes = hadamard_constants.sizes(_length(x.shape[-1]), x.dtype)
        factors = [t.to(x.device) for t in hadamard_constants.matrices(sizes, x.dtype)]
    else:
        sizes = factor_sizes(x.shape[-1], x.dtype)
        factors = _kept(sizes, x.dtype, x.device) if type(x) in TENSOR_TYPES else [t.to(x.device) for t in matrices(sizes, x.dtype)]
    scale = check_scalar("scale", scale, x)
    y = kron_matmul(x.reshape(-1, x.shape[-1]), factors, alpha=scale * shrunk(sizes, x.dtype), precision=precision)
    return cast("ArrayT", y.view(x.shape))


def _length(n: int) -> int:
    """n, if it may be one of a transform, as a number that a compiler knows: a comparison makes its graph one of this length."""
    twos = next((k for k in range(63) if n % (2 << k)), 63)
    found = next((odd << twos for odd in range(1, MOST // 4, 2) if n == odd << twos), None)
    if found is None:
        raise no_order(n)
    return found


@lru_cache(maxsize=64)
def _kept(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Any]:
    """The factors on a device."""
    with torch.inference_mode(False), torch.no_grad():
        return [t.to(device) for t in matrices(sizes, dtype)]
