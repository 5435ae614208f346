"""The common parts of layers of polynomial Kolmogorov-Arnold networks: a basis, its range, and how coefficients are sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastkron_py.kan.api import LUT_SIZE, check_arguments, check_real, own_bounds, poly_kan, usable_bounds
from fastkron_py.kan.bases.registry import find_basis
from fastkron_py.nn.modules import Configured, is_materialized
from fastkron_py.nn.running_range import RecentBounds, is_set
from fastkron_py.runtime.checks import check_flag, check_integer, check_precision, check_real_dtype
from fastkron_py.runtime.errors import type_error, type_name, value_error

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
        if not 0 < check_real("momentum", momentum, "a number above 0, up to 1") <= 1:
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
        if not isinstance(x, Tensor):
            raise type_error("x", "a torch tensor", type_name(x))
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
        if not isinstance(bound, Tensor):
            raise type_error(name, f"a tensor [{len(like)}]", type_name(bound))
        if bound.shape != like.shape:
            raise value_error(name, f"shape ({len(like)},)", f"shape {tuple(bound.shape)}")
    if not bool(is_set(low, high).all()):
        raise value_error("low", "finite numbers, and none above high", f"{low.tolist()} and {high.tolist()}")
