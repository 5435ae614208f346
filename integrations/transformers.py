"""Hugging Face Transformers: the gated MLPs of its models, and of others, on `fastkron_py.functional.gated_mlp`.

``use_fastkron(model)``, or ``with use_fastkron(model):``, is all that is needed. Needs the extra "llm".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastkron_py.gated.activations.registry import activation_names, find_activation
from fastkron_py.gated.api import BACKWARDS, gated_linear, gated_mlp
from fastkron_py.integrations.replacement import Applied, Replacement, own_class, replace, revert_fastkron
from fastkron_py.integrations.versions import of_extra
from fastkron_py.nn.modules import is_hooked, is_plain_linear
from fastkron_py.runtime.checks import HALF_DTYPES, REAL_DTYPES, check_choice, check_precision
from fastkron_py.runtime.errors import type_name

with of_extra("llm", "transformers"):
    import transformers as transformers

__all__ = ["Applied", "AppliedToLlama", "apply_to_llama", "revert_fastkron", "revert_llama", "use_fastkron"]


def use_fastkron(model: nn.Module, *, backward: str = "save", precision: str | None = None) -> Applied:
    """Let the gated MLPs of a Hugging Face model compute with `fastkron_py.functional.gated_mlp`.

    A gated MLP is a module whose forward pass is ``scale * down(up(x) * act(gate(x)))``, with two weights for up and gate or one for
    both. It is recognized by running its forward pass on a few numbers, not by its class, so models of other libraries work too.
    Constants such as clamps are read during this call.

    Modules, parameters, their names and their memory stay, so optimizers, states, `save_pretrained` and checkpoints do not change. If a
    projection gets an adapter or a hook later, or the activation changes, or dropout is active, the original forward pass runs.

    Args:
        model: a model, or a part of one, on the device that it is to run on or not.
        backward: "save" or "recompute", as in `gated_linear`.
        precision: of products in float32, as in `kron_matmul`.

    Returns:
        The modules replaced, those left alone with the reason, and `close` to revert; ``print`` shows a count for each class. A second
        call replaces no module again.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown backward or precision; a model without a module to replace; the message says why.

    Example:
        >>> applied = use_fastkron(model)
        >>> logits = model(input_ids).logits
        >>> applied.close()
    """
    check_choice("backward", backward, BACKWARDS)
    check_precision(precision)
    return replace(model, GatedProjections, backward, precision)


# Names of earlier versions.
AppliedToLlama, apply_to_llama, revert_llama = Applied, use_fastkron, revert_fastkron


class GatedProjections(Replacement):
    """The forward pass of a gated MLP, in place of that of the next class."""

    PREFIX = "Gated"
    EXPECTED = "gated MLPs, down(up(x) * act(gate(x))), that can be replaced"
    OPTIONS = ("_fastkron_backward", "_fastkron_precision")

    @classmethod
    def is_candidate(cls, module: Any) -> bool:
        """Whether it looks like a gated MLP."""
        return read_form(module) is not None

    @classmethod
    def obstacle(cls, module: Any) -> str | None:
        """Why an MLP is left alone, or None."""
        if "forward" in module.__dict__:
            return "its forward was replaced by another library"
        form = read_form(module)
        return next(_obstacles(module, form), None) if isinstance(form, Form) else form

    @classmethod
    def on_change(cls, module: Any) -> None:
        """Give an MLP its form, or, if it has been changed back, take it."""
        if isinstance(module, GatedProjections):
            module.__dict__["_fastkron_form"] = read_form(module)
        else:
            module.__dict__.pop("_fastkron_form", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``[..., in]`` to ``[..., out]``."""
        mlp: Any = self
        form: Form = mlp._fastkron_form
        down = mlp._modules[form.down]
        wide = tuple([mlp._modules[name] for name in dict.fromkeys((form.up, form.gate))])
        bases = [base_of(module) for module in wide]
        if len(args) != 1 or kwargs or None in bases or not form.holds(mlp) or _is_wider(down, bases[0]):
            return super().forward(*args, **kwargs)
        if (bases[0].bias is None) != (bases[-1].bias is None):
            return super().forward(*args, **kwargs)
        options: dict[str, Any] = {
            "activation": form.activation,
            "backward": mlp._fastkron_backward,
            "precision": mlp._fastkron_precision,
            **_operands(form.layout, bases, added(wide, args[0], swap=form.layout == "gate, up")),
        }
        if is_plain_linear(down):
            y: Tensor = gated_mlp(args[0], options.pop("weight"), down.weight, down_bias=down.bias, **options)
        else:
            y = down(gated_linear(args[0], **options))
        return y if form.scale == 1 else y * form.scale


