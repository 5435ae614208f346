"""The MLP of Kolmogorov-Arnold transformers, as timm's blocks build theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastkron_py.integrations.timm.checkpoint import RELEASED_VERSION, renamed
from fastkron_py.nn import GRKAN, GroupRational
from fastkron_py.nn.arguments import check_flag, check_pair
from fastkron_py.nn.modules import is_hooked, is_plain, is_plain_linear
from fastkron_py.rational.api import layer_norm_rational, rational_linear
from fastkron_py.runtime.checks import check_probability
from fastkron_py.runtime.errors import type_name, value_error

# torch.fx, with which features are extracted, traces calls of these, and does not look into them.
torch.fx.wrap("layer_norm_rational")
torch.fx.wrap("rational_linear")


def _is_plain_norm(module: nn.Module) -> bool:
    """Whether it is a plain layer normalisation of the last dimension: torch's, or timm's unless it rounds its input to half precision."""
    kind = type(module)
    if kind is not nn.LayerNorm and (kind.__name__ != "LayerNorm" or not kind.__module__.startswith("timm.")):
        return False
    norm: Any = module
    whole = len(norm.normalized_shape) == 1 and norm.weight is not None and norm.bias is not None
    return whole and not getattr(norm, "_fast_norm", False) and not is_hooked(module)


class KATMlp(GRKAN):
    """`GRKAN` (rational, linear, rational, linear) with the arguments that timm's blocks give their MLP.

    Args:
        in_features: of x.
        hidden_features: between the linear layers; in_features unless given.
        out_features: of the result; in_features unless given.
        act_layer: ignored; the activation of timm's other MLPs.
        norm_layer: None; timm's norm between the two layers is not part of the model.
        bias: of the linear layers: both or neither.
        drop: dropout after each rational function, one probability or two.
        num_groups: of both functions.
        degrees: of both.
        version: of both.
        act_init: the initial functions of both.
        share_numerator: let the groups of a function have one numerator.
        recompute: for each of the two pairs of a rational function and a linear layer, or for both, whether the function's values
            are computed again in the backward pass, in place of being kept. Where the first is, no norm is fused with it.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a norm_layer; two biases that differ; a value that `GRKAN` rejects.

    Example:
        >>> KATMlp(192, 768)(torch.randn(2, 197, 192)).shape
        torch.Size([2, 197, 192])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Any = None,
        norm_layer: Any = None,
        bias: bool | Sequence[bool] = True,
        drop: float | Sequence[float] = 0.0,
        *,
        num_groups: int = 8,
        degrees: tuple[int, int] = (5, 4),
        version: str = "B",
        act_init: tuple[str, str] = ("identity", "swish"),
        share_numerator: bool = True,
        recompute: bool | Sequence[bool] = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        biases = check_pair("bias", bias, check_flag)
        if biases[0] != biases[1]:
            raise value_error("bias", "the same for both layers", biases)
        if norm_layer is not None:
            raise value_error("norm_layer", "None: this MLP has no norm between its layers", type_name(norm_layer))
        first, second = check_pair("drop", drop, check_probability)
        options: dict[str, Any] = {"num_groups": num_groups, "degrees": degrees, "version": version, "init": act_init}
        options |= {"share_numerator": share_numerator, "bias": biases[0], "device": device, "dtype": dtype}
        super().__init__(in_features, hidden_features, out_features, dropout=first, **options)
        self.drop2 = nn.Dropout(second)
        self.recompute: tuple[bool, bool] = check_pair("recompute", recompute, check_flag)

    def forward(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``.

        Args:
            x: the argument.
            norm: a layer normalisation to apply to x first, in one pass with the first function where it is an ordinary one.
        """
        if norm is not None and not self.recompute[0] and _is_plain_norm(norm) and is_plain(self.act1, GroupRational):
            x = self.fc1(self.drop1(self._normalised(x, norm)))
        else:
            x = x if norm is None else norm(x)
            x = self._pair_of_layers(x, self.act1, self.drop1, self.fc1, self.recompute[0])
        return self._pair_of_layers(x, self.act2, self.drop2, self.fc2, self.recompute[1])

    def _normalised(self, x: Tensor, norm: Any) -> Tensor:
        act = self.act1
        return layer_norm_rational(x, norm.weight, norm.bias, act.numerator, act.denominator, eps=norm.eps, **act.options)

    def _pair_of_layers(self, x: Tensor, act: GroupRational, drop: nn.Dropout, linear: nn.Linear, recompute: bool) -> Tensor:
        dropping = self.training and drop.p > 0
        if recompute and not dropping and is_plain(act, GroupRational) and is_plain_linear(linear):
            return rational_linear(x, act.numerator, act.denominator, linear.weight, linear.bias, **act.options)
        y: Tensor = linear(drop(act(x)))
        return y

    def extra_repr(self) -> str:
        """The text of ``print(layer)``: whether values are computed again."""
        return f"recompute={self.recompute}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take coefficients by the names of the released checkpoints as well."""
        released = {key: name for key in state_dict if key.startswith(prefix) and (name := renamed(key)) is not None}
        if released and self.act1.version != RELEASED_VERSION:
            errors: list[str] = args[4] if len(args) > 4 else kwargs["error_msgs"]
            found = f"a released checkpoint's, which are of version {RELEASED_VERSION!r}"
            advice = f"make the model with rational_version={RELEASED_VERSION!r}"
            errors.append(f"{prefix}act1, {prefix}act2: expected coefficients of version {self.act1.version!r}; got {found}: {advice}.")
        for key, name in released.items():
            state_dict[name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
