"""`GatedMLP`: the feed-forward block of Llama and its kin, whose two wide projections are one product."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastkron_py.gated.activations.registry import find_gate
from fastkron_py.gated.api import BACKWARDS, LAYOUTS, gated_linear, gated_mlp, pack_gated, unpack_gated
from fastkron_py.nn.modules import EXTRA, Configured, is_plain_linear
from fastkron_py.runtime.checks import check_choice, check_flag, check_positive, check_precision, check_type
from fastkron_py.runtime.errors import value_error

# Names of (gate, up, down) in checkpoints of others: Hugging Face's, and Llama's own.
_UNPACKED: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_PACKED: Final = MappingProxyType({"weight": "up_gate_weight", "bias": "up_gate_bias"})


class GatedMLP(Configured):
    """``down(up(x) * act(gate(x)))``: SwiGLU, GeGLU, ReGLU, bilinear (Shazeer, "GLU Variants Improve Transformer", 2020).

    Both wide projections are one parameter, packed in one of `gated_linear`'s layouts. Layout and activation are part of the state:
    a state with others, or a packed one without a layout, is rejected. States of unpacked layers (``gate_proj``, ``up_proj``,
    ``down_proj``, or ``w1``, ``w3``, ``w2``) load as they are, and `unpacked_state_dict` gives one back.

    Args:
        in_features: of x.
        hidden_features: of each wide projection.
        out_features: of the result; None is in_features.
        activation: as in `gated_linear`, or an alias such as "swiglu", "geglu" or "bilinear" (docs/guides/gated_mlp.md lists them).
        bias: of all three projections.
        layout: "interleaved" or "stacked".
        backward: "save" or "recompute", as in `gated_linear`: with "save" x and both wide projections are kept for the backward
            pass, with "recompute" x alone.
        precision: of products in float32, as in `kron_matmul`.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        x ``[..., in_features]`` to ``[..., out_features]``.

    Attributes:
        up_gate_weight: ``[2 * hidden_features, in_features]`` or ``[2, hidden_features, in_features]``.
        up_gate_bias: the same without the last dimension, or None.
        down_proj: an `nn.Linear`, or its replacement; an adapter or a hook there is called as usual.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes below 1, unknown names.

    Example:
        >>> mlp = GatedMLP(64, 172, activation="swiglu")
        >>> mlp(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    up_gate_weight: nn.Parameter
    up_gate_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str = "silu",
        *,
        bias: bool = False,
        layout: str = "interleaved",
        backward: str = "save",
        precision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        for name, size in (("in_features", in_features), ("hidden_features", hidden_features), ("out_features", out_features)):
            check_positive(name, size)
        check_flag("bias", bias)
        check_choice("layout", layout, LAYOUTS)
        check_choice("backward", backward, BACKWARDS)
        check_precision(precision)
        self.in_features, self.hidden_features, self.out_features = int(in_features), int(hidden_features), int(out_features)
        self.activation = find_gate(activation).name
        self.layout, self.backward, self.precision = layout, backward, precision
        rows = (2 * self.hidden_features,) if layout == "interleaved" else (2, self.hidden_features)
        self.up_gate_weight = nn.Parameter(torch.empty(*rows, self.in_features, device=device, dtype=dtype))
        self.up_gate_bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.down_proj = nn.Linear(self.hidden_features, self.out_features, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sample all parameters again, as `nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.up_gate_weight, -bound, bound)
        if self.up_gate_bias is not None:
            nn.init.uniform_(self.up_gate_bias, -bound, bound)
        self.down_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        options: dict[str, Any] = {
            "bias": self.up_gate_bias,
            "activation": self.activation,
            "layout": self.layout,
            "backward": self.backward,
            "precision": self.precision,
        }
        down = self.down_proj
        if is_plain_linear(down):
            return gated_mlp(x, self.up_gate_weight, down.weight, down_bias=down.bias, **options)
        return down(gated_linear(x, self.up_gate_weight, **options))

    def extra_repr(self) -> str:
        """The sizes that ``print(layer)`` shows."""
        shown = f"{self.in_features}, {self.hidden_features}, {self.out_features}, activation={self.activation!r}"
        shown += f", bias={self.up_gate_bias is not None}, layout={self.layout!r}"
        return shown + ("" if self.backward == "save" else f", backward={self.backward!r}")

    # ---- weights of other layers, and states -----------------------------------------------------

    @classmethod
    def from_projections(cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: str = "silu", **options: Any) -> GatedMLP:
        """A layer with copies of gate's and up's weights, whose down projection is the given module itself.

        Args:
            gate: ``in`` to ``hidden``.
            up: ``in`` to ``hidden``; its result is multiplied by the gate's.
            down: ``hidden`` to ``out``.
            activation: as in the layer.
            **options: layout, backward, precision.

        Raises:
            TypeError: a projection is not an `nn.Linear`.
            ValueError: sizes that do not fit, or a bias of only one of gate and up.
        """
        for name, module in (("gate", gate), ("up", up), ("down", down)):
            check_type(name, module, nn.Linear, "an nn.Linear")
        if (gate.bias is None) != (up.bias is None):
            raise value_error("up", "a bias where gate has one, and only there", "one without the other")
        if down.in_features != up.out_features:
            raise value_error("down", f"up's {up.out_features} outputs as inputs", down.in_features)
        layer = cls(up.in_features, up.out_features, down.out_features, activation, device="meta", **options)
        with torch.no_grad():
            weight = pack_gated(up.weight, gate.weight, layer.layout)
            layer.up_gate_weight = nn.Parameter(weight, requires_grad=up.weight.requires_grad or gate.weight.requires_grad)
            if up.bias is not None:
                bias = pack_gated(up.bias, gate.bias, layer.layout)
                layer.up_gate_bias = nn.Parameter(bias, requires_grad=up.bias.requires_grad or gate.bias.requires_grad)
        layer.down_proj = down
        return layer.train(down.training)

    def unpacked_state_dict(self, names: tuple[str, str, str] = _UNPACKED[0]) -> dict[str, Tensor]:
        """The state of three separate projections, with these names of gate, up and down; views of this layer's."""
        state = {}
        for kind, packed in (("weight", self.up_gate_weight), ("bias", self.up_gate_bias)):
            if packed is not None:
                state[f"{names[1]}.{kind}"], state[f"{names[0]}.{kind}"] = unpack_gated(packed.detach(), self.layout)
        for kind, tensor in self.down_proj.state_dict().items():
            state[f"{names[2]}.{kind}"] = tensor
        return state

    def configuration(self) -> dict[str, Any]:
        """The layout, and what the gate is."""
        return {"layout": self.layout, "activation": self.activation}

    def configuration_in(self, state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """As it is; a state of an earlier version has the layout's number."""
        extra = state.get(prefix + EXTRA)
        if isinstance(extra, Tensor) and extra.ndim == 0 and int(extra) < len(LAYOUTS):
            return {"layout": LAYOUTS[int(extra)]}
        if extra is None and prefix + _PACKED["weight"] in state:
            return {"layout": "unknown"}
        return super().configuration_in(state, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._pack(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _pack(self, state: dict[str, Any], prefix: str) -> None:
        """Turn a state of unpacked projections into one of this layer."""
        for gate, up, down in _UNPACKED:
            for kind, packed in _PACKED.items():
                keys = [f"{prefix}{name}.{kind}" for name in (up, gate)]
                if all(key in state for key in keys):
                    if prefix + packed in state:
                        raise value_error("state_dict", f"{packed}, or {gate} and {up}", "both")
                    ups, gates = (state.pop(key) for key in keys)
                    state[prefix + packed] = pack_gated(ups, gates, self.layout)
                    state[prefix + EXTRA] = self.get_extra_state()
                if down != "down_proj" and f"{prefix}{down}.{kind}" in state:
                    state[f"{prefix}down_proj.{kind}"] = state.pop(f"{prefix}{down}.{kind}")
