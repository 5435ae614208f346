"""`lokr_conv`: a convolution's result plus that of a low-rank Kronecker adapter whose second factor is a small kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from fastkron_py.adapters import api
from fastkron_py.adapters.api import cast_factor
from fastkron_py.adapters.composed import multiply, prepared
from fastkron_py.adapters.factor import Factor, Operands, check_factor, product
from fastkron_py.runtime.checks import check_scalar, check_tensor
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.precision import autocast_dtype, cast

_CONVOLUTIONS: Final[dict[int, Callable[..., Tensor]]] = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}
Sizes = tuple[int, ...]


class Kernel(NamedTuple):
    """The second factor of a convolution's LoKr weight, in one of LyCORIS's three forms.

    Attributes:
        core: the whole kernel ``[out2, in2, *window]``; with ``left`` alone ``[rank, in2, *window]``; in Tucker's form
            ``[rank, rank, *window]``.
        left: ``[out2, rank]`` or None.
        right: ``[rank, in2]`` in Tucker's form, else None.
    """

    core: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    @property
    def rows(self) -> int:
        """Outputs."""
        return int((self.core if self.left is None else self.left).shape[0])

    @property
    def columns(self) -> int:
        """Inputs."""
        return int((self.core if self.right is None else self.right).shape[1])

    @property
    def window(self) -> Sizes:
        """Sizes of the window."""
        return tuple(self.core.shape[2:])

    def map(self, function: Any) -> Kernel:
        """The kernel with a function applied to its tensors."""
        return Kernel(function(self.core), *[None if t is None else function(t) for t in self[1:]])

    def factor(self) -> Factor:
        """The kernel of one pixel, or one without a window, as a factor."""
        core = self.core.flatten(1)
        if self.right is not None:
            core = product(core, self.right)
        return Factor(core) if self.left is None else Factor(self.left, core)

    def expanded(self) -> Tensor:
        """The whole kernel, ``[out2, in2, *window]``."""
        core = self.core
        if self.right is not None:  # a sum over the second rank
            core = product(core.movedim(1, -1), self.right).movedim(-1, 1)
        return core if self.left is None else product(self.left, core)


class Window(NamedTuple):
    """How a convolution moves: as `torch.nn.Conv2d` has it; padding may be "same" or "valid"."""

    stride: Sizes
    padding: Sizes | str
    dilation: Sizes

    @classmethod
    def of(cls, layer: Any) -> Window:
        """The window of a layer of `torch.nn`."""
        return cls(layer.stride, layer.padding, layer.dilation)

    def is_pointwise(self, sizes: Sizes) -> bool:
        """Whether a kernel of these sizes multiplies each pixel by itself, at the same place."""
        unpadded = isinstance(self.padding, str) or not any(self.padding)
        return unpadded and max(sizes) == 1 and max(self.stride) == 1


def lokr_conv(x: Tensor, w1: Factor, w2: Kernel, window: Window, *, base: Tensor | None = None, scale: Any = 1.0) -> Tensor:
    """``base + scale * conv(x, kron(w1, w2))``, without the product: w2 convolves each of in1 groups of channels, w1 mixes the groups.

    X is ``[N, in1 * in2, *size]`` or without N, and the result ``[N, out1 * out2, *size']``. Factors are of x's dtype, or float32 beside a
    half dtype. Other dtypes raise TypeError; sizes that do not fit, and devices that differ, ValueError.
    """
    check_tensor("x", x, x, "x")
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, base = cast(x, dtype), cast(base, dtype)
        w1, w2 = Factor(*[cast_factor(t, dtype) for t in w1]), w2.map(lambda t: cast_factor(t, dtype))
        with without_autocast(x.device):  # of factors that are multiplied out
            return _checked_product(x, w1, w2, window, base, scale)
    return _checked_product(x, w1, w2, window, base, scale)


def _checked_product(x: Tensor, w1: Factor, w2: Kernel, window: Window, base: Tensor | None, scale: Any) -> Tensor:
    check_factor("w1", w1, x)
    _check_kernel(w2, x)
    if base is not None:
        check_tensor("base", base, x, "x")
    dims = len(w2.window)
    channels = w1.size.columns * w2.columns
    if x.ndim not in (dims + 1, dims + 2) or x.shape[-dims - 1] != channels:
        expected = f"{dims + 1} or {dims + 2} dimensions and {channels} = {w1.size.columns} * {w2.columns} channels"
        raise value_error("x", expected, f"shape {tuple(x.shape)}")
    scale = check_scalar("scale", scale, x)
    if x.ndim == dims + 1:
        y = _convolve(x.unsqueeze(0), w1, w2, window, None if base is None else base.unsqueeze(0), scale)
        return y.squeeze(0)
    return _convolve(x, w1, w2, window, base, scale)


def _check_kernel(w2: Kernel, x: Tensor) -> None:
    for label, t in zip(("w2", "w2's left matrix", "w2's right matrix"), w2, strict=True):
        if t is not None:
            check_tensor(label, t, x, "x", or_float32=True)
    if w2.core.ndim - 2 not in _CONVOLUTIONS:
        raise value_error("w2", "a kernel [out, in, *window] of a window of 1, 2 or 3 dimensions", f"shape {tuple(w2.core.shape)}")
    for label, matrix, size, axis in (("left", w2.left, w2.core.shape[0], 1), ("right", w2.right, w2.core.shape[1], 0)):
        if matrix is not None and (matrix.ndim != 2 or matrix.shape[axis] != size):
            raise value_error(f"w2's {label} matrix", f"a matrix whose dimension {axis} is the rank {size}", f"shape {tuple(matrix.shape)}")


def _convolve(x: Tensor, w1: Factor, w2: Kernel, window: Window, base: Tensor | None, scale: Any) -> Tensor:
    if isinstance(scale, Tensor | complex):
        w1, scale = w1.scaled(scale), 1.0
    w1 = w1.expanded()
    if window.is_pointwise(w2.window):
        return _pointwise(x, w1, w2, base, scale)
    w2 = w2 if w2.left is not None and _is_cheaper(w2) else Kernel(w2.expanded())
    groups = w1.size.columns
    h = x.unflatten(1, (groups, -1)).flatten(0, 1)  # [N * in1, in2, *size]
    if w2.right is not None:
        h = _mix(h, [w2.right])
    h = _CONVOLUTIONS[len(w2.window)](h, w2.core.to(x.dtype), None, *window)
    h = h.unflatten(0, (x.shape[0], groups)).flatten(1, 2)  # [N, in1 * (rank or out2), *size']
    if w2.left is not None:
        return _mix(h, [w1.left, w2.left], base, scale)
    # The modes behind w1's are out2 and the pixels: one mode.
    modes = h.unflatten(1, (groups, -1)).flatten(2)
    _check_base(base, (h.shape[0], w1.size.rows * w2.rows, *h.shape[2:]))
    z = None if base is None else base.unflatten(1, (w1.size.rows, -1)).flatten(2)
    y = multiply(modes, [w1.left], z, scale, left=True)
    return y.reshape(h.shape[0], w1.size.rows * w2.rows, *h.shape[2:])


def _is_cheaper(w2: Kernel) -> bool:
    """Whether the kernel's parts take fewer multiply-adds a pixel than the whole kernel. Its expansion is small beside the pixels."""
    taps = math.prod(w2.window)
    rank, inner = w2.core.shape[:2]
    parts = rank * inner * taps + w2.rows * rank + (inner * w2.columns if w2.right is not None else 0)
    return bool(parts < w2.rows * w2.columns * taps)


def _pointwise(x: Tensor, w1: Factor, w2: Kernel, base: Tensor | None, scale: Any) -> Tensor:
    """The convolution with a kernel of one pixel: a product with each pixel's channels."""
    factor = w2.factor()
    _check_base(base, (x.shape[0], w1.size.rows * w2.rows, *x.shape[2:]))
    if x.stride(1) == 1 and x.shape[1] > 1:  # channels_last: a pixel's channels lie side by side
        z = None if base is None else base.movedim(1, -1)
        return api.product(Operands(x.movedim(1, -1), w1, factor, z), scale, None).movedim(-1, 1)
    w1, factor = prepared(w1, factor, x.shape[0] * math.prod(x.shape[2:]), x)
    if factor.right is None:
        return _mix(x, [w1.left, factor.left], base, scale)
    hidden = _mix(x, [w1.left, factor.right])
    pixels = hidden.unflatten(1, (w1.size.rows, -1)).flatten(0, 1)
    z = None if base is None else base.unflatten(1, (w1.size.rows, -1)).flatten(0, 1)
    return _mix(pixels, [factor.left], z, scale).unflatten(0, (x.shape[0], w1.size.rows)).flatten(1, 2)


def _mix(x: Tensor, factors: list[Tensor], base: Tensor | None = None, scale: Any = 1.0) -> Tensor:
    """``base + scale * kron(*factors) @`` the channels of x ``[N, C, *size]``."""
    _check_base(base, (x.shape[0], math.prod([f.shape[0] for f in factors]), *x.shape[2:]))
    z = None if base is None else base.flatten(2)
    y = multiply(x.flatten(2), factors, z, scale, left=True)
    return y.reshape(*y.shape[:2], *x.shape[2:])


def _check_base(base: Tensor | None, shape: Sizes) -> None:
    if base is not None and tuple(base.shape) != tuple(shape):
        raise value_error("base", f"the result's shape {tuple(shape)}", f"shape {tuple(base.shape)}")
