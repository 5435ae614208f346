"""LoKr adapters of whole models: read from files of LyCORIS, kohya, diffusers and PEFT, written for them, cut for ranks.

Files are safetensors; a pickled file is refused, since reading one can run code.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fastkron_py.adapters.plan import split_size
from fastkron_py.nn.lokr import LoKrConv2d, LoKrLinear
from fastkron_py.nn.lokr_base import NAMES, LoKrLayer, LoKrOptions, split_name
from fastkron_py.nn.lokr_tensors import Tensors, cut_columns, cut_rows, holder, join_rows, rank_of, scaled, sizes_of
from fastkron_py.runtime.checks import check_choice, check_integer, check_positive, check_scalar, check_type
from fastkron_py.runtime.errors import type_error, type_name, value_error

_PEFT: Final = "base_model.model."
FORMATS: Final = {"lycoris": "lycoris", "kohya": "lora_unet", "diffusers": "transformer", "peft": _PEFT[:-1]}  # with their prefixes
_UNDERSCORED: Final = ("lycoris_", "lora_unet_", "lora_transformer_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_te_")
_DOTTED: Final = (_PEFT, "transformer.", "unet.", "text_encoder.", "text_encoder_2.", "diffusion_model.", "model.diffusion_model.")
_SHOWN: Final = 8  # problems in an error
_DIFFUSERS_METADATA: Final = "lora_adapter_metadata"

# Projections that some models have in one layer, and others in several.
_FUSED: Final = {
    "to_qkv": (("to_q", "to_k", "to_v"),),
    "to_added_qkv": (("add_q_proj", "add_k_proj", "add_v_proj"),),
    "to_kv": (("to_k", "to_v"),),
    "qkv_proj": (("q_proj", "k_proj", "v_proj"),),
    "qkv": (("to_q", "to_k", "to_v"), ("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value")),
    "gate_up_proj": (("gate_proj", "up_proj"),),
}
# FLUX's layers as their authors name them, and as diffusers does: the first of these that the model has. Two names are two layers.
_FLUX: Final = {
    "double": {
        "img_attn_qkv": ("attn.to_q attn.to_k attn.to_v", "attn.to_qkv"),
        "txt_attn_qkv": ("attn.add_q_proj attn.add_k_proj attn.add_v_proj", "attn.to_added_qkv"),
        "img_attn_proj": ("attn.to_out.0",),
        "txt_attn_proj": ("attn.to_add_out",),
        "img_mlp_0": ("ff.net.0.proj", "ff.linear_in"),
        "img_mlp_2": ("ff.net.2", "ff.linear_out"),
        "txt_mlp_0": ("ff_context.net.0.proj", "ff_context.linear_in"),
        "txt_mlp_2": ("ff_context.net.2", "ff_context.linear_out"),
        "img_mod_lin": ("norm1.linear",),
        "txt_mod_lin": ("norm1_context.linear",),
    },
    "single": {
        "linear1": ("attn.to_q attn.to_k attn.to_v proj_mlp", "attn.to_qkv_mlp_proj"),
        "linear2": ("proj_out", "attn.to_out"),
        "modulation_lin": ("norm.linear",),
    },
}
_FLUX_BLOCK: Final = re.compile(r"(double|single)_blocks[._](\d+)[._](.+)")
_FLUX_HEADS: Final = {"double": "transformer_blocks", "single": "single_transformer_blocks"}


# ---- reading ---------------------------------------------------------------------------------------


def load_lokr(
    model: nn.Module,
    state: Mapping[str, Tensor] | str | os.PathLike[str],
    *,
    prefix: str | None = None,
    names: Mapping[str, str | Sequence[str]] | None = None,
    scale: float | None = None,
    adapter_dtype: torch.dtype | None = None,
) -> tuple[str, ...]:
    """Put a file's LoKr adapters into a model: its layers become `LoKrLinear` and `LoKrConv2d` around the layers that they were.

    The file may be LyCORIS's, kohya's, diffusers', PEFT's or one from `lokr_state`: names with dots or underscores, behind any of their
    prefixes. Ranks, factors, whole and low-rank factors, Tucker's form and weight decomposition follow from the tensors. One adapter for
    projections that are several layers of the model is cut, and adapters of several projections that are one layer are joined, exactly.
    Nothing is changed if any key of the file has no place.

    Args:
        model: to change, in place. A layer that has an adapter gets the file's instead.
        state: names and tensors; or the path of a safetensors file, or of PEFT's folder.
        prefix: take the keys that begin with it alone, such as "lora_te1" or "text_encoder"; the others are of other models.
        names: the model's layers for layers of the file, without prefixes, where the names differ. Several layers share an adapter's rows.
        scale: what multiplies ``kron(w1, w2)``, for names and tensors of PEFT's: its alpha and rank are in adapter_config.json, which is
            read from the file's folder.
        adapter_dtype: as in `LoKrLinear`.

    Returns:
        The names of the layers that have an adapter of the file.

    Raises:
        TypeError: an argument of the wrong type, or a layer of a kind that cannot have its adapter.
        ValueError: keys without a place in the model, tensors that do not fit its layers, adapters without a scale: all of them named; a
            file that is not in the safetensors format.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> w1, w2, alpha = torch.ones(8, 8), torch.ones(8, 8), torch.tensor(1.0)
        >>> load_lokr(model, {"lycoris_0.lokr_w1": w1, "lycoris_0.lokr_w2": w2, "lycoris_0.alpha": alpha})
        ('0',)
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    check_type("prefix", prefix, str | None, "a string or None")
    if scale is not None:
        check_scalar("scale", scale)
    tensors, config = _read(state)
    given, problems = _by_layer(tensors, prefix)
    if not given and not problems:
        raise value_error(
            "state", f"keys{f' that begin with {prefix!r}' if prefix else ''}", f"{len(tensors)} others" if tensors else "none"
        )
    places = _Places(model, names or {})
    if not places.layers:
        expected = "a module with linear layers or convolutions in it, which are replaced there"
        raise value_error("model", expected, "such a layer itself" if _can_adapt(model) else f"none in {type_name(model)}")
    adapters: dict[tuple[str, int], dict[int, _Adapter]] = {}  # of each layer and number of its parts
    flags = [(p, p.requires_grad) for p in model.parameters()]
    for name, layer in given.items():
        try:
            adapter = _adapter(name, layer, config, scale)
            for (layer_name, number, parts), part in places.of(name, adapter):
                slot = adapters.setdefault((layer_name, parts), {})
                if number in slot or sum([layer_name == other for other, _ in adapters]) > 1:
                    raise value_error(name, f"one adapter of {layer_name}", "a second one in the same file (prefix= takes those of one)")
                slot[number] = part
        except (TypeError, ValueError) as error:
            problems.append(str(error) if str(error).startswith(name) else f"{name}: {error}")
    made: dict[str, LoKrLayer] = {}
    for (layer_name, number), slot in adapters.items():
        try:
            base = places.layers[layer_name]
            adapter = slot[0] if number == 1 else _joined(slot, number, base)
            made[layer_name] = _around(base, adapter, adapter_dtype)
        except (TypeError, ValueError) as error:
            problems.append(f"{layer_name}: {error}")
    if problems:
        for p, flag in flags:  # which layers that were made have frozen
            p.requires_grad_(flag)
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise value_error("state", "LoKr adapters of the model's layers", "; ".join(problems[:_SHOWN]) + more)
    for layer_name, new in made.items():
        places.put(layer_name, new)
    return tuple(made)


