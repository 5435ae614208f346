"""What the layers of polynomial Kolmogorov-Arnold networks share: a basis, its range, and how coefficients are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from fastkron_py.errors import value_error
from fastkron_py.functional.checks import check_integer
from fastkron_py.functional.poly_kan import LUT_SIZE, check_described, own_bounds, poly_kan

_SAMPLES: Final = 4096  # of the normalised argument, over which a basis's mean square is taken
DEFAULT_NORMALIZATION: Final = {"bspline": "minmax", "rbf": "minmax"}  # others: tanh


class EdgeFunctions(nn.Module):
    """Learned functions in one basis, of inputs whose range may be followed; layers say which input goes to which output.

    Args:
        features: inputs with a range of their own.
        degree: as in `poly_kan`, and so the rest.
        basis: as in `PolyKANLinear`, and so the rest.
        basis_parameters: of the basis.
        normalization: None for the basis's default.
        momentum: of the running range.
        evaluation: recurrence or table.
        lut_size: of the table.
        precision: of float32 products.
        device: of the buffers.
        dtype: of the buffers.
    """

    coefficients: nn.Parameter
    bias: nn.Parameter | None
    low: Tensor | None
    high: Tensor | None

    def __init__(
        self,
        features: int,
        degree: int,
        basis: str,
        *,
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
        if not 0 < momentum <= 1:
            raise value_error("momentum", "a number above 0, up to 1", momentum)
        self.degree, self.basis = check_integer("degree", degree), basis
        self.normalization = DEFAULT_NORMALIZATION.get(basis, "tanh") if normalization is None else normalization
        self.basis_parameters = dict(basis_parameters or {})
        self.momentum, self.evaluation, self.lut_size, self.precision = momentum, evaluation, lut_size, precision
        check_described(basis, basis_parameters, self.normalization, evaluation, lut_size, degree + 1)
        ranged = self.normalization == "minmax"
        # Beyond each other until a batch, or update_grid, sets them.
        self.register_buffer("low", torch.full((features,), math.inf, device=device, dtype=dtype) if ranged else None)
        self.register_buffer("high", torch.full((features,), -math.inf, device=device, dtype=dtype) if ranged else None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the coefficients anew; a bias becomes 0."""
        inputs = math.prod(self.coefficients.shape[2:])
        self.coefficients.normal_(0.0, 1 / math.sqrt(inputs * self._mean_square()))
        if self.bias is not None:
            self.bias.zero_()

    def _mean_square(self) -> float:
        """The sum over the basis of the mean square of each function, for standard normal x (uniform ones in a range)."""
        from fastkron_py.kernels.poly_kan.bases import NORMALIZERS, find_basis

        uniform = (torch.arange(_SAMPLES, dtype=torch.float64) + 0.5) / _SAMPLES
        if self.normalization in ("minmax", "none"):
            t = 2 * uniform - 1
        else:
            normal = torch.special.ndtri(uniform)
            t = NORMALIZERS["clamp" if self.normalization == "clamp" else "tanh"].host(normal)
        basis = find_basis(self.basis)
        parameters = tuple(float(self.basis_parameters.get(name, default)) for name, default in basis.parameters.items())
        return sum(float(value.square().mean()) for value in basis.values(t, self.degree + 1, parameters))

    @torch.no_grad()
    def set_range(self, low: Tensor, high: Tensor) -> None:
        """Set the range of every input, ``[in_features]`` each.

        Raises:
            ValueError: the layer's normalization is not "minmax".
        """
        if self.low is None or self.high is None:
            raise value_error("normalization", "'minmax', whose range this sets", repr(self.normalization))
        self.low.copy_(low)
        self.high.copy_(high)

    def _bounds(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The running range, moved towards that of x first in training. Without a host's look at the numbers."""
        if self.low is None or self.high is None:
            return None
        if self.training and x.numel() > 0:
            with torch.no_grad():
                low, high = (b.to(self.low.dtype) for b in own_bounds(x))
                unset = self.low > self.high
                seen = low <= high  # not so where every number is NaN
                for running, new in ((self.low, low), (self.high, high)):
                    moved = torch.where(unset, new, running + self.momentum * (new - running))
                    running.copy_(torch.where(seen, moved, running))
        unset = self.low > self.high
        return torch.where(unset, -1.0, self.low), torch.where(unset, 1.0, self.high)

    def _sums(
        self,
        x: Tensor,
        coefficients: Tensor,
        bounds: tuple[Tensor, Tensor] | None,
        bias: Tensor | None,
        normalization: str | None = None,
    ) -> Tensor:
        """`poly_kan` with this layer's options; another normalization where a part of it has been done."""
        return poly_kan(
            x,
            coefficients,
            basis=self.basis,
            bias=bias,
            basis_parameters=self.basis_parameters or None,
            normalization=normalization or self.normalization,
            bounds=bounds,
            evaluation=self.evaluation,
            lut_size=self.lut_size,
            precision=self.precision,
        )

    def _described(self) -> str:
        """The last part of ``extra_repr``."""
        shown = f"degree={self.degree}, basis={self.basis!r}, bias={self.bias is not None}, normalization={self.normalization!r}"
        return shown + (", evaluation='lut'" if self.evaluation == "lut" else "")
