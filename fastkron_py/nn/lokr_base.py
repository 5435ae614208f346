"""The common parts of LoKr layers: the adapter's parameters, its dropout, merging, and its states under LyCORIS's and PEFT's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastkron_py.adapters.adapter import Adapter, magnitude_ratio
from fastkron_py.adapters.conv import Window
from fastkron_py.adapters.plan import split_size
from fastkron_py.nn.modules import Configured, is_materialized, owns_result
from fastkron_py.runtime.checks import (
    DTYPES,
    HALF_DTYPES,
    check_choice,
    check_flag,
    check_integer,
    check_positive,
    check_probability,
    check_scalar,
    check_type,
    dtype_names,
)
from fastkron_py.runtime.eager import transforms_active
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.torch_internals import is_watching

NAMES: Final = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "dora_scale")
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
    weight_decompose: bool = False
    wd_on_out: bool = True
    terms: int = 1

    def checked(self) -> LoKrOptions:
        """The options, with integers of Python's.

        Raises:
            TypeError: an option of the wrong type.
            ValueError: an option outside its range.
        """
        rank, terms = (check_positive(name, getattr(self, name)) for name in ("rank", "terms"))
        if check_integer("factor", self.factor) < 1 and self.factor != -1:
            raise value_error("factor", "-1 or at least 1", self.factor)
        for name in ("decompose_both", "rank_dropout_scale", "use_tucker", "weight_decompose", "wd_on_out"):
            check_flag(name, getattr(self, name))
        if isinstance(self.alpha, Tensor | complex):
            raise type_error("alpha", "a number or None", type_name(self.alpha))
        if self.alpha is not None:
            check_scalar("alpha", self.alpha)
        for name in ("dropout", "rank_dropout", "module_dropout"):
            check_probability(name, getattr(self, name))
        if self.weight_decompose:
            for name, alone in (("dropout", 0), ("rank_dropout", 0), ("terms", 1)):
                if getattr(self, name) != alone:
                    raise value_error(name, f"{alone} with weight_decompose, whose norms are of the whole weight", getattr(self, name))
        return self._replace(rank=rank, factor=int(self.factor), terms=terms)  # of NumPy's integers, which JSON has no form for


class LoKrLayer(Configured):
    """A base layer and its adapter. `LoKrLinear` and `LoKrConv2d` compute the result."""

    lokr_w1: nn.Parameter | None
    lokr_w1_a: nn.Parameter | None
    lokr_w1_b: nn.Parameter | None
    lokr_w2: nn.Parameter | None
    lokr_w2_a: nn.Parameter | None
    lokr_w2_b: nn.Parameter | None
    lokr_t2: nn.Parameter | None
    dora_scale: nn.Parameter | None
    alpha: Tensor
    merged_w1: Tensor
    merged_w2: Tensor
    merged_ratio: Tensor

    def __init__(
        self,
        base_layer: nn.Module,
        shape: Sequence[int],
        options: LoKrOptions,
        dtype: torch.dtype | None,
        sizes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Args: sizes: of the adapter's parameters, where they are those of a file; None follows LyCORIS's rules."""
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.options, self._shape = options.checked(), tuple(shape)
        device = next((t.device for t in (*base_layer.parameters(), *base_layer.buffers())), None)
        if dtype is None:
            of_base = getattr(getattr(base_layer, "weight", None), "dtype", None)
            dtype = of_base if of_base in DTYPES and of_base not in HALF_DTYPES else torch.float32
        elif dtype not in DTYPES:
            raise type_error("adapter_dtype", f"one of {dtype_names(DTYPES)}", dtype)
        if len(self._shape) > 2 and options.terms > 1:
            raise value_error("terms", "1 of a convolution", options.terms)
        if options.weight_decompose:
            self._float_weight("whose norms weight_decompose takes")
        made = parameter_sizes(self._shape, self.options) if sizes is None else sizes
        for name in NAMES:
            parameter = nn.Parameter(torch.empty(made[name], dtype=dtype, device=device)) if name in made else None
            self.register_parameter(name, parameter)
        self.register_buffer("alpha", torch.tensor(self._alpha, dtype=torch.float32, device=device))
        self._scale, self._read = self._alpha / options.rank, (self.alpha, -1)
        self.reset_parameters()
        self._read_alpha()  # as rounded

    @classmethod
    def around(
        cls, layer: Any, options: LoKrOptions, dtype: torch.dtype | None, sizes: Mapping[str, tuple[int, ...]] | None = None
    ) -> Self:
        """An adapted layer around a layer, which is frozen and not copied; arguments are those of the constructor."""
        made = cls.__new__(cls)
        LoKrLayer.__init__(made, layer, cls._shape_of(layer), options, dtype, sizes)
        return made.train(layer.training)

    @classmethod
    def _shape_of(cls, layer: Any) -> tuple[int, ...]:
        """The sizes of the weight of a layer that can have the adapter; an error for another one."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw the adapter's parameters anew, as LyCORIS does: the second factor's product is 0, and so is the adapter.

        Magnitudes are the norms of the base layer's weight; alpha is the one that the layer was made with.

        Raises:
            ValueError: the layer is merged.
        """
        self._check_unmerged()
        self.alpha.fill_(self._alpha)
        last = "lokr_w2" if self.lokr_w2 is not None else "lokr_w2_b"
        for name in NAMES:
            parameter = getattr(self, name)
            if parameter is None:
                continue
            if name == last:
                nn.init.zeros_(parameter)
            elif name == "dora_scale":
                weight = self._float_weight("whose norms weight_decompose takes")
                norms = (weight if self.options.wd_on_out else weight.transpose(0, 1)).detach().to(parameter.dtype).flatten(1).norm(dim=1)
                parameter.data.copy_(norms.view_as(parameter))
            else:
                for term in parameter if self.options.terms > 1 else [parameter]:
                    nn.init.kaiming_uniform_(term, a=math.sqrt(5))

    @property
    def _alpha(self) -> float:
        """Alpha as the options have it."""
        return float(self.options.rank if self.options.alpha is None else self.options.alpha)

    # ---- the adapter's weight --------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """``alpha / rank``, which multiplies the product."""
        if not torch.compiler.is_compiling():
            self._read_alpha()
        return self._scale

    def _read_alpha(self) -> None:
        """Read alpha if it was written to since: each reading waits for a GPU."""
        alpha: Any = self._buffers["alpha"]  # self.alpha takes longer
        read, version = self._read
        now = 0 if alpha.is_inference() else alpha._version
        if (alpha is not read or now != version) and is_materialized(alpha) and not (transforms_active() or is_watching()):
            self._scale, self._read = float(alpha) / self.options.rank, (alpha, now)

    def adapter(self) -> Adapter:
        """The factors, with the terms before them if there are several, and the scale."""
        sizes, own = self._shape[2:], self._parameters  # self.lokr_w1 takes longer; a parametrization is found there alone
        get = lambda name: own[name] if name in own else getattr(self, name)  # noqa: E731
        return Adapter.of(get, self.scale, Window.of(self.base_layer) if sizes else None, sizes)

    @property
    def weight(self) -> Any:
        """The base layer's weight plus the adapter's, built at each reading; one that is merged or quantised as the base layer has it."""
        weight: Any = self.base_layer.weight
        if self.is_merged or getattr(weight, "dtype", None) not in DTYPES or is_traceable_wrapper_subclass(weight):
            return weight
        w1, w2 = self._scaled_factors()
        total = weight + self._product(w1, w2)
        return (total if self.dora_scale is None else total * self._per_weight(self._ratio(w1, w2))).to(weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The base layer's."""
        return getattr(self.base_layer, "bias", None)

    @property
    def is_merged(self) -> bool:
        """Whether an adapter is part of the base layer's weight."""
        return "merged_w1" in self._buffers

    def _scaled_factors(self) -> tuple[Tensor, Tensor]:
        """Both factors as matrices, of float32 at least, the first one with the scale: no parameters themselves."""
        adapter = self.adapter()
        w1, w2 = adapter.w1.expanded().left, adapter.w2.expanded()
        wide = torch.promote_types(w1.dtype, torch.float32)
        return w1.to(wide) * adapter.scale, w2.to(wide, copy=True)

    def _product(self, w1: Tensor, w2: Tensor) -> Any:
        """``kron(w1, w2)``, ``[out1 * out2, in1 * in2, *window]``, or the sum of such terms."""
        if self.options.terms > 1:
            return sum(map(_kron, w1, w2))
        return _kron(w1, w2)

    def _ratio(self, w1: Tensor, w2: Tensor) -> Tensor:
        """What the decomposed weight's outputs or inputs are multiplied by."""
        magnitudes: Any = self.dora_scale
        weight = self._float_weight("whose norms weight_decompose takes")
        return magnitude_ratio(weight, magnitudes.to(w1.dtype), w1, w2, by_row=self.options.wd_on_out)

    def _per_weight(self, ratio: Tensor) -> Tensor:
        """A number for each output or input, as it multiplies a weight."""
        return ratio.view(-1, *[1] * (len(self._shape) - (1 if self.options.wd_on_out else 2)))

    def _float_weight(self, purpose: str) -> nn.Parameter:
        weight: Any = getattr(self.base_layer, "weight", None)
        if type(weight) is not nn.Parameter or weight.dtype not in DTYPES:
            got = f"{type_name(weight)} of {getattr(weight, 'dtype', None)}"
            raise type_error("base_layer.weight", f"a floating-point parameter, {purpose} (dequantize the layer first)", got)
        return weight

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the base layer's weight, in place; without effect on a merged layer.

        The factors as they are now are kept for `unmerge`, in buffers that no cast rounds. They are part of the state, which only a
        merged layer loads.

        Raises:
            TypeError: the base layer's weight is quantised, or no parameter (a parametrization computes it, say).
            ValueError: a magnitude of a decomposed weight is 0.
        """
        if not self.is_merged:
            weight = self._float_weight("to add the adapter to")
            w1, w2 = self._scaled_factors()
            ratio = None if self.dora_scale is None else self._ratio(w1, w2)
            if ratio is not None and not ratio.all():
                raise value_error("dora_scale", "no magnitude of 0, which cannot be unmerged", f"{int((ratio == 0).sum())} of them")
            weight.data.copy_(self.weight)
            for name, t in (("merged_ratio", ratio), ("merged_w1", w1), ("merged_w2", w2)):
                if t is not None:
                    self.register_buffer(name, t)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take the adapter that was merged out of the weight again; without effect on a layer that is not merged.

        The weight is the former one up to the rounding of the sum, in the dtype to which the layer was cast meanwhile, if it was.

        Raises:
            TypeError: as in `merge`.
        """
        if self.is_merged:
            weight = self._float_weight("to add the adapter to")
            adapted = weight / self._per_weight(self.merged_ratio) if "merged_ratio" in self._buffers else weight
            weight.data.copy_(adapted - self._product(self.merged_w1, self.merged_w2))
            for name in ("merged_ratio", "merged_w1", "merged_w2"):
                self._buffers.pop(name, None)

    def _check_unmerged(self) -> None:
        if self.is_merged:
            raise value_error("is_merged", "False: call unmerge() first", True)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        kept: dict[str, Any] = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, after in self._buffers.items():
            if after is not None and after.dtype != kept[name].dtype:
                self._buffers[name] = kept[name].to(after.device)  # moved, but not rounded
        return self

    # ---- the forward pass ------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """The base layer's result plus the adapter's."""
        o = self.options
        is_left_out = self.training and o.module_dropout > 0 and bool(torch.rand(1) < o.module_dropout)
        if o.weight_decompose and not (self.is_merged or is_left_out):
            return self._decomposed(x)
        base: Tensor = self.base_layer(x)
        if self.is_merged or is_left_out:
            return base
        if not (self.training and (o.dropout or o.rank_dropout)):
            return self._added(x, base)
        return base + nn.functional.dropout(self.adapter().product(x) * self._kept_rows(base), o.dropout)

    def _added(self, x: Tensor, base: Tensor) -> Tensor:
        """The adapter's result plus base; of other dtypes, as of a quantised layer, as torch adds."""
        return self.adapter().added(x, base, owns_result(self.base_layer))

    def _decomposed(self, x: Tensor) -> Tensor:
        """The result of a weight ``(W0 + K) * ratio``: by inputs x is scaled first, by outputs the result without the bias is."""
        ratio = self._ratio(*self._scaled_factors())
        if not self.options.wd_on_out:
            x = x * self._per_channel(ratio).to(x.dtype)
            return self._added(x, self.base_layer(x))
        base: Tensor = self.base_layer(x)
        ratio = self._per_channel(ratio).to(base.dtype)
        if self.bias is None:
            return self._added(x, base) * ratio
        bias = self._per_channel(self.bias).to(base.dtype)
        return torch.addcmul(bias, self._added(x, base - bias), ratio)

    def _per_channel(self, t: Tensor) -> Tensor:
        """A number for each output or input, as it multiplies a result or x."""
        return t.view(-1, *[1] * (len(self._shape) - 2))

    def _kept_rows(self, base: Tensor) -> Any:
        """Of each output 0 or 1, or with rank_dropout_scale 1 over the mean, in the result's layout."""
        o = self.options
        if not o.rank_dropout:
            return 1
        kept = (torch.rand(self._shape[0], device=base.device) > o.rank_dropout).to(base.dtype)
        if o.rank_dropout_scale:
            kept = kept / kept.mean().clamp_min(1 / kept.numel())  # of none that is kept, 0
        return self._per_channel(kept)

    # ---- states ----------------------------------------------------------------------------------

    def configuration(self) -> dict[str, Any]:
        """The rank, which alpha is divided by, and whether the base layer's weight has an adapter in it."""
        return {"rank": self.options.rank, "is_merged": self.is_merged}

    def configuration_in(self, state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """As it is; a state of an earlier version is taken for one of an unmerged layer."""
        is_here = any([key.startswith(prefix) for key in state])
        return ({"is_merged": False} if is_here else {}) | super().configuration_in(state, prefix)

    def set_extra_state(self, state: Any) -> None:
        """Alpha has been loaded."""
        self._read_alpha()

    def adapter_state_dict(self, style: str = "lycoris") -> dict[str, Tensor]:
        """The adapter's state, without the base layer, under the names of another library.

        Args:
            style: "lycoris", with alpha; or "peft", which keeps alpha and rank in its configuration.

        Returns:
            Names such as ``lokr_w1`` and ``lokr_w2_a``, to be prefixed with the module's name in that library.

        Raises:
            TypeError: the style is not a string.
            ValueError: an unknown style, or one without a form for a sum of terms or for weight_decompose.
        """
        check_choice("style", style, _STYLES)
        if self.options.terms > 1 or (style == "peft" and self.options.weight_decompose):
            what = "a sum of terms" if self.options.terms > 1 else "weight_decompose"
            raise value_error("style", f"a library that has a form for {what}, or state_dict() for this one", repr(style))
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
            state: names such as ``lokr_w1``, ``lokr_w2_a`` and, of LyCORIS, ``alpha``, alone or behind the name of one layer. PEFT's
                names in a model, ``lokr_w1.default``, are taken too.

        Raises:
            TypeError: the state is not a mapping.
            ValueError: names that are missing, unknown, given twice or of several layers; another shape; the layer is merged.
        """
        check_type("state", state, Mapping, "a mapping of names to tensors")
        self._check_unmerged()
        layers = sorted({split_name(key)[0] for key in state})
        if len(layers) > 1:
            got = f"names of {len(layers)} layers, {layers[0]!r} and {layers[1]!r} among them"
            raise value_error("state", "the part of a file that is one layer's (load_lokr reads all of it)", got)
        keys: dict[str, str] = {}
        for key in state:
            name = split_name(key)[1]
            if keys.setdefault(name, key) != key:
                raise value_error("state", f"one adapter: pass the keys of one, as of {keys[name]!r}", f"{name} twice, also as {key!r}")
        given = {name: state[key] for name, key in keys.items()}
        alpha = given.pop("alpha", None)
        own = {name: getattr(self, name) for name in NAMES if getattr(self, name) is not None}
        if set(given) != set(own):
            expected = f"{', '.join(own)}, as rank={self.options.rank} and the layer's options make them (load_lokr makes layers of a file)"
            raise value_error("state", expected, ", ".join(sorted(given)) or "none")
        for name, parameter in own.items():
            if given[name].shape != parameter.shape:
                raise value_error(f"state[{name!r}]", f"shape {tuple(parameter.shape)}", f"shape {tuple(given[name].shape)}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(given[name])
            if alpha is not None:
                self.alpha.fill_(self.options.rank if self._has_whole_factors else float(alpha))
        self._read_alpha()

    @property
    def _has_whole_factors(self) -> bool:
        return self.lokr_w1 is not None and self.lokr_w2 is not None

    def extra_repr(self) -> str:
        """The text of ``print(layer)``."""
        o = self.options
        rates = [
            f"{name}={getattr(o, name)}" for name in ("dropout", "rank_dropout", "module_dropout", "weight_decompose") if getattr(o, name)
        ]
        rates += [f"terms={o.terms}"] if o.terms > 1 else []
        return ", ".join([f"rank={o.rank}, factor={o.factor}, scale={self.scale:g}", *rates])


def split_name(key: str) -> tuple[str, str]:
    """A layer's name in front of a name of a state, and that name; what PEFT puts behind it is left out."""
    parts = key.split(".")
    at = next((i for i, part in enumerate(parts) if part == "alpha" or part in NAMES), len(parts) - 1)
    return ".".join(parts[:at]), parts[at]


def _kron(w1: Tensor, w2: Tensor) -> Tensor:
    """``kron(w1, w2)`` of a matrix and a kernel, ``[out1 * out2, in1 * in2, *window]``."""
    product = w1.view(w1.shape[0], 1, w1.shape[1], *[1] * (w2.ndim - 1)) * w2.unsqueeze(1)
    return product.flatten(2, 3).flatten(0, 1)


def parameter_sizes(shape: tuple[int, ...], o: LoKrOptions) -> dict[str, tuple[int, ...]]:
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
    if o.terms > 1:
        made = {name: (o.terms, *size) for name, size in made.items()}
    if o.weight_decompose:
        made["dora_scale"] = tuple([size if i == (not o.wd_on_out) else 1 for i, size in enumerate(shape)])
    return made