class _Adapter(NamedTuple):
    """A layer's adapter as a file has it.

    Attributes:
        tensors: by their names in `LoKrLayer`.
        rank: of the pairs, or what the file says.
        scale: of ``kron(w1, w2)``.
    """

    tensors: dict[str, Tensor]
    rank: int
    scale: float


def _read(state: Any) -> tuple[Mapping[str, Tensor], Mapping[str, Any] | None]:
    """The tensors, and PEFT's configuration if there is one."""
    if isinstance(state, Mapping):
        wrong = next((key for key, t in state.items() if not isinstance(key, str) or not isinstance(t, Tensor)), None)
        if wrong is not None:
            raise type_error(f"state[{wrong!r}]", "a tensor of a name", type_name(state[wrong]))
        return state, None
    check_type("state", state, str | os.PathLike, "names and tensors, or the path of a file or of PEFT's folder")
    path = Path(state)
    if path.is_dir():
        path = path / "adapter_model.safetensors"
    if path.suffix != ".safetensors":
        raise value_error("state", "a .safetensors file: others are pickled, and reading one can run code", repr(str(path)))
    if not path.is_file():
        raise value_error("state", "a file that exists", repr(str(path)))
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("load_lokr reads files by the package safetensors: pip install safetensors") from error
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise value_error("state", "a safetensors file", f"{str(path)!r}: {error}") from None
    beside = path.with_name("adapter_config.json")
    is_pefts = path.name == "adapter_model.safetensors" and beside.is_file()
    config = json.loads(metadata.get(_DIFFUSERS_METADATA) or (beside.read_text() if is_pefts else "{}"))
    if config.get("peft_type", "LOKR") != "LOKR":
        raise value_error("state", "an adapter of PEFT's type LOKR", repr(config["peft_type"]))
    return tensors, config if "r" in config and "alpha" in config else None


