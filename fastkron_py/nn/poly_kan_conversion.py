"""Layers of ChebyKAN and efficient-kan as layers of this library, with the same outputs for every input."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fastkron_py.nn.modules import is_materialized
from fastkron_py.nn.poly_kan import PolyKANLinear, check_range
from fastkron_py.runtime.checks import check_integer, check_interval, check_positive, check_type
from fastkron_py.runtime.errors import type_error, type_name, value_error

CHEBYKAN: Final = "cheby_coeffs"
CHEBYKAN_BUFFERS: Final = ("arange",)  # the degrees 0, 1, ...
EFFICIENT_KAN: Final = ("base_weight", "spline_weight", "grid")
EFFICIENT_KAN_SCALER: Final = "spline_scaler"
_STATE_HOOKS: Final = [name for name in vars(nn.Module()) if "state_dict" in name]
_HOOKS: Final = [name for name in vars(nn.Module()) if "_hook" in name and name not in _STATE_HOOKS]  # around forward and backward
_Layer = TypeVar("_Layer", bound=PolyKANLinear)
_UNIFORM: Final = 1e-3  # of a grid's step: how far a point may lie from an even grid, which float32 rounds


class SplineKANLinear(PolyKANLinear):
    """``y = base_weight @ base_activation(x) + splines of x``: the layer of Liu et al.'s KAN, on one uniform grid for each input.

    Each input's grid spans its own range. A spline continues beyond its range until it has fallen to 0, `order` intervals further; from
    there on the base branch is alone.

    Args:
        in_features: inputs, at least 1.
        out_features: outputs, at least 1.
        grid_size: intervals of the grid, at least 1.
        order: of the splines, 1 to 3.
        grid_range: (lowest, highest), of every input until `set_range` or `update_grid`.
        base_activation: of the base branch, elementwise; None is SiLU.
        **options: of `PolyKANLinear`: bias, precision, device, dtype.

    Shape:
        x ``[..., in_features]`` to ``[..., out_features]``; base_weight ``[out_features, in_features]``; coefficients
        ``[grid_size + order, out_features, in_features]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes below 1, an order other than 1, 2 or 3, a range that is empty.

    Example:
        >>> SplineKANLinear(8, 3, grid_size=5)(torch.randn(100, 8)).shape
        torch.Size([100, 3])
    """

    centre: Tensor
    scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        grid_size: int = 5,
        order: int = 3,
        *,
        grid_range: tuple[float, float] = (-1.0, 1.0),
        base_activation: nn.Module | None = None,
        **options: Any,
    ) -> None:
        check_positive("grid_size", grid_size)
        _check_order("order", check_integer("order", order))
        self.grid_range = check_interval("grid_range", grid_range)
        if base_activation is not None and not callable(base_activation):
            raise type_error("base_activation", "a module", type_name(base_activation))
        spline: dict[str, Any] = {"basis_parameters": {"order": order}, "normalization": "none"}
        super().__init__(in_features, out_features, grid_size + order - 1, "bspline", **spline, **options)
        self.grid_size, self.order = grid_size, order
        self.base_activation = nn.SiLU() if base_activation is None else base_activation
        self.base_weight = nn.Parameter(torch.empty_like(self.coefficients[0]))
        like: dict[str, Any] = {"device": self.coefficients.device, "dtype": self.coefficients.dtype}
        self.register_buffer("centre", torch.empty(in_features, **like))
        self.register_buffer("scale", torch.empty(in_features, **like))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sample both branches again, each with half of the outputs' variance; a bias becomes 0, every range grid_range."""
        super().reset_parameters()
        if "base_weight" not in self._parameters:  # called by the constructor of PolyKANLinear
            return
        self._place(*(torch.full_like(self.centre, bound, dtype=torch.float64) for bound in self.grid_range))
        if not is_materialized(self.base_weight):
            return
        self.coefficients.mul_(math.sqrt(0.5))
        normal = torch.special.ndtri((torch.arange(4096, dtype=torch.float64, device="cpu") + 0.5) / 4096)
        mean_square = float(self.base_activation(normal.to(self.base_weight)).double().square().mean())
        self.base_weight.normal_(0.0, math.sqrt(0.5 / (self.in_features * max(mean_square, 1e-12))))

    @torch.no_grad()
    def set_range(self, low: Tensor, high: Tensor) -> None:
        """Set the range of every input's grid, ``[in_features]`` each. The coefficients stay: functions are stretched with their grid.

        Raises:
            TypeError: the bounds are not tensors.
            ValueError: bounds of another shape, not finite or falling.
        """
        check_range(low, high, self.centre)
        self._place(low.double(), high.double())

    def _place(self, low: Tensor, high: Tensor) -> None:
        half = (high - low) / 2
        self.centre.copy_((low + high) / 2)
        self.scale.copy_(1 / torch.where(half > 0, half, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        self._check(x)
        wide = torch.promote_types(x.dtype, torch.float32)  # in half precision x and its centre may lie further apart than it can hold
        splines = super().forward(((x.to(wide) - self.centre.to(wide)) * self.scale.to(wide)).to(x.dtype))
        return splines + torch.nn.functional.linear(self.base_activation(x), self.base_weight)

    @torch.no_grad()
    def edge(self, output: int, input: int, x: Tensor) -> Tensor:
        """The function on one edge, both branches, at the points ``x [n]``: ``[n]``, in float64. Raises as `PolyKANLinear.edge` does."""
        self._check_edge(output, input, x)
        x = x.to("cpu", torch.float64)
        centre, scale, weight = (float(t) for t in (self.centre[input], self.scale[input], self.base_weight[output, input]))
        base: Tensor = self.base_activation(x)
        return super().edge(output, input, (x - centre) * scale) + weight * base

    def configuration(self) -> dict[str, Any]:
        """The functions of both branches."""
        name = getattr(self.base_activation, "__name__", re.sub("(, )?inplace=True", "", repr(self.base_activation)))
        return {**super().configuration(), "base_activation": name}

    def extra_repr(self) -> str:
        """The text of ``print(layer)``."""
        return f"{self.in_features}, {self.out_features}, grid_size={self.grid_size}, order={self.order}, bias={self.bias is not None}"


def from_chebykan(source: nn.Module | Mapping[str, Tensor] | Tensor, **options: Any) -> PolyKANLinear:
    """A ChebyKAN layer (SynodicMonth/ChebyKAN, or a layer of the same layout) as a `PolyKANLinear` with the same outputs.

    Args:
        source: the layer, its state_dict, or its ``cheby_coeffs [in, out, degree + 1]``. Its input goes through tanh; for a fork that
            normalises otherwise, give ``normalization``.
        **options: of `PolyKANLinear`.

    Returns:
        A layer with copies of the source's numbers, on its device and in its dtype. A module's mode, hooks and frozen parameters are
        kept too. The layer keeps the leading dimensions of x; ChebyKAN flattens them.

    Raises:
        TypeError: source is none of the three, or has no cheby_coeffs.
        ValueError: coefficients without three dimensions, a degree below 1 or above 64, or parameters that are not ChebyKAN's; a module
            with state_dict hooks, its own forward, or parametrized coefficients.

    Example:
        >>> from_chebykan(torch.randn(8, 3, 5))
        PolyKANLinear(8, 3, degree=4, basis='chebyshev', bias=False, normalization='tanh')
    """
    layer = _from_chebykan(source, **options)
    return layer if not isinstance(source, nn.Module) else _taken_over(layer, source, {id(source): layer})


def _from_chebykan(source: nn.Module | Mapping[str, Tensor] | Tensor, **options: Any) -> PolyKANLinear:
    state = {CHEBYKAN: source} if isinstance(source, Tensor) else _state(source, (CHEBYKAN,), CHEBYKAN_BUFFERS, "ChebyKAN")
    coefficients = state[CHEBYKAN]
    if coefficients.ndim != 3:
        raise value_error("source", f"{CHEBYKAN} [in, out, degree + 1]", f"shape {tuple(coefficients.shape)}")
    num_in, num_out, terms = coefficients.shape
    layer = PolyKANLinear(num_in, num_out, terms - 1, device=coefficients.device, dtype=coefficients.dtype, **options)
    with torch.no_grad():
        layer.coefficients.copy_(coefficients.permute(2, 1, 0))
    if isinstance(source, nn.Module):
        layer.coefficients.requires_grad_(coefficients.requires_grad)
    return layer


def from_efficient_kan(
    source: nn.Module | Mapping[str, Tensor], *, base_activation: nn.Module | None = None, **options: Any
) -> SplineKANLinear:
    """An efficient-kan layer (Blealtan/efficient-kan) as a `SplineKANLinear` with the same outputs, inside its grid and outside.

    Args:
        source: the layer, or its state_dict: ``base_weight [out, in]``, ``spline_weight [out, in, grid_size + order]``,
            ``grid [in, grid_size + 2 order + 1]`` and, where it is there, ``spline_scaler [out, in]``.
        base_activation: of the base branch; None is the layer's own, and SiLU for a state_dict, which does not say.
        **options: of `SplineKANLinear`.

    Returns:
        A layer with copies of the source's numbers, on its device and in its dtype; the scaler is multiplied into its coefficients. A
        module's mode, hooks and frozen parameters are kept too.

    Raises:
        TypeError: source is neither, or lacks a part.
        ValueError: shapes that do not fit, an order other than 1 to 3, or a grid that is not uniform (efficient-kan's ``update_grid``
            makes such grids unless its ``grid_eps`` is 1); a frozen scaler with trained weights, or the reverse; a module that
            `from_chebykan` rejects.

    Example:
        >>> grid = torch.linspace(-2.2, 2.2, 12).expand(3, 12)  # 5 intervals on [-1, 1], and 3 more on each side
        >>> state = {"base_weight": torch.randn(4, 3), "spline_weight": torch.randn(4, 3, 8), "grid": grid}
        >>> from_efficient_kan(state)(torch.rand(10, 3)).shape
        torch.Size([10, 4])
    """
    layer = _from_efficient_kan(source, base_activation, **options)
    return layer if not isinstance(source, nn.Module) else _taken_over(layer, source, {id(source): layer})


def _from_efficient_kan(
    source: nn.Module | Mapping[str, Tensor], base_activation: nn.Module | None = None, memo: dict[int, Any] | None = None, **options: Any
) -> SplineKANLinear:
    state = _state(source, EFFICIENT_KAN, (EFFICIENT_KAN_SCALER,), "efficient-kan")
    base, weight, grid = (state[name] for name in EFFICIENT_KAN)
    scaler = state.get(EFFICIENT_KAN_SCALER)
    order = _check_efficient_kan(weight, base, grid, scaler)
    low, high = _uniform_range(grid, order)
    if base_activation is None and isinstance(source, nn.Module):
        base_activation = copy.deepcopy(getattr(source, "base_activation", None), memo)
    num_out, num_in, terms = weight.shape
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    layer = SplineKANLinear(num_in, num_out, terms - order, order, base_activation=base_activation, **like, **options)
    with torch.no_grad():
        layer.coefficients.copy_((weight if scaler is None else weight * scaler.unsqueeze(-1)).permute(2, 0, 1))
        layer.base_weight.copy_(base)
        layer.set_range(low, high)
    if isinstance(source, nn.Module):
        if scaler is not None and scaler.requires_grad != weight.requires_grad:
            raise value_error(EFFICIENT_KAN_SCALER, f"requires_grad {weight.requires_grad}, as spline_weight", scaler.requires_grad)
        layer.coefficients.requires_grad_(weight.requires_grad)
        layer.base_weight.requires_grad_(base.requires_grad)
    return layer


def convert_kan(source: nn.Module | Mapping[str, Tensor]) -> nn.Module:
    """A model with every ChebyKAN and efficient-kan layer in it replaced by one of this library, with the same outputs.

    Args:
        source: a module, which stays as it is, or the state_dict of nothing but such layers, in the order in which they follow
            one another.

    Returns:
        A copy of the module with its layers replaced, which keep their mode, hooks and whether they are trained; of a
            state_dict, a `torch.nn.Sequential` of layers.

    Raises:
        TypeError: source is neither.
        ValueError: no such layer is there, a state_dict has parameters of other layers too, or a layer cannot be represented: see
            `from_chebykan` and `from_efficient_kan`; or layers share parameters.

    Example:
        >>> convert_kan({"layers.0.cheby_coeffs": torch.randn(4, 8, 3), "layers.1.cheby_coeffs": torch.randn(8, 2, 3)})
        Sequential(
          (0): PolyKANLinear(4, 8, degree=2, basis='chebyshev', bias=False, normalization='tanh')
          (1): PolyKANLinear(8, 2, degree=2, basis='chebyshev', bias=False, normalization='tanh')
        )
    """
    if isinstance(source, nn.Module):
        # deepcopy leaves objects alone that its memo already holds, so each layer is replaced wherever it is referred to, and never copied.
        found: dict[int, Any] = {}
        replaced = []
        for module in source.modules():
            new = _converted(module, found)
            if new is not None:
                found[id(module)] = new
                replaced.append((new, module))
        if not replaced:
            raise value_error(
                "source", f"a model with layers of ChebyKAN ({CHEBYKAN}) or efficient-kan ({', '.join(EFFICIENT_KAN)})", "none"
            )
        _check_own_parameters(source, [module for _, module in replaced])
        for new, module in replaced:
            _taken_over(new, module, found)
        return copy.deepcopy(source, found)
    check_type("source", source, Mapping, "a module or a state_dict")
    layers: dict[str, dict[str, Tensor]] = {}
    for name, value in source.items():
        prefix, _, last = name.rpartition(".")
        layers.setdefault(prefix, {})[last] = value
    if not layers:
        raise value_error("source", "a state_dict with parameters", "an empty one")
    return nn.Sequential(*[from_chebykan(s) if CHEBYKAN in s else from_efficient_kan(s) for s in layers.values()])


def _converted(module: nn.Module, memo: dict[int, Any]) -> PolyKANLinear | None:
    """The layer in its place, or None if it is of neither library; memo holds the copies made before."""
    own = {*module._parameters, *module._buffers}
    if CHEBYKAN in own:
        return _from_chebykan(module)
    if own.issuperset(EFFICIENT_KAN):
        return _from_efficient_kan(module, memo=memo)
    for needed in ((CHEBYKAN,), EFFICIENT_KAN):
        computed = [name for name in needed if name in module.__dict__ or is_parametrized(module, name)]
        if computed and own.issuperset(set(needed) - set(computed)):
            raise value_error("source", f"{', '.join(computed)} as parameters", "tensors that a parametrization or a mask computes")
    return None


def _taken_over(layer: _Layer, module: nn.Module, memo: dict[int, Any]) -> _Layer:
    """The layer with a module's mode and copies of its hooks; a property that it cannot have raises an error."""
    if "forward" in module.__dict__:
        raise value_error("source", "a layer with its class's forward", "one of its own")
    if any(getattr(module, name) for name in _STATE_HOOKS):
        raise value_error("source", "a layer without hooks on its state_dict, whose names change", "one with them")
    unknown = [name for name, child in module.named_children() if name != "base_activation" or not isinstance(layer, SplineKANLinear)]
    if unknown:
        raise value_error("source", "a layer without layers in it that convert_kan does not know", ", ".join(unknown))
    for name in _HOOKS:
        setattr(layer, name, copy.deepcopy(getattr(module, name), memo))
    layer.training = module.training  # not those in it: a base activation has its own
    return layer


def _check_own_parameters(model: nn.Module, layers: list[nn.Module]) -> None:
    """Raise an error for parameters of these layers that other modules have too: converted, they would be trained apart."""
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for layer in layers:
        for name, parameter in layer._parameters.items():
            if parameter is not None and owners[id(parameter)] > 1:
                raise value_error("source", f"{name} in one layer alone", "one that layers share")


def _state(source: Any, needed: tuple[str, ...], allowed: tuple[str, ...], library: str) -> Mapping[str, Tensor]:
    """The tensors of a layer: all that are needed, and none that is unknown."""
    state: Any = source
    if isinstance(source, nn.Module):  # its own tensors, also those that a state_dict leaves out
        state = {name: t for name, t in {**source._parameters, **source._buffers}.items() if t is not None}
    if not isinstance(state, Mapping):
        raise type_error("source", f"a layer of {library} or its state_dict", type_name(source))
    names = ", ".join(map(repr, state)) or "nothing"
    if any(name not in state for name in needed):
        raise type_error("source", f"{library}'s {', '.join(needed)}", names)
    unknown = [name for name in state if name not in needed and name not in allowed]
    if unknown:
        raise value_error("source", f"the parameters of one layer of {library}, {', '.join((*needed, *allowed))}", ", ".join(unknown))
    return state


def _check_order(name: str, order: int) -> None:
    if order not in (1, 2, 3):
        raise value_error(name, "splines of order 1, 2 or 3", f"order {order}")


def _check_efficient_kan(weight: Tensor, base: Tensor, grid: Tensor, scaler: Tensor | None) -> int:
    """The order of the splines, which the shapes imply."""
    if weight.ndim != 3:
        raise value_error("spline_weight", "shape [out, in, grid_size + order]", f"shape {tuple(weight.shape)}")
    num_out, num_in, terms = weight.shape
    for name, tensor in (("base_weight", base), (EFFICIENT_KAN_SCALER, scaler)):
        if tensor is not None and tuple(tensor.shape) != (num_out, num_in):
            raise value_error(name, f"shape {(num_out, num_in)}, as spline_weight", f"shape {tuple(tensor.shape)}")
    if grid.ndim != 2 or grid.shape[0] != num_in:
        raise value_error("grid", f"shape [{num_in}, grid_size + 2 order + 1]", f"shape {tuple(grid.shape)}")
    order = grid.shape[1] - terms - 1
    _check_order("grid", order)
    if terms <= order:
        raise value_error("spline_weight", f"more than {order} functions for order {order}", terms)
    return int(order)


def _uniform_range(grid: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """The lowest and highest point of each input's grid without the points beyond: two ``[in]``."""
    points = grid.detach().double()
    first, last, intervals = points[:, :1], points[:, -1:], points.shape[1] - 1
    step = (last - first) / intervals
    even = first + step * torch.arange(intervals + 1, dtype=torch.float64, device=grid.device)
    if not bool(((points - even).abs() <= _UNIFORM * step).all() & (step > 0).all()):
        raise value_error("grid", "rising points at equal distances, which update_grid keeps only with grid_eps=1", "others")
    return (first + order * step)[:, 0], (last - order * step)[:, 0]