def _is_wider(down: Any, up: Any) -> bool:
    """Whether only the down projection is in float32, as in T5, whose forward pass converts what it gets."""
    weight = getattr(down, "weight", None)
    return isinstance(weight, Tensor) and weight.dtype == torch.float32 and up.weight.dtype in HALF_DTYPES


def _operands(layout: str, bases: list[Any], added: Tensor | None) -> dict[str, Any]:
    """Weight and bias, as of `gated_linear`, of two projections or of one that holds both, which adapters add ``[..., 2 H]`` to."""
    weights, biases = [base.weight for base in bases], [base.bias for base in bases if base.bias is not None]
    if layout:
        weights, biases = [[half for t in whole for half in t.unflatten(0, (2, -1)).unbind()] for whole in (weights, biases)]
    if layout == "gate, up":
        weights, biases = weights[::-1], biases[::-1]
    if added is None:
        return {"weight": tuple(weights), "bias": tuple(biases) or None}
    added = added.unflatten(-1, (2, -1))
    return {"weight": tuple(weights), "bias": added + torch.stack(biases) if biases else added}


def _obstacles(module: Any, form: Form) -> Iterator[str]:
    """Why an MLP of this form is left alone."""
    bases = {name: base_of(getattr(module, name)) or getattr(module, name) for name in (form.gate, form.up)}
    for name, linear in bases.items():
        if type(linear) is not nn.Linear:
            yield f"its {name} is {type_name(linear)}, an adapter's or a quantised layer"
        elif is_hooked(linear):
            yield f"its {name} has hooks"
        elif not is_plain_linear(linear):
            yield f"the weight of its {name} is {type_name(linear.weight)}, no plain parameter"
        elif linear.weight.dtype not in REAL_DTYPES:
            yield f"the weight of its {name} is of dtype {linear.weight.dtype}"
    yield from [f"its {name} has hooks" for name, child in form.others if is_hooked(child)]
    gate, up = bases[form.gate], bases[form.up]
    for what in ("shape", "dtype", "device"):
        if getattr(up.weight, what) != getattr(gate.weight, what):
            yield f"its {form.gate} and {form.up} differ in {what}"
    if (up.bias is None) != (gate.bias is None):
        yield f"only one of its {form.gate} and {form.up} has a bias"


# ---- how a module computes a gated MLP, found by running its forward pass --------------------------
# The module's own code runs in float64 on the CPU with stand-ins for its projections, which take any input and return chosen numbers.
# What reaches the down projection then tells the activation and its constants, and the result tells what follows. Names of classes and
# attributes do not matter. Weights are not read: they may be large, quantised, or on the meta device.

_FAR: Final = 1e6  # beyond the limits of all clamps
# Rows of up and gate: four that tell the constants of a clamped SwiGLU, two beyond its limits. Two rows of random numbers follow.
_UP: Final = (0.0, 1.0, _FAR, 1.0, -_FAR, 3.0)
_GATE: Final = (1.0, 1.0, 1.0, -1.0, 3.0, _FAR)
_ROWS: Final = len(_UP) + 2
_FEW: Final = 16  # columns that choose among activations
_TOLERANCE: Final = 1e-6  # a forward pass may round to float32


class Form(NamedTuple):
    """A gated MLP, ``scale * down(up * act(gate))``.

    Attributes:
        up: name of a projection.
        gate: name of a projection; up's if one weight holds both.
        down: name of a projection.
        layout: of a weight that holds both: "up, gate" or "gate, up"; else "".
        activation: as in `gated_linear`.
        scale: a number.
        others: names of the module's other children, and the children.
        drops: whether a dropout is part of the forward pass.
    """

    up: str
    gate: str
    down: str
    layout: str
    activation: str
    scale: float
    others: tuple[tuple[str, nn.Module], ...]
    drops: bool

    def holds(self, mlp: nn.Module) -> bool:
        """Whether the module still computes this, projections aside: with its activation, and without hooks or an active dropout."""
        if self.drops and any([module.training for module in mlp.modules()]):
            return False
        return all([mlp._modules.get(name) is module and not is_hooked(module) for name, module in self.others])