def _by_layer(tensors: Mapping[str, Tensor], prefix: str | None) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """The tensors of each layer, by the layer's name in the file without a given prefix, and keys that are not LoKr's."""
    given: dict[str, dict[str, Tensor]] = {}
    problems = []
    for key, tensor in tensors.items():
        if prefix is not None and not key.startswith(prefix):
            continue
        layer, name = split_name(key if prefix is None else key[len(prefix) :].lstrip("._"))
        if name not in (*NAMES, "alpha"):
            problems.append(f"{key} is no tensor of LoKr")
        elif name in given.setdefault(layer, {}):
            problems.append(f"{key} is there twice, as of two adapters: pass the keys of one")
        else:
            given[layer][name] = tensor
    return given, problems


def _adapter(name: str, tensors: dict[str, Tensor], config: Mapping[str, Any] | None, scale: float | None) -> _Adapter:
    """The adapter of a layer of a file, with its rank and scale."""
    tensors = dict(tensors)
    alpha = tensors.pop("alpha", None)
    _check_whole(tensors)
    rank = rank_of(tensors)
    if config is not None:
        own = name.removeprefix(_PEFT)
        of_config = _of_pattern(config, "rank_pattern", own, config["r"])
        return _Adapter(tensors, rank or int(of_config), _of_pattern(config, "alpha_pattern", own, config["alpha"]) / of_config)
    if rank is None:
        number = 0.0 if alpha is None else float(alpha)
        sizes = sizes_of(tensors, rows=True)[1], sizes_of(tensors, rows=False)[1]
        rank = int(number) if number >= 1 and number.is_integer() else max(sizes)
        if alpha is not None:  # which LyCORIS does not read beside whole factors
            return _Adapter(tensors, rank, 1.0)
    if alpha is not None:
        return _Adapter(tensors, rank, float(alpha) / rank)
    if scale is not None:
        return _Adapter(tensors, rank, float(scale))
    if name.startswith(_PEFT):
        raise value_error("scale", "alpha / rank, which PEFT has in adapter_config.json: pass its folder, or scale=", "None")
    if name.startswith(_UNDERSCORED):
        raise value_error("alpha", "a tensor of the file, or scale=", "none")
    return _Adapter(tensors, rank, 1.0)  # diffusers has the scale in w1


def _check_whole(tensors: Tensors) -> None:
    """The tensors are those of one adapter."""
    for w in ("lokr_w1", "lokr_w2"):
        there = [n for n in (w, f"{w}_a", f"{w}_b") if n in tensors]
        if there not in ([w], [f"{w}_a", f"{w}_b"]):
            raise value_error(w, f"{w}, or {w}_a and {w}_b", " and ".join(there) or "neither")
    if "lokr_t2" in tensors and "lokr_w2" in tensors:
        raise value_error("lokr_t2", "lokr_w2_a and lokr_w2_b with it", "lokr_w2")


