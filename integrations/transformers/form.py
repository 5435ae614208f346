"""How a module computes a gated MLP, found by running its forward pass.

The module's own code runs in float64 on the CPU with stand-ins for its projections, which take any input and return chosen numbers. What
reaches the down projection then tells the activation and its constants, and the result tells what follows. Names of classes and attributes
do not matter. Weights are not read: they may be large, quantised, or on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastkron_py.gated.activations.registry import activation_names, find_activation
from fastkron_py.integrations.replacement import own_class
from fastkron_py.nn.modules import is_hooked

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