def read_form(module: nn.Module) -> Form | str | None:
    """The form of a module; why it has none; or None if it does not look like a gated MLP.

    It looks like one if its projections have such sizes, and if all but one of them get its input.
    """
    linears = {name: linear for name, child in module.named_children() if (linear := _linear_in(child)) is not None}
    sizes = {name: (int(linear.in_features), int(linear.out_features)) for name, linear in linears.items()}
    width = _width(list(sizes.values()))
    if width is None:
        return None
    others = tuple([(name, child) for name, child in module.named_children() if name not in linears])
    tensors = [*module._parameters.values(), *module._buffers.values()]
    tensors += [t for _, child in others for t in (*child.parameters(), *child.buffers())]
    if any([t is not None for t in tensors]):  # three equal layers are rather an attention's
        equal = len({*sizes.values()}) == 1
        return None if equal else "it has parameters or buffers besides those of its projections"
    x = _numbers(_ROWS, width)[None]
    values = {name: _numbers(_ROWS, outputs) for name, (_, outputs) in sizes.items()}
    inputs, result, drops = _run(module, x, values)
    wide = [name for name, given in inputs.items() if len(given) == 1 and _is_close(given[0], x)]
    if len(wide) != len(sizes) - 1:
        return None
    (down,) = sizes.keys() - set(wide)
    if not isinstance(result, Tensor) or len(inputs[down]) != 1:
        return f"its forward pass does not run by itself: {result}"
    scale = _scale(result, values[down][None])
    if scale is None:
        return "after its down projection its forward pass does more than multiply with a number"
    up, gate = (
        torch.cat([_rows(numbers, sizes[down][0]), _numbers(2, sizes[down][0], seed=i)]) for i, numbers in enumerate((_UP, _GATE), 1)
    )
    for names, layout, given in _roles(wide, up, gate):
        activation = _activation(_run(module, x, values | given)[0][down][0], up, gate)
        if activation is not None:
            return Form(*names, down, layout, activation, scale, others, drops)
    return f"its down projection does not get up * act(gate) with one of {', '.join(activation_names())}"


def _linear_in(child: nn.Module) -> Any:
    """A linear layer, the one that an adapter holds, or None."""
    return next((m for m in (child, *child.children()) if hasattr(m, "in_features") and hasattr(m, "out_features")), None)


def _width(sizes: list[tuple[int, int]]) -> int | None:
    """The inputs of an MLP whose projections, in any order, have these (inputs, outputs); None if none has."""
    if not all([size > 0 for pair in sizes for size in pair]):
        return None
    if len(sizes) == 2:
        fitting = [wide for wide, down in (sizes, sizes[::-1]) if wide[1] == 2 * down[0]]
    else:
        fitting = [sizes[i] for i in range(len(sizes)) if len(sizes) == 3 and sizes[i] == sizes[i - 1] and sizes[i][1] == sizes[i - 2][0]]
    return fitting[0][0] if fitting else None


# ---- running a forward pass ------------------------------------------------------------------------


class _StandIn(nn.Module):
    """A projection that keeps what it is given and returns numbers of its own."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values, self.inputs = values, list[Tensor]()
        self.weight = values[:0]  # whose dtype a forward pass may compare with

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.values.view(*x.shape[:-1], -1).clone()


class _Dropouts(TorchFunctionMode):
    """Leaves dropouts out, and knows whether there was one."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.dropout:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "p"), args, strict=False)) | (kwargs or {})
        self.seen |= given.get("p", 0.5) > 0
        return given["input"]


def _run(module: nn.Module, x: Tensor, values: Mapping[str, Tensor]) -> tuple[dict[str, list[Tensor]], Any, bool]:
    """Run a module's forward pass, in training, on a copy that shares everything but projections, which return these values.

    Returns:
        What projections were given; the result, or an error's text; whether there was a dropout.
    """
    kind = own_class(module)
    stand_ins = {name: _StandIn(numbers) for name, numbers in values.items()}
    twin = object.__new__(kind)
    twin.__dict__.update(module.__dict__, _modules={**module._modules, **stand_ins}, training=True)
    with torch.no_grad(), _Dropouts() as dropouts:
        try:
            result = kind.forward(twin, x.clone())
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
    return {name: stand_in.inputs for name, stand_in in stand_ins.items()}, result, dropouts.seen


# ---- numbers ---------------------------------------------------------------------------------------


@lru_cache(maxsize=8)  # layers of a model have the same sizes
def _numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Random, for reading alone."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return 4 * torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu")