def _of_pattern(config: Mapping[str, Any], patterns: str, name: str, default: float) -> float:
    """A layer's number in PEFT's configuration."""
    found = [number for key, number in (config.get(patterns) or {}).items() if re.match(rf"(.*\.)?({key})$", name)]
    return float(found[0] if found else default)


# ---- the model's layers ----------------------------------------------------------------------------


_Place = tuple[str, int, int]  # a layer, the number of a part of it, and how many parts it has


class _Places:
    """The layers of a model that a file's names stand for.

    Attributes:
        layers: those that can have an adapter, by their names in the model.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, str | Sequence[str]]) -> None:
        self._names = names
        self._modules = dict(model.named_modules(remove_duplicate=False))
        inside = [name + "." for name, module in self._modules.items() if isinstance(module, LoKrLayer)]
        self.layers = {
            name: module for name, module in self._modules.items() if name and _can_adapt(module) and not name.startswith(tuple(inside))
        }
        self._underscored: dict[str, list[str]] = {}
        self._first: dict[nn.Module, str] = {}  # of the names of a shared layer
        for name, layer in self.layers.items():
            self._underscored.setdefault(name.replace(".", "_"), []).append(name)
            self._first.setdefault(layer, name)

    def of(self, name: str, adapter: _Adapter) -> list[tuple[_Place, _Adapter]]:
        """The places of an adapter of a file, with the part that each gets."""
        for candidate in _candidates(name):
            for each in ([candidate], *_splits(candidate)):
                named = [self._named(own) for own in each]
                if all(named):
                    layers = [layer for found in named for layer in found]
                    if len(layers) == 1:
                        return [((layers[0], 0, 1), adapter)]
                    parts = cut_rows(adapter.tensors, [_shape(self.layers[layer])[0] for layer in layers])
                    return [((layer, 0, 1), adapter._replace(tensors=part)) for layer, part in zip(layers, parts, strict=True)]
            place = self._part(candidate)
            if place is not None:
                return [(place, adapter)]
        raise value_error(name, "a layer of the model that can have an adapter", self._nearest(name))

    def put(self, name: str, layer: LoKrLayer) -> None:
        """Put a layer in the place of another one, under all of its names."""
        old = self.layers[name]
        for each, module in self._modules.items():
            if module is old:
                parent, _, own = each.rpartition(".")
                setattr(self._modules[parent], own, layer)

    def _named(self, candidate: str) -> tuple[str, ...]:
        """The layers that a name stands for: one, by the caller's names several, or none."""
        given = self._names.get(candidate)
        if given is not None:
            wanted = (given,) if isinstance(given, str) else tuple(given)
            missing = [layer for layer in wanted if layer not in self.layers]
            if missing:
                raise value_error(f"names[{candidate!r}]", "layers of the model that can have an adapter", ", ".join(missing))
            return wanted
        found = [candidate] if candidate in self.layers else self._underscored.get(candidate, [])
        if len(found) > 1:
            raise value_error(candidate, "a name of one layer: pass names=", f"that of {' and '.join(found)}")
        return tuple([self._first[self.layers[layer]] for layer in found])

    def _part(self, candidate: str) -> _Place | None:
        """The layer of the model, some of whose rows are a layer of the file."""
        for fused, groups in _FUSED.items():
            for group in groups:
                for i, own in enumerate(group):
                    stem = _stem(candidate, own)
                    found = () if stem is None else self._named(f"{stem}{fused}")
                    if found:
                        return found[0], i, len(group)
        return None

    def _nearest(self, name: str) -> str:
        own = _candidates(name)[-1]
        if own in self._modules:
            return f"{type_name(self._modules[own])}, neither a linear layer nor an nn.Conv2d"
        near = difflib.get_close_matches(own.replace(".", "_"), self._underscored, 1)
        if not near:
            return f"none among {len(self.layers)} (prefix= leaves out the keys of other models)"
        return f"none; the nearest is {self._underscored[near[0]][0]} (names= gives other names)"


