"""Layers of polynomial Kolmogorov-Arnold networks: `PolyKANLinear`, stacks of them, `KAN`, and convolutions, `PolyKANConv2d`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastkron_py.kan.api import LUT_SIZE, check_arguments, own_bounds, poly_kan, usable_bounds
from fastkron_py.kan.bases.registry import find_basis
from fastkron_py.nn.modules import Configured, is_materialized
from fastkron_py.nn.running_range import RecentBounds, is_set
from fastkron_py.runtime.backend import backend
from fastkron_py.runtime.checks import (
    check_finite,
    check_flag,
    check_integer,
    check_pair,
    check_positive,
    check_precision,
    check_real_dtype,
    check_type,
)
from fastkron_py.runtime.errors import type_error, type_name, value_error

# ---- a basis, its range, and how coefficients are sampled ------------------------------------------


_SAMPLES: Final = 4096  # of the normalised argument, over which a basis's mean square is taken
_UNSET: Final = (math.inf, -math.inf)


class EdgeFunctions(Configured):
    """Learned functions in one basis, of inputs whose range may be followed; layers say which input goes to which output.

    Args:
        shape: ``[outputs, inputs, ...]`` of the coefficients of each function of the basis.
        features: inputs with a range of their own.
        degree: as in `PolyKANLinear`, and so the rest.
    """

    coefficients: nn.Parameter
    bias: nn.Parameter | None
    low: Tensor | None
    high: Tensor | None

    def __init__(
        self,
        shape: tuple[int, ...],
        features: int,
        degree: int,
        basis: str,
        *,
        bias: bool = False,
        basis_parameters: Mapping[str, float] | None = None,
        normalization: str | None = None,
        momentum: float = 0.1,
        evaluation: str = "recurrence",
        lut_size: int = LUT_SIZE,
        precision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        degree = check_integer("degree", degree)
        if not 0 < check_finite("momentum", momentum, "a number above 0, up to 1") <= 1:
            raise value_error("momentum", "a number above 0, up to 1", momentum)
        check_precision(precision)
        # By default those of all parameters: torch's.
        if dtype is not None:
            check_real_dtype("dtype", dtype)
        if normalization is None:
            normalization = find_basis(basis).normalization
        check_arguments(basis, basis_parameters, normalization, evaluation, lut_size, degree + 1)
        self.degree, self.basis, self.normalization = degree, basis, normalization
        self.basis_parameters = dict(basis_parameters or {})
        self.momentum, self.evaluation, self.lut_size, self.precision = float(momentum), evaluation, lut_size, precision
        if normalization == "minmax":
            # Beyond each other until a batch, or update_grid, sets them.
            for name, bound in zip(("low", "high"), _UNSET, strict=True):
                self.register_buffer(name, torch.full((features,), bound, device=device, dtype=dtype))
            self._recent = RecentBounds()
        else:
            self.low = self.high = None  # no buffers: torch.export miscounts behind one that is None
        self.coefficients = nn.Parameter(torch.empty(degree + 1, *shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if check_flag("bias", bias) else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sample the coefficients again; a bias becomes 0, and a running range is set by the next batch."""
        if is_materialized(self.coefficients):
            inputs = math.prod(self.coefficients.shape[2:])
            self.coefficients.normal_(0.0, 1 / math.sqrt(inputs * float(self._mean_squares().sum())))
        if self.bias is not None:
            self.bias.zero_()
        if self.low is not None and self.high is not None:
            self.low.fill_(_UNSET[0])
            self.high.fill_(_UNSET[1])

    def _mean_squares(self) -> Tensor:
        """The mean square of each function of the basis, for standard normal x (uniform ones in a range): ``[degree + 1]``."""
        from fastkron_py.kan.normalizers import NORMALIZERS

        uniform = (torch.arange(_SAMPLES, dtype=torch.float64, device="cpu") + 0.5) / _SAMPLES
        if self.normalization in ("minmax", "none"):
            t = 2 * uniform - 1
        else:
            normal = torch.special.ndtri(uniform)
            t = NORMALIZERS["clamp" if self.normalization == "clamp" else "tanh"].host(normal)
        parameters = tuple(self._all_parameters().values())
        return torch.stack([value.square().mean() for value in find_basis(self.basis).values(t, self.degree + 1, parameters)])

    def _all_parameters(self) -> dict[str, float]:
        """The basis's parameters, given or by default."""
        return {name: float(self.basis_parameters.get(name, default)) for name, default in find_basis(self.basis).parameters.items()}

    def configuration(self) -> dict[str, Any]:
        """The functions that the coefficients multiply."""
        functions = {"basis": self.basis, "basis_parameters": self._all_parameters(), "degree": self.degree}
        return {**functions, "normalization": self.normalization}

    @torch.no_grad()
    def set_range(self, low: Tensor, high: Tensor) -> None:
        """Set the range of every input, ``[in_features]`` each.

        Raises:
            TypeError: the bounds are not tensors.
            ValueError: the layer's normalization is not "minmax", or bounds of another shape, not finite or falling.
        """
        if self.low is None or self.high is None:
            raise value_error("normalization", "'minmax', whose range this sets", repr(self.normalization))
        check_range(low, high, self.low)
        self.low.copy_(low)
        self.high.copy_(high)

    @torch.no_grad()
    def update_grid(self, x: Tensor) -> None:
        """Set the range of every input, or channel, and with it the grid of B-splines, to that of x, which is shaped as for the layer.

        The coefficients stay, so the functions are stretched with their grid.

        Raises:
            TypeError: x is no tensor of real numbers.
            ValueError: the layer's normalization is not "minmax", or x has another number of inputs, or none that is finite of one.
        """
        self._check(x)
        low, high = own_bounds(self._features_last(x))
        if not bool(is_set(low, high).all()):
            raise value_error("x", "a finite number of every input", f"none of input {int((~is_set(low, high)).nonzero()[0])}")
        self.set_range(low, high)

    def _check(self, x: Any) -> None:
        """Raise an error for anything but a tensor of real numbers; layers check the shape."""
        check_type("x", x, Tensor, "a torch tensor")
        if not x.is_floating_point():
            raise type_error("x", "a real floating-point dtype", x.dtype)

    def _features_last(self, x: Tensor) -> Tensor:
        """X as ``[..., features]``."""
        return x

    def _range(self, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The range ``[2, features]`` for ``x [..., features]``, and the running range after a training batch, of the same shape.

        The host does not read the numbers.
        """
        if self.low is None or self.high is None:
            return None  # torch.export rejects a region without gradients that has no result; so do writes, below
        with torch.no_grad():
            wide = torch.promote_types(self.low.dtype, torch.float32)  # 16-bit floats cannot hold the difference of their largest numbers
            running = torch.stack([self.low, self.high]).to(wide)
            if not self.training or x.numel() == 0:
                return running, None
            return self._recent.follow(torch.stack(own_bounds(x)).to(wide), running, self.momentum)

    def _keep(self, found: tuple[Tensor, Tensor | None] | None) -> None:
        """Move the running range, once nothing can go wrong any more."""
        after = None if found is None else found[1]
        if after is None or self.low is None or self.high is None:
            return
        self.low.copy_(after[0])
        self.high.copy_(after[1])

    def _sums(
        self, x: Tensor, coefficients: Tensor, bounds: Tensor | None, bias: Tensor | None, normalization: str | None = None
    ) -> Tensor:
        """`poly_kan` with this layer's options and bounds ``[2, in]``; another normalization where a part of it has been done."""
        return poly_kan(
            x,
            coefficients,
            basis=self.basis,
            bias=bias,
            basis_parameters=self.basis_parameters or None,
            normalization=normalization or self.normalization,
            bounds=None if bounds is None else usable_bounds(bounds[0], bounds[1]),
            evaluation=self.evaluation,
            lut_size=self.lut_size,
            precision=self.precision,
        )

    def _described(self) -> str:
        """The last part of ``extra_repr``."""
        shown = f"degree={self.degree}, basis={self.basis!r}, bias={self.bias is not None}, normalization={self.normalization!r}"
        return shown + (", evaluation='lut'" if self.evaluation == "lut" else "")


def check_range(low: Any, high: Any, like: Tensor) -> None:
    """Two tensors of finite numbers, as many as like has. The first are not above the second."""
    for name, bound in (("low", low), ("high", high)):
        check_type(name, bound, Tensor, f"a tensor [{len(like)}]")
        if bound.shape != like.shape:
            raise value_error(name, f"shape ({len(like)},)", f"shape {tuple(bound.shape)}")
    if not bool(is_set(low, high).all()):
        raise value_error("low", "finite numbers, and none above high", f"{low.tolist()} and {high.tolist()}")


# ---- linear layers ---------------------------------------------------------------------------------


class PolyKANLinear(EdgeFunctions):
    """``y[..., o] = bias[o] + sum_j f_oj(x[..., j])``: a learned function on every edge, each a sum over one basis (`poly_kan`).

    Coefficients are sampled from a normal distribution. Its variance is chosen such that y has variance 1 for a standard normal x.
    ChebyKAN's distribution, N(0, 1 / (in * (degree + 1))), makes layers whose outputs shrink.

    Args:
        in_features: inputs, at least 1.
        out_features: outputs, at least 1.
        degree: functions of the basis besides the first, 1 to 64.
        basis: as in `poly_kan`.
        bias: add a learned ``[out_features]``. Most bases include a constant term, so no bias is needed.
        basis_parameters: as in `poly_kan`.
        normalization: as in `poly_kan`; None is the basis's own (`Basis.normalization`). "minmax" follows the range of
            the inputs seen in training, as a running mean with `momentum`; the first batch sets it. Numbers that are not finite are left
            out. The second run of a batch by `torch.utils.checkpoint` uses the range of the first, if the batch is among the layer's
            latest 64 to 4,096 (those that fit in 1 MiB).
        momentum: of the running range: the weight of a new batch.
        evaluation: as in `poly_kan`.
        lut_size: as in `poly_kan`.
        precision: as in `poly_kan`.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        x ``[..., in_features]`` to ``[..., out_features]``; coefficients ``[degree + 1, out_features, in_features]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes below 1, a degree or parameters outside their range, unknown names.

    Example:
        >>> layer = PolyKANLinear(8, 3, degree=4)
        >>> layer(torch.randn(100, 8)).shape
        torch.Size([100, 3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        degree: int,
        basis: str = "chebyshev",
        *,
        bias: bool = False,
        basis_parameters: Mapping[str, float] | None = None,
        normalization: str | None = None,
        momentum: float = 0.1,
        evaluation: str = "recurrence",
        lut_size: int = LUT_SIZE,
        precision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check_positive(name, size)
        super().__init__(
            (out_features, in_features),
            in_features,
            degree,
            basis,
            bias=bias,
            basis_parameters=basis_parameters,
            normalization=normalization,
            momentum=momentum,
            evaluation=evaluation,
            lut_size=lut_size,
            precision=precision,
            device=device,
            dtype=dtype,
        )
        self.in_features, self.out_features = in_features, out_features

    def _check(self, x: Any) -> None:
        super()._check(x)
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise value_error("x", f"a last dimension of {self.in_features}", f"shape {tuple(x.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        self._check(x)
        found = self._range(x)
        y = self._sums(x, self.coefficients, None if found is None else found[0], self.bias)
        self._keep(found)
        return y

    def extra_repr(self) -> str:
        """The text of ``print(layer)``."""
        return f"{self.in_features}, {self.out_features}, {self._described()}"

    @torch.no_grad()
    def edge(self, output: int, input: int, x: Tensor) -> Tensor:
        """The function on one edge, at the points ``x [n]``: ``[n]``, in float64.

        Raises:
            TypeError: the indices are not integers, or x is not a tensor.
            ValueError: indices outside the layer, another shape of x, or "layer_norm", under which an input's function depends on the
                others.
        """
        self._check_edge(output, input, x)
        alone = torch.zeros(x.numel(), self.in_features, dtype=torch.float64, device="cpu")
        alone[:, input] = x.to("cpu", torch.float64)
        bounds = None if self.low is None or self.high is None else torch.stack([self.low, self.high]).cpu().double()
        one = torch.zeros(self.in_features, dtype=torch.float64, device="cpu")
        one[input] = 1
        kept = self.coefficients[:, output : output + 1].cpu().double() * one
        with backend("torch"):
            return self._sums(alone, kept, bounds, None)[:, 0]

    def _check_edge(self, output: Any, input: Any, x: Any) -> None:
        for name, index, count in (("output", output, self.out_features), ("input", input, self.in_features)):
            if not 0 <= check_integer(name, index) < count:
                raise value_error(name, f"0 to {count - 1}", index)
        check_type("x", x, Tensor, "a torch tensor")
        if x.ndim != 1:
            raise value_error("x", "shape [n]", f"shape {tuple(x.shape)}")
        if self.normalization == "layer_norm":
            raise value_error("normalization", "one that takes each input by itself", "'layer_norm'")

    def plot(self, outputs: Sequence[int] | None = None, inputs: Sequence[int] | None = None, span: tuple[float, float] = (-3, 3)) -> Any:
        """Draw the learned functions, one axis for each edge, with matplotlib.

        Args:
            outputs: rows of the picture; None takes the first four.
            inputs: columns; None takes the first four.
            span: of x.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: "layer_norm", under which an input's function depends on the others, or an edge that is not there.
        """
        pyplot = import_module("matplotlib.pyplot")
        rows = list(range(min(4, self.out_features))) if outputs is None else list(outputs)
        columns = list(range(min(4, self.in_features))) if inputs is None else list(inputs)
        x = torch.linspace(*span, 201, dtype=torch.float64)
        size = (2.2 * len(columns), 1.8 * len(rows))
        figure, axes = pyplot.subplots(len(rows), len(columns), squeeze=False, sharex=True, figsize=size, layout="constrained")
        for r, o in enumerate(rows):
            for c, i in enumerate(columns):
                axes[r][c].plot(x.numpy(), self.edge(o, i, x).numpy())
                axes[r][c].set_title(f"x{i} to y{o}", fontsize=8)
        return figure


class KAN(nn.Sequential):
    """Layers `PolyKANLinear` of these widths, one after the other.

    Args:
        widths: of the input, of every hidden layer and of the output; two at least.
        degree: of every layer.
        basis: of every layer.
        **options: of every layer.

    Shape:
        x ``[..., widths[0]]`` to ``[..., widths[-1]]``.

    Raises:
        TypeError: widths is not a sequence.
        ValueError: fewer than two.

    Example:
        >>> KAN([2, 16, 1], degree=6)(torch.randn(100, 2)).shape
        torch.Size([100, 1])
    """

    def __init__(self, widths: Sequence[int], degree: int, basis: str = "chebyshev", **options: Any) -> None:
        if isinstance(widths, str | bytes) or not hasattr(widths, "__getitem__"):
            raise type_error("widths", "a list or tuple of integers", type_name(widths))
        if len(widths) < 2:
            raise value_error("widths", "at least two widths", list(widths))
        super().__init__(*[PolyKANLinear(i, o, degree, basis, **options) for i, o in pairwise(widths)])


# ---- initial coefficients --------------------------------------------------------------------------


@torch.no_grad()
def smooth_init_(model: nn.Module, power: float = 2.0) -> nn.Module:
    """Sample the coefficients of every `PolyKANLinear` in a model again, those of degree d with a deviation proportional to ``d^-power``.

    Outputs keep variance 1, as after `PolyKANLinear.reset_parameters`, where all degrees weigh the same (power 0): there a layer of a high
    degree begins as a rough function, and stays rough where few examples constrain it. Degree 0 weighs as much as degree 1, and of a
    Fourier basis d is the frequency (`Basis.frequency`). Biases become 0.

    Args:
        model: a layer, or a module with layers in it.
        power: how fast higher degrees fall off, at least 0.

    Returns:
        The model.

    Raises:
        TypeError: power is not a number.
        ValueError: a power below 0, no such layer, or one over a basis without degrees, such as B-splines.

    Example:
        >>> kan = smooth_init_(KAN([2, 16, 1], degree=8))
    """
    if check_finite("power", power) < 0:
        raise value_error("power", "a finite number of at least 0", power)
    layers = [m for m in model.modules() if isinstance(m, PolyKANLinear)]
    if not layers:
        raise value_error("model", "one with PolyKANLinear layers", type_name(model))
    frequencies = [_frequencies(layer) for layer in layers]  # an error before any layer is sampled
    for layer, each in zip(layers, frequencies, strict=True):
        shares = each.clamp(min=1) ** -power
        scale = 1 / torch.sqrt(layer.in_features * (shares.square() * layer._mean_squares()).sum())
        layer.coefficients.normal_().mul_((shares * scale).to(layer.coefficients)[:, None, None])
        if layer.bias is not None:
            layer.bias.zero_()
    return model


def _frequencies(layer: PolyKANLinear) -> Tensor:
    """How fast each function of the basis varies: ``[degree + 1]``."""
    frequency = find_basis(layer.basis).frequency
    if frequency is None:
        raise value_error("model", "layers over bases with degrees", f"one with basis {layer.basis!r}")
    return torch.tensor([frequency(d) for d in range(layer.degree + 1)], dtype=torch.float64, device="cpu")


# ---- convolutions ----------------------------------------------------------------------------------


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
