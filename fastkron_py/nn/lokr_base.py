"""The common parts of LoKr layers: the adapter's parameters, its dropout, merging, and its states under LyCORIS's and PEFT's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fastkron_py.adapters.conv import Kernel
from fastkron_py.adapters.factor import Factor
from fastkron_py.adapters.sizes import split_size
from fastkron_py.nn.arguments import check_flag, check_positive, check_probability
from fastkron_py.runtime.checks import HALF_DTYPES, check_choice, check_integer, check_scalar
from fastkron_py.runtime.errors import type_error, type_name, value_error

NAMES: Final = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
_STYLES: Final = ("lycoris", "peft")


class LoKrOptions(NamedTuple):
    """The options of an adapter, as `LoKrLinear` describes them."""

    rank: int
    factor: int = -1
    decompose_both: bool = False
    alpha: float | None = None
    dropout: float = 0.0
    rank_dropout: float = 0.0
    rank_dropout_scale: bool = False
    module_dropout: float = 0.0
    use_tucker: bool = False

    def checked(self) -> LoKrOptions:
        """The options themselves.

        Raises:
            TypeError: an option of the wrong type.
            ValueError: an option outside its range.
        """
        check_positive("rank", self.rank)
        if check_integer("factor", self.factor) < 1 and self.factor != -1:
            raise value_error("factor", "-1 or at least 1", self.factor)
        for name in ("decompose_both", "rank_dropout_scale", "use_tucker"):
            check_flag(name, getattr(self, name))
        if isinstance(self.alpha, Tensor | complex):
            raise type_error("alpha", "a number or None", type_name(self.alpha))
        if self.alpha is not None:
            check_scalar("alpha", self.alpha)
        for name in ("dropout", "rank_dropout", "module_dropout"):
            check_probability(name, getattr(self, name))
        return self


class LoKrLayer(nn.Module):
    """A base layer and its adapter. `LoKrLinear` and `LoKrConv2d` compute the result."""

    lokr_w1: nn.Parameter | None
    lokr_w1_a: nn.Parameter | None
    lokr_w1_b: nn.Parameter | None
    lokr_w2: nn.Parameter | None
    lokr_w2_a: nn.Parameter | None
    lokr_w2_b: nn.Parameter | None
    lokr_t2: nn.Parameter | None
    alpha: Tensor

    def __init__(self, base_layer: nn.Module, options: LoKrOptions, dtype: torch.dtype | None) -> None:
        super().__init__()
        weight: Any = base_layer.weight
        self.base_layer = base_layer.requires_grad_(False)
        self.options = options.checked()
        self.is_merged = False
        if dtype is None:
            dtype = torch.float32 if weight.dtype in HALF_DTYPES else weight.dtype
        made = _sizes(weight.shape, self.options)
        for name in NAMES:
            parameter = nn.Parameter(torch.empty(made[name], dtype=dtype, device=weight.device)) if name in made else None
            self.register_parameter(name, parameter)
        alpha = options.rank if options.alpha is None else options.alpha
        self.register_buffer("alpha", torch.tensor(float(alpha), device=weight.device))
        self._scale = float(alpha) / options.rank  # a number: reading the buffer would wait for a GPU
        self.register_load_state_dict_post_hook(_read_scale)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the adapter's parameters anew, as LyCORIS does: the second factor's product is 0, and so is the adapter."""
        last = "lokr_w2" if self.lokr_w2 is not None else "lokr_w2_b"
        for name in NAMES:
            parameter = getattr(self, name)
            if parameter is None:
                continue
            if name == last:
                nn.init.zeros_(parameter)
            else:
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))

    # ---- the adapter's weight --------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """``alpha / rank``, which multiplies the product."""
        return self._scale

    def first_factor(self) -> Factor:
        """The first factor, ``[out1, in1]`` or a pair."""
        if self.lokr_w1 is not None:
            return Factor(self.lokr_w1)
        return Factor(self.lokr_w1_a, self.lokr_w1_b)  # type: ignore[arg-type]

    def second_factor(self) -> Kernel:
        """The second factor; that of a linear layer is a kernel without a window."""
        layer: Any = self
        if self.lokr_w2 is not None:
            return Kernel(self.lokr_w2)
        if self.lokr_t2 is not None:
            return Kernel(self.lokr_t2, layer.lokr_w2_a.mT, layer.lokr_w2_b)
        window = layer.base_layer.weight.shape[2:]
        return Kernel(layer.lokr_w2_b.unflatten(1, (-1, *window)) if window else layer.lokr_w2_b, layer.lokr_w2_a)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the base layer's weight, in place; without effect on a merged layer."""
        if not self.is_merged:
            self._add_to_weight(self.scale)
            self.is_merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take the adapter out of the weight again, up to rounding; without effect on a layer that is not merged."""
        if self.is_merged:
            self._add_to_weight(-self.scale)
            self.is_merged = False

    def _add_to_weight(self, scale: float) -> None:
        weight: Any = self.base_layer.weight
        w1, w2 = self.first_factor().expanded().left, self.second_factor().expanded()
        slices = weight.data.unflatten(1, (w1.shape[1], w2.shape[1])).unflatten(0, (w1.shape[0], w2.shape[0]))
        wide = torch.float32 if weight.dtype in HALF_DTYPES else weight.dtype
        rows = w1.to(wide).view(*w1.shape, *[1] * (w2.ndim - 1))  # [out1, in1, 1, ...]
        for part, row in zip(slices, rows, strict=True):  # [out2, in1, in2, ...]: no second tensor of the weight's size
            part.copy_(part.to(wide).addcmul_(row, w2.to(wide).unsqueeze(1), value=scale))

    # ---- the forward pass ------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """The base layer's result plus the adapter's."""
        base: Tensor = self.base_layer(x)
        o = self.options
        if self.is_merged or (self.training and o.module_dropout > 0 and bool(torch.rand(1) < o.module_dropout)):
            return base
        if not (self.training and (o.dropout or o.rank_dropout)):
            return self._adapted(x, base)
        return base + nn.functional.dropout(self._adapted(x, None) * self._kept_rows(base), o.dropout)

    def _adapted(self, x: Tensor, base: Tensor | None) -> Tensor:
        """The adapter's result, added to base if there is one."""
        raise NotImplementedError

    def _kept_rows(self, base: Tensor) -> Any:
        """Of each output 0 or 1, or with rank_dropout_scale 1 over the mean, in the result's layout."""
        o = self.options
        if not o.rank_dropout:
            return 1
        weight: Any = self.base_layer.weight
        kept = (torch.rand(weight.shape[0], device=base.device) > o.rank_dropout).to(base.dtype)
        if o.rank_dropout_scale:
            kept = kept / kept.mean().clamp_min(1 / kept.numel())  # of none that is kept, 0
        return kept.view(-1, *[1] * (weight.ndim - 2))

    # ---- states ----------------------------------------------------------------------------------

    def adapter_state_dict(self, style: str = "lycoris") -> dict[str, Tensor]:
        """The adapter's state, without the base layer, under the names of another library.

        Args:
            style: "lycoris", with alpha; or "peft", which keeps alpha and rank in its configuration.

        Returns:
            Names such as ``lokr_w1`` and ``lokr_w2_a``, to be prefixed with the module's name in that library.

        Raises:
            TypeError: a style that is no string.
            ValueError: an unknown style.
        """
        check_choice("style", style, _STYLES)
        state = {name: getattr(self, name).detach() for name in NAMES if getattr(self, name) is not None}
        if style == "lycoris":
            state["alpha"] = self.alpha.detach().clone()
            if self._has_whole_factors:  # LyCORIS reads no alpha then
                state["lokr_w1"] = state["lokr_w1"] * self.scale
                state["alpha"].fill_(self.options.rank)
        return state

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the adapter's state from LyCORIS or PEFT, or from `adapter_state_dict`.

        Args:
            state: names such as ``lokr_w1``, ``lokr_w2_a`` and, of LyCORIS, ``alpha``. PEFT's names in a model,
                ``lokr_w1.default``, are taken too.

        Raises:
            TypeError: a state that is no mapping.
            ValueError: names that are missing, unknown or given twice; another shape.
        """
        if not isinstance(state, Mapping):
            raise type_error("state", "a mapping of names to tensors", type_name(state))
        given: dict[str, Tensor] = {}
        for key, tensor in state.items():
            name = key.partition(".")[0]
            if name in given:
                raise value_error("state", "one adapter", f"{name} twice")
            given[name] = tensor
        alpha = given.pop("alpha", None)
        own = {name: getattr(self, name) for name in NAMES if getattr(self, name) is not None}
        if set(given) != set(own):
            raise value_error("state", ", ".join(own), ", ".join(sorted(given)) or "none")
        for name, parameter in own.items():
            if given[name].shape != parameter.shape:
                raise value_error(f"state[{name!r}]", f"shape {tuple(parameter.shape)}", f"shape {tuple(given[name].shape)}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(given[name])
            if alpha is not None:
                self.alpha.fill_(self.options.rank if self._has_whole_factors else float(alpha))
        _read_scale(self)

    @property
    def _has_whole_factors(self) -> bool:
        return self.lokr_w1 is not None and self.lokr_w2 is not None

    def extra_repr(self) -> str:
        """The text of ``print(layer)``."""
        o = self.options
        rates = [f"{name}={getattr(o, name)}" for name in ("dropout", "rank_dropout", "module_dropout") if getattr(o, name)]
        return ", ".join([f"rank={o.rank}, factor={o.factor}, scale={self.scale:g}", *rates])


def _read_scale(layer: LoKrLayer, *_: Any) -> None:
    """After alpha has changed."""
    if not layer.alpha.is_meta:
        layer._scale = float(layer.alpha) / layer.options.rank


def _sizes(shape: tuple[int, ...], o: LoKrOptions) -> dict[str, tuple[int, ...]]:
    """The adapter's parameters of a weight ``[out, in, *window]``, by LyCORIS's rules."""
    (out1, out2), (in1, in2) = (split_size(size, o.factor) for size in shape[:2])
    window = tuple(shape[2:])
    if o.decompose_both and o.rank < max(out1, in1) / 2:
        made: dict[str, tuple[int, ...]] = {"lokr_w1_a": (out1, o.rank), "lokr_w1_b": (o.rank, in1)}
    else:
        made = {"lokr_w1": (out1, in1)}
    if o.rank >= max(out2, in2) / 2:
        made["lokr_w2"] = (out2, in2, *window)
    elif o.use_tucker and math.prod(window) > 1:
        made |= {"lokr_t2": (o.rank, o.rank, *window), "lokr_w2_a": (o.rank, out2), "lokr_w2_b": (o.rank, in2)}
    else:
        made |= {"lokr_w2_a": (out2, o.rank), "lokr_w2_b": (o.rank, in2 * math.prod(window))}
    return made