def _candidates(name: str) -> list[str]:
    """A file's name of a layer, and the same without prefixes."""
    found = [name]
    for prefixes in (_DOTTED, _UNDERSCORED, _DOTTED):
        found += [name.removeprefix(p) for name in found for p in prefixes if name.startswith(p)]
    return list(dict.fromkeys(found))


def _splits(candidate: str) -> Iterator[list[str]]:
    """Names of layers that may share the rows of one layer of the file."""
    block = _FLUX_BLOCK.fullmatch(candidate)
    if block is not None:
        kind, number, tail = block.groups()
        for option in _FLUX[kind].get(tail.replace(".", "_"), ()):
            yield [f"{_FLUX_HEADS[kind]}.{number}.{own}" for own in option.split()]
    for fused, groups in _FUSED.items():
        stem = _stem(candidate, fused)
        yield from [[f"{stem}{own}" for own in group] for group in (groups if stem is not None else ())]


def _stem(candidate: str, own: str) -> str | None:
    """What stands before the last part of a name, or None where that is another one."""
    stem = candidate.removesuffix(own)
    return stem if stem != candidate and stem[-1:] in ("", ".", "_") else None


def _can_adapt(module: nn.Module) -> bool:
    return isinstance(module, LoKrLayer | nn.Conv2d) or all([hasattr(module, name) for name in ("in_features", "out_features")])


def _shape(layer: Any) -> tuple[int, ...]:
    """The sizes of a layer's weight, also of one that is packed."""
    if isinstance(layer, LoKrConv2d | nn.Conv2d):
        conv: Any = layer
        return conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size
    return int(layer.out_features), int(layer.in_features)


# ---- layers around them ----------------------------------------------------------------------------


def _joined(slot: Mapping[int, _Adapter], parts: int, base: nn.Module) -> _Adapter:
    """One adapter of the adapters of parts of a layer; a part that is missing has the rows that the others have."""
    each = _shape(base)[0] // parts
    sizes = [math.prod(sizes_of(slot[i].tensors, rows=True)) if i in slot else each for i in range(parts)]
    tensors = join_rows([scaled(slot[i].tensors, slot[i].scale) if i in slot else None for i in range(parts)], sizes)
    rank = tensors["lokr_w2_b"].shape[-2] if "lokr_w2_b" in tensors else next(iter(slot.values())).rank
    return _Adapter(tensors, rank, 1.0)


def _around(base: nn.Module, adapter: _Adapter, dtype: torch.dtype | None) -> LoKrLayer:
    """The layer with an adapter; one that had another keeps its dropout rates."""
    former = base if isinstance(base, LoKrLayer) else None
    if former is not None:
        former._check_unmerged()
    inner = base if former is None else former.base_layer
    shape = _shape(inner)
    tensors = _fitted(adapter.tensors, shape)
    terms = tensors["lokr_w1"].shape[0] if "lokr_w1" in tensors and tensors["lokr_w1"].ndim == 3 else 1
    kept = LoKrOptions(1) if former is None else former.options
    options = kept._replace(
        rank=adapter.rank,
        factor=sizes_of(tensors, rows=True)[0],
        decompose_both="lokr_w1_a" in tensors,
        alpha=adapter.scale * adapter.rank,
        use_tucker="lokr_t2" in tensors,
        weight_decompose="dora_scale" in tensors,
        wd_on_out="dora_scale" not in tensors or tuple(tensors["dora_scale"].shape) == _sides(shape)[0],
        terms=terms,
    )
    sizes = {name: tuple(t.shape) for name, t in tensors.items()}
    make: type[LoKrLayer] = LoKrConv2d if len(shape) > 2 else LoKrLinear
    layer = make.around(inner, options, dtype, sizes)
    layer.load_adapter_state_dict(tensors)
    return layer


