"""`GroupRational`, a learnable activation, and `GRKAN`, the two-layer network that it replaces an MLP's activation in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastkron_py.nn.modules import Configured, is_materialized, is_plain
from fastkron_py.nn.rational_fit import FUNCTIONS, INTERVAL, Fit, fit, initial
from fastkron_py.rational.api import DEGREE_MOST, linear_rational, rational
from fastkron_py.rational.denominators.registry import find_denominator
from fastkron_py.runtime.backend import backend
from fastkron_py.runtime.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_interval,
    check_positive,
    check_probability,
    check_real_dtype,
    check_type,
)
from fastkron_py.runtime.errors import type_error, type_name, value_error

torch.fx.wrap("linear_rational")  # torch.fx traces calls of these, and does not look into them
torch.fx.wrap("_of_features")


def _checked_degrees(degrees: Any) -> tuple[int, int]:
    if not isinstance(degrees, tuple | list) or len(degrees) != 2:
        raise type_error("degrees", "a pair (m, n)", degrees)
    m, n = (check_integer("degrees", d, "a pair of integers (m, n)") for d in degrees)
    if not (0 <= m <= DEGREE_MOST and 1 <= n <= DEGREE_MOST):
        raise value_error("degrees", f"m from 0 to {DEGREE_MOST} and n from 1 to {DEGREE_MOST}", (m, n))
    return m, n


class GroupRational(Configured):
    """A learnable rational function ``P(x) / Q(x)`` for each group of neighbouring channels (see `fastkron_py.rational`).

    Args:
        num_features: channels, x's last dimension.
        num_groups: groups that they are cut into; it divides num_features.
        degrees: (m, n) of P and Q; m from 0 to 16, n from 1 to 16.
        version: of the denominator: one of those of `fastkron_py.rational`, or one that was registered.
        init: the initial function: "identity", "relu", "leaky_relu", "gelu", "swish", "tanh", "sigmoid", "geglu" (``x gelu(x)``) or
            "swishglu" (``x swish(x)``), fitted on [-3, 3]. For degrees other than (5, 4), and for
            registered denominators, the fit is made now and takes seconds.
        share_numerator: let all groups have one numerator, as in the Kolmogorov-Arnold transformer.
        noise: of version D while training.
        device: of the coefficients.
        dtype: of the coefficients.

    Attributes:
        numerator: ``[num_groups, m + 1]``, or ``[1, m + 1]`` where it is shared.
        denominator: ``[num_groups, n]``, ``[num_groups, n + 1]`` where it begins with b_0 (version C).

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: groups that do not divide the features, degrees out of range, an unknown version or init.

    Example:
        >>> act = GroupRational(768, init="gelu")
        >>> act(torch.randn(2, 197, 768)).shape
        torch.Size([2, 197, 768])
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int = 8,
        degrees: tuple[int, int] = (5, 4),
        version: str = "B",
        init: str = "swish",
        *,
        share_numerator: bool = False,
        noise: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features = check_positive("num_features", num_features)
        self.num_groups = check_positive("num_groups", num_groups)
        if self.num_features % self.num_groups:
            raise value_error("num_groups", f"a divisor of num_features, {self.num_features}", self.num_groups)
        self.degrees = _checked_degrees(degrees)
        found = find_denominator(version)
        check_probability("noise", noise, "a number from 0 to 1")
        check_choice("init", init, tuple(FUNCTIONS))
        check_flag("share_numerator", share_numerator)
        if dtype is not None:
            check_real_dtype("dtype", dtype)
        self.version, self.init, self.noise = version, init, float(noise)
        m, n = self.degrees
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.numerator = nn.Parameter(torch.empty(1 if share_numerator else self.num_groups, m + 1, **options))
        self.denominator = nn.Parameter(torch.empty(self.num_groups, found.count(n), **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin again as the function named by init."""
        if is_materialized(self.numerator):
            self._take(initial(self.init, self.degrees, self.version))

    def fit(self, function: Callable[[Tensor], Tensor], interval: tuple[float, float] = INTERVAL) -> float:
        """Become, in every group, as close as possible to a function on an interval. Takes seconds.

        Args:
            function: of a float64 tensor, element by element.
            interval: where.

        Returns:
            The largest error there.

        Raises:
            TypeError: the function cannot be called, or the interval is not a pair of numbers.
            ValueError: an interval without extent, or a function with values there that are not finite.

        Example:
            >>> GroupRational(64).fit(torch.sin)  # doctest: +SKIP
        """
        if not callable(function):
            raise type_error("function", "a function of a tensor", type_name(function))
        interval = check_interval("interval", interval)
        with torch.device("cpu"):  # whatever is in force for the layer itself
            values: Any = function(torch.linspace(*interval, 101, dtype=torch.float64))
            if not isinstance(values, Tensor) or values.shape != (101,) or not bool(values.isfinite().all()):
                raise value_error("function", f"finite values on {interval}, element by element", values)
            found = fit(function, self.degrees, self.version, interval)
        self._take(found)
        return found.error

    @torch.no_grad()
    def _take(self, found: Fit) -> None:
        self.numerator.copy_(found.a.expand_as(self.numerator))
        self.denominator.copy_(found.b.expand_as(self.denominator))

    @torch.no_grad()
    def functions(self, x: Tensor) -> Tensor:
        """Evaluate every group's function on the CPU in float64, without noise: ``[points]`` to ``[points, num_groups]``.

        Raises:
            TypeError: x is not a tensor.
            ValueError: x has not one dimension.
        """
        a, b = (c.detach().to("cpu", torch.float64) for c in (self.numerator, self.denominator))
        check_type("x", x, Tensor, "a tensor [points]")
        if x.ndim != 1:
            raise value_error("x", "shape [points]", f"shape {tuple(x.shape)}")
        t = x.to("cpu", torch.float64)[:, None].expand(-1, self.num_groups)
        with backend("torch"):  # whatever backend is asked for where the layer itself lies
            return rational(t, a, b, version=self.version)

    def gain(self) -> float:
        """``Var[x] / E[F(x)^2]`` for standard normal x, averaged over groups.

        Weights of a following linear layer that have this variance over its width keep the variance of x.
        """
        x = torch.linspace(-8, 8, 4001, dtype=torch.float64, device="cpu")
        density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        squares = torch.trapezoid(self.functions(x).square() * density[:, None], x, dim=0)
        return 1 / float(squares.mean())

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `rational` as the layer is now."""
        return {"version": self.version, "training": self.training, "noise": self.noise}

    def forward(self, x: Tensor) -> Tensor:
        """Apply to ``[..., num_features]``."""
        return _of_features(x, self.num_features, self.numerator, self.denominator, **self.options)

    def plot(self, ax: Any = None, *, interval: tuple[float, float] = INTERVAL, points: int = 501) -> Any:
        """Draw every group's function. Needs matplotlib.

        Args:
            ax: matplotlib axes; new ones unless given.
            interval: of x.
            points: of each curve.

        Returns:
            The axes.

        Raises:
            TypeError: the interval is not a pair of numbers, or points is not an integer.
            ValueError: an interval without extent, or no points.
        """
        interval, points = check_interval("interval", interval), check_positive("points", points)
        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(layout="constrained").subplots()
        x = torch.linspace(*interval, points, dtype=torch.float64, device="cpu")
        for group, y in enumerate(self.functions(x).T):
            ax.plot(x.numpy(), y.numpy(), label=f"group {group}")
        ax.set(xlabel="x", ylabel="P(x) / Q(x)")
        if self.num_groups <= 16:
            ax.legend(fontsize="small")
        return ax

    def configuration(self) -> dict[str, Any]:
        """The formula of the coefficients, without noise."""
        return {"version": find_denominator(self.version).without_noise.name, "degrees": list(self.degrees)}

    def extra_repr(self) -> str:
        """Text of the layer, like those of torch's own layers."""
        shared = ", share_numerator=True" if len(self.numerator) < self.num_groups else ""
        noise = f", noise={self.noise}" if find_denominator(self.version).is_noisy else ""
        text = f"{self.num_features}, num_groups={self.num_groups}, degrees={self.degrees}, version={self.version!r}, init={self.init!r}"
        return text + shared + noise


def _of_features(x: Tensor, num_features: int, numerator: Tensor, denominator: Tensor, **options: Any) -> Tensor:
    """`rational` of x ``[..., num_features]``."""
    if x.shape[-1:] != (num_features,):
        raise value_error("x", f"shape [..., {num_features}]", f"shape {tuple(x.shape)}")
    return rational(x, numerator, denominator, **options)


class GRKAN(nn.Module):
    """Group-rational KAN: rational, linear, rational, linear (Yang and Wang, "Kolmogorov-Arnold Transformer", ICLR 2025).

    Takes the place of a transformer's MLP. Initialised so that variances are kept: a linear layer's weights are normal with
    variance ``gain / width``, `GroupRational.gain` being that of the function before it; biases are zero.

    Args:
        in_features: of x.
        hidden_features: between the linear layers; in_features unless given.
        out_features: of the result; in_features unless given.
        num_groups: of both rational functions; it divides in_features and hidden_features.
        degrees: of both.
        version: of both.
        init: the initial functions of both.
        share_numerator: let the groups of a function have one numerator, as in the paper.
        bias: of the linear layers.
        dropout: after each rational function.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: as for `GroupRational`, or a dropout that is not a probability.

    Example:
        >>> GRKAN(192, 768)(torch.randn(2, 197, 192)).shape
        torch.Size([2, 197, 192])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        *,
        num_groups: int = 8,
        degrees: tuple[int, int] = (5, 4),
        version: str = "B",
        init: tuple[str, str] = ("identity", "swish"),
        share_numerator: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check_positive("in_features", in_features)
        self.hidden_features = check_positive("hidden_features", in_features if hidden_features is None else hidden_features)
        self.out_features = check_positive("out_features", in_features if out_features is None else out_features)
        pair: Any = init
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise type_error("init", "a pair of names, one for each rational function", init)
        check_probability("dropout", dropout)
        check_flag("bias", bias)
        options: dict[str, Any] = {"device": device, "dtype": dtype}

        def activation(features: int, name: str) -> GroupRational:
            return GroupRational(features, num_groups, degrees, version, name, share_numerator=share_numerator, **options)

        self.act1 = activation(self.in_features, init[0])
        self.drop1 = nn.Dropout(dropout)
        self.fc1 = nn.Linear(self.in_features, self.hidden_features, bias=bias, **options)
        self.act2 = activation(self.hidden_features, init[1])
        self.drop2 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(self.hidden_features, self.out_features, bias=bias, **options)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin again: rational functions as named, weights that keep variances."""
        for act, linear in ((self.act1, self.fc1), (self.act2, self.fc2)):
            act.reset_parameters()
            if not is_materialized(linear.weight):
                continue
            begun = GroupRational(1, 1, act.degrees, act.version, act.init, device="cpu", dtype=torch.float64)
            linear.weight.normal_(0.0, math.sqrt(begun.gain() / linear.in_features))
            if linear.bias is not None:
                linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        x = self.drop1(self.act1(x))
        x = self.drop2(_linear_then(self.fc1, self.act2, x))
        return self.fc2(x)


def _linear_then(linear: nn.Linear, act: GroupRational, x: Tensor) -> Tensor:
    """``act(linear(x))``, in one kernel where that is faster and where nobody has put anything else, or a hook, in place of the two."""
    if not (is_plain(linear, nn.Linear) and is_plain(act, GroupRational)):
        return act(linear(x))
    return linear_rational(x, linear.weight, linear.bias, act.numerator, act.denominator, **act.options)