def _rows(numbers: tuple[float, ...], columns: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")[:, None].expand(-1, columns)


def _is_close(t: Tensor, expected: Tensor) -> bool:
    """Whether these are the same numbers in the same order."""
    return t.numel() == expected.numel() and torch.allclose(t.reshape(expected.shape).double(), expected, _TOLERANCE, _TOLERANCE)


def _scale(t: Tensor, values: Tensor) -> float | None:
    """The number that values were multiplied with, or None."""
    if t.shape != values.shape:
        return None
    number = float(f"{float((t * values).sum() / values.square().sum()):.9g}")
    return number if _is_close(t, number * values) else None


def _roles(wide: list[str], up: Tensor, gate: Tensor) -> Iterator[tuple[tuple[str, str], str, dict[str, Tensor]]]:
    """((up's, gate's projection), layout, what they return), for everything that projections may be."""
    if len(wide) == 2:
        for names in (wide[::-1], wide):
            yield (names[0], names[1]), "", dict(zip(names, (up, gate), strict=True))
    else:
        for layout, halves in (("gate, up", [gate, up]), ("up, gate", [up, gate])):
            yield (wide[0], wide[0]), layout, {wide[0]: torch.cat(halves, -1)}


def _activation(t: Tensor, up: Tensor, gate: Tensor) -> str | None:
    """The activation with which t is ``up * act(gate)``, or None."""
    if t.numel() != up.numel():
        return None
    t = t.reshape(up.shape)
    few = slice(None), slice(_FEW)
    for name in filter(None, (*activation_names(), _with_constants(t[:, 0].tolist()))):
        found = find_activation(name)
        if _is_close(t[few], found.gate(up[few], gate[few])) and _is_close(t, found.gate(up, gate)):
            return name
    return None


def _with_constants(results: list[float]) -> str | None:
    """The clamped SwiGLU that has these results for the rows above, if there is one."""
    zero, one, far, negative, *_ = results
    try:
        value = one - zero
        offset = zero / value
        scale = value - negative / (1 + offset)
        numbers = [far / value - offset, -math.log(scale / value - 1), offset, scale]
    except (ZeroDivisionError, ValueError):
        return None
    if not all(map(math.isfinite, numbers)) or numbers[0] <= 0:
        return None
    limit, *rest = [f"{round(number, 9) + 0.0:.9g}" for number in numbers]
    return f"clamped_swiglu({', '.join(['inf' if numbers[0] > _FAR / 2 else limit, *rest])})"


# ---- LoRA adapters of PEFT on the wide projections: their sums are added before the activation -----


def base_of(module: Any) -> Any:
    """A plain linear layer, or the one inside a LoRA layer which only adds to its result; None for other modules.

    DoRA and other variants scale that result. A layer that is merged and disabled is unmerged by its own forward pass.
    """
    if is_plain_linear(module):
        return module
    lora: Any = sys.modules.get("peft.tuners.lora.layer")
    if lora is None or type(module) is not lora.Linear or is_hooked(module) or not is_plain_linear(module.base_layer):
        return None
    if module.lora_variant or (module.merged and module.disable_adapters):
        return None
    inner = [*module.lora_A.values(), *module.lora_B.values()]
    is_plain = all([is_plain_linear(layer) for layer in inner]) and all([layer.bias is None for layer in module.lora_B.values()])
    return module.base_layer if is_plain else None


def added(projections: tuple[Any, ...], x: Tensor, swap: bool) -> Tensor | None:
    """``[..., 2 H]``, what adapters add to the results of both projections, or of one that holds both; None if there is no adapter.

    Swapped, the second half comes first.
    """
    if all([is_plain_linear(module) for module in projections]):
        return None
    factors = [_factors(module, x) for module in reversed(projections)][::-1]  # dropout draws for the gate first, as models do
    narrow = torch.cat([h for h, _ in factors], -1)
    weight = torch.block_diag(*[b for _, b in factors])
    return torch.nn.functional.linear(narrow, weight.roll(len(weight) // 2, 0) if swap else weight)


def _factors(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., R]`` and ``[H, R]``, whose product the module's active adapters add, in the dtype of x."""
    base = base_of(module)
    narrow, wide = [x.new_empty(*x.shape[:-1], 0)], [x.new_empty(base.out_features, 0)]
    if base is not module and not (module.merged or module.disable_adapters):
        for name in module.active_adapters:
            if name in module.lora_A:
                operand = module.lora_dropout[name](module._cast_input_dtype(x, module.lora_A[name].weight.dtype))
                narrow.append((module.lora_A[name](operand) * module.scaling[name]).to(x.dtype))
                wide.append(module.lora_B[name].weight.to(x.dtype))
    return torch.cat(narrow, -1), torch.cat(wide, -1)