def _fitted(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The tensors in the shapes that a layer has: windows of one pixel come and go.

    Raises:
        ValueError: another layer's.
    """
    fitted, window = dict(tensors), shape[2:]
    if fitted[holder(fitted, 1, True)[0]].ndim == 2:  # one term
        if "lokr_w2_b" in fitted and "lokr_t2" not in fitted:
            fitted["lokr_w2_b"] = fitted["lokr_w2_b"].flatten(1)
        if "lokr_w2" in fitted and fitted["lokr_w2"].shape[2:].numel() == math.prod(window):
            fitted["lokr_w2"] = fitted["lokr_w2"].reshape(*fitted["lokr_w2"].shape[:2], *window)
    (out1, out2), (in1, in2) = sizes_of(fitted, rows=True), sizes_of(fitted, rows=False)
    core = fitted.get("lokr_t2", fitted.get("lokr_w2"))
    if core is None:  # a pair, which has the window in its columns
        in2, rest = divmod(in2, math.prod(window))
        found = window if rest == 0 else (rest,)
    else:
        found = tuple(core.shape[fitted[holder(fitted, 1, True)[0]].ndim :])
    if (out1 * out2, in1 * in2, *found) != shape:
        sizes = " and ".join([f"{name} {tuple(t.shape)}" for name, t in fitted.items() if name != "dora_scale"])
        raise value_error("w1 and w2", f"factors of a weight {shape}", sizes)
    if "dora_scale" in fitted and tuple(fitted["dora_scale"].shape) not in _sides(shape):
        outputs, inputs = _sides(shape)
        raise value_error("dora_scale", f"shape {outputs} or {inputs}", f"shape {tuple(fitted['dora_scale'].shape)}")
    return fitted


def _sides(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of magnitudes of outputs and of inputs."""
    return [tuple([size if i == side else 1 for i, size in enumerate(shape)]) for side in (0, 1)]


# ---- writing ---------------------------------------------------------------------------------------


def lokr_state(model: nn.Module, format: str = "lycoris", *, prefix: str | None = None) -> dict[str, Tensor]:
    """The LoKr adapters of a model, by the names of another library: for `safetensors.torch.save_file`.

    PEFT keeps alpha and rank in a configuration: `fastkron_py.integrations.peft.lokr_config` makes it. diffusers' adapters have the scale
    in w1.

    Args:
        model: with `LoKrLinear` or `LoKrConv2d` layers.
        format: "lycoris", "kohya", "diffusers" or "peft".
        prefix: of the names, in place of "lycoris", "lora_unet", "transformer" or "base_model.model".

    Returns:
        The tensors; those of parameters share their memory.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown format, a model without LoKr layers, or layers that the format has no form for: all of them named.

    Example:
        >>> sorted(lokr_state(torch.nn.Sequential(LoKrLinear(64, 64, 16)), "kohya"))
        ['lora_unet_0.alpha', 'lora_unet_0.lokr_w1', 'lora_unet_0.lokr_w2']
    """
    check_choice("format", format, tuple(FORMATS))
    check_type("prefix", prefix, str | None, "a string or None")
    layers = lokr_layers(model)
    _check_format(layers, format)
    state: dict[str, Tensor] = {}
    for name, layer in layers.items():
        written = f"{FORMATS[format] if prefix is None else prefix}.{name}"
        if format in ("lycoris", "kohya"):
            written, tensors = written.replace(".", "_"), layer.adapter_state_dict("lycoris")
        else:
            tensors = layer.adapter_state_dict("peft")
            if format == "diffusers":
                tensors = scaled(tensors, layer.scale)
        state |= {f"{written}.{own}": t for own, t in tensors.items()}
    return state


def lokr_layers(model: nn.Module) -> dict[str, LoKrLayer]:
    """The LoKr layers of a model.

    Raises:
        TypeError: no module.
        ValueError: a model without any.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoKrLayer)}
    if not layers or "" in layers:
        got = "such a layer itself: layer.adapter_state_dict()" if layers else f"none in {type_name(model)}: load_lokr puts them there"
        raise value_error("model", "a module with layers LoKrLinear or LoKrConv2d in it", got)
    return layers


def _check_format(layers: Mapping[str, LoKrLayer], format: str) -> None:
    """Each layer has a form in the format."""
    problems, is_pefts = [], format in ("diffusers", "peft")
    for name, layer in layers.items():
        has = {
            "a sum of terms": layer.options.terms > 1,
            "weight_decompose": is_pefts and layer.options.weight_decompose,
            "convolutions": format == "diffusers" and isinstance(layer, LoKrConv2d),
        }
        problems += [f"{name} with {what}" for what, is_there in has.items() if is_there]
    if problems:
        raise value_error("format", f"one that has a form for every layer: {format!r} has none for some", "; ".join(problems[:_SHOWN]))
    if is_pefts:
        common_factor(layers)


def common_factor(layers: Mapping[str, LoKrLayer]) -> int:
    """The one decompose_factor by which PEFT splits the sizes of all layers as they are split.

    Raises:
        ValueError: there is none.
    """
    splits = {}
    for name, layer in layers.items():
        first = layer.adapter().w1.size
        splits[name] = [*zip((first.rows, first.columns), _shape(layer)[:2], strict=True)]
    for factor in (-1, *sorted({first for split in splits.values() for first, _ in split})):
        # To PEFT, a factor that divides is the first, also where it is the larger one.
        pairs = [pair for split in splits.values() for pair in split]
        if all([(factor if factor > 0 and size % factor == 0 else split_size(size, factor)[0]) == first for first, size in pairs]):
            return factor
    shown = [f"{name} {split[0][0]} x {split[1][0]}" for name, split in splits.items()][:_SHOWN]
    raise value_error("format", "another one: PEFT and diffusers have one decompose_factor for all layers", f"w1 of {', '.join(shown)}")


# ---- parts for tensor-parallel ranks ---------------------------------------------------------------


def shard_lokr(state: Mapping[str, Tensor], plan: Mapping[str, str], rank: int, world_size: int) -> dict[str, Tensor]:
    """A tensor-parallel rank's part of an adapter's state, for `load_lokr` into the rank's part of the model.

    Args:
        state: as of `lokr_state`.
        plan: for each pattern of layer names (as of `fnmatch`), "colwise" if a rank has a part of the outputs, or "rowwise" if it has
            a part of the inputs and results are summed over ranks. Other layers stay whole.
        rank: this one's.
        world_size: number of ranks.

    Returns:
        The same names, and smaller tensors.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a rank outside of the world, an unknown part of a plan, or sizes that the ranks cannot share.

    Example:
        >>> state = lokr_state(torch.nn.Sequential(LoKrLinear(64, 64, 16)))
        >>> shard_lokr(state, {"*_0": "colwise"}, 0, 2)["lycoris_0.lokr_w1"].shape
        torch.Size([4, 8])
    """
    check_positive("world_size", world_size)
    if not 0 <= check_integer("rank", rank) < world_size:
        raise value_error("rank", f"a rank below world_size={world_size}", rank)
    for pattern, kind in plan.items():
        check_choice(f"plan[{pattern!r}]", kind, ("colwise", "rowwise"))
    given, problems = _by_layer(state, None)
    if problems:
        raise value_error("state", "tensors of LoKr", "; ".join(problems[:_SHOWN]))
    sharded: dict[str, Tensor] = {}
    for name, tensors in given.items():
        found = [plan[pattern] for pattern in plan if fnmatch.fnmatchcase(name, pattern)]
        try:
            if found[:1] == ["colwise"]:
                rows = math.prod(sizes_of(tensors, rows=True))
                if rows % world_size:
                    raise value_error("rows", f"a multiple of {world_size} ranks", rows)
                tensors = cut_rows(tensors, [rows // world_size] * world_size)[rank]
            elif found:
                tensors = cut_columns(tensors, world_size)[rank]
        except ValueError as error:
            raise ValueError(f"state: {name}: {error}") from None
        sharded |= {f"{name}.{own}": t.contiguous() for own, t in tensors.items()}
    return sharded
