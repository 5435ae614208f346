"""`PolyKANConv2d`: a convolution whose weights are learned functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastkron_py.nn.poly_kan_base import EdgeFunctions
from fastkron_py.runtime.checks import check_integer, check_pair, check_positive
from fastkron_py.runtime.errors import value_error


class PolyKANConv2d(EdgeFunctions):
    """``y[n, o, h, w] = bias[o] + sum over c, i, j of f_ocij(x[n, c, h * stride + i * dilation, w * stride + j * dilation])``.

    Windows of x are copied once, kernel height times width the size of x where strides are 1, and multiplied as `poly_kan` does it: the
    values of a basis, degree + 1 times as many again, are never stored. A kernel of 1 x 1 takes no copy of windows.

    Args:
        in_channels: of x, a multiple of groups.
        out_channels: of y, a multiple of groups.
        kernel_size: an integer, or (height, width).
        degree: as in `PolyKANLinear`.
        basis: as in `PolyKANLinear`.
        stride: an integer, or a pair.
        padding: zeros around x, whose functions count as any other number's: an integer, a pair, "valid" (none) or "same", which keeps
            height and width for strides of 1.
        dilation: an integer, or a pair.
        groups: number of parts of the channels, each with outputs of its own.
        **options: of `PolyKANLinear`: bias, basis_parameters, normalization, momentum, evaluation, lut_size, precision, device, dtype.
            The normalization "minmax" follows a range for each channel, and "layer_norm" is over the channels of a pixel.

    Shape:
        x ``[N, in_channels, H, W]`` or ``[in_channels, H, W]`` to ``[N, out_channels, H', W']`` or ``[out_channels, H', W']``, with
        H' and W' as of `torch.nn.Conv2d`; coefficients ``[degree + 1, out_channels, in_channels / groups, height, width]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes, a degree or parameters outside their range, channels that groups do not divide, unknown names.

    Example:
        >>> layer = PolyKANConv2d(3, 8, kernel_size=3, degree=4, padding=1)
        >>> layer(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        degree: int,
        basis: str = "chebyshev",
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        **options: Any,
    ) -> None:
        check_positive("groups", groups)
        for name, size in (("in_channels", in_channels), ("out_channels", out_channels)):
            if check_positive(name, size) % groups:
                raise value_error(name, f"a multiple of groups {groups}", size)
        kernel = check_pair("kernel_size", kernel_size, check_positive)
        super().__init__((out_channels, in_channels // groups, *kernel), in_channels, degree, basis, **options)
        self.in_channels, self.out_channels, self.groups, self.kernel_size = in_channels, out_channels, groups, kernel
        self.stride, self.dilation = check_pair("stride", stride, check_positive), check_pair("dilation", dilation, check_positive)
        self.padding = padding
        self._around = self._padded(padding)

    def _padded(self, padding: Any) -> tuple[int, int, int, int]:
        """Zeros (left, right, above, below)."""
        if isinstance(padding, str):
            if padding not in ("valid", "same"):
                raise value_error("padding", "an integer, a pair, 'valid' or 'same'", repr(padding))
            if padding == "valid":
                return 0, 0, 0, 0
            if self.stride != (1, 1):
                raise value_error("padding", "numbers, since 'same' is for strides of 1", f"'same' with stride {self.stride}")
            height, width = (d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True))
            return width // 2, width - width // 2, height // 2, height - height // 2
        above, left = check_pair("padding", padding, _check_zeros)
        return left, left, above, above

    def _features_last(self, x: Tensor) -> Tensor:
        return x.movedim(-3, -1)

    def _check(self, x: Any) -> None:
        super()._check(x)
        if x.ndim not in (3, 4) or x.shape[-3] != self.in_channels:
            raise value_error("x", f"[N, {self.in_channels}, H, W] or [{self.in_channels}, H, W]", f"shape {tuple(x.shape)}")
        left, right, above, below = self._around
        for name, size, zeros, d, k in zip("HW", x.shape[-2:], (above + below, left + right), self.dilation, self.kernel_size, strict=True):
            if size + zeros < d * (k - 1) + 1:
                raise value_error("x", f"{name} of at least {d * (k - 1) + 1 - zeros}, for a window", f"shape {tuple(x.shape)}")

    def _windows(self, x: Tensor) -> Tensor:
        """``[N, C, H, W]`` to ``[N, H', W', C * height * width]``."""
        if any(self._around):
            x = nn.functional.pad(x, self._around)
        for dim, size, step, apart in zip((2, 3), self.kernel_size, self.stride, self.dilation, strict=True):
            x = x.unfold(dim, apart * (size - 1) + 1, step)[..., ::apart]
        return x.permute(0, 2, 3, 1, 4, 5).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, in_channels, H, W]`` to ``[N, out_channels, H', W']``, or both without N."""
        self._check(x)
        batched = x if x.ndim == 4 else x.unsqueeze(0)
        found = self._range(self._features_last(batched))
        bounds = None if found is None else found[0]
        left = None
        if self.normalization == "layer_norm":
            left = "tanh"
            batched = nn.functional.layer_norm(self._features_last(batched), (self.in_channels,)).movedim(-1, 1)
        taps = self.kernel_size[0] * self.kernel_size[1]
        parts = []
        channels, outputs = self.in_channels // self.groups, self.out_channels // self.groups
        for g in range(self.groups):
            own = slice(g * channels, (g + 1) * channels)
            out = slice(g * outputs, (g + 1) * outputs)
            of_group = None if bounds is None else bounds[:, own].repeat_interleave(taps, 1)
            bias = None if self.bias is None else self.bias[out]
            parts.append(self._sums(self._windows(batched[:, own]), self.coefficients[:, out].flatten(2), of_group, bias, left))
        self._keep(found)
        y = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).movedim(-1, 1)
        return y if x.ndim == 4 else y.squeeze(0)

    def extra_repr(self) -> str:
        """The text of ``print(layer)``."""
        shown = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding!r}"
        more = (f", dilation={self.dilation}" if self.dilation != (1, 1) else "") + (f", groups={self.groups}" if self.groups > 1 else "")
        return f"{shown}{more}, {self._described()}"


def _check_zeros(name: str, value: Any) -> int:
    if check_integer(name, value) < 0:
        raise value_error(name, "at least 0", value)
    return int(value)
