"""Operators `fastkron::gated_linear`, `fastkron::gated_linear_saving` and `fastkron::gated_linear_backward`.

gated_linear           y = up * act(gate), up and gate being the two halves of x W^T + b
gated_linear_saving    y, and the two halves side by side, which backward may read instead of computing them again
gated_linear_backward  [dx] + [dW] + [db], only those asked for

Backward makes the gradients of up and gate in one kernel; the products with W and x are torch's. Derivatives of gradients, and everything
inside torch.func's transforms and forward mode, are torch's own, of the same layer written in torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastkron_py.kernels.precision import resolved, torch_products
from fastkron_py.ops.backend import choose_backend, requested_backend
from fastkron_py.ops.implementation import unseen_by_autograd
from fastkron_py.ops.plain import is_ordinary, transforms_active, wants_gradient

LIBRARY = torch.library.Library("fastkron", "FRAGMENT")
_OPTIONS = "str activation, str layout, str? precision, str backend"
_NEEDS = "bool need_x, bool need_weight, bool need_bias"
# No defaults: the dispatcher drops arguments that equal theirs, and the autograd wrapper then miscounts.
LIBRARY.define(f"gated_linear(Tensor x, Tensor weight, Tensor? bias, {_OPTIONS}) -> Tensor")
LIBRARY.define(f"gated_linear_saving(Tensor x, Tensor weight, Tensor? bias, {_OPTIONS}) -> (Tensor, Tensor)")
LIBRARY.define(f"gated_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? pairs, {_NEEDS}, {_OPTIONS}) -> Tensor[]")
_NO_GRADIENTS: Final = (None,) * 4  # of the options

# Terms of a sum that float32 products of three TF32 passes may have: tensor cores cut their sums off (see `ops/poly_kan.py`).
_LONGEST_SUM: Final = 512


def hidden_size(weight: Tensor) -> int:
    """H of a weight ``[2 H, K]`` or ``[2, H, K]``."""
    return weight.shape[1] if weight.ndim == 3 else weight.shape[0] // 2


# ---- implementations -------------------------------------------------------------------------


def _by_triton(x: Tensor, weight: Tensor, activation: str, precision: str | None, backend: str) -> bool:
    """Whether Triton is to multiply: not what is empty or float64, nor, unless it was asked for, float32 sums too long for it."""
    from fastkron_py.kernels.gated_activations import find_activation

    chosen = choose_backend(backend, x)
    if chosen == "torch" or x.dtype == torch.float64 or x.numel() == 0 or weight.numel() == 0:
        return False
    if not find_activation(activation).has_device_functions:
        return False
    exact = x.is_cuda and x.dtype == torch.float32 and x.shape[-1] > _LONGEST_SUM and resolved(precision) == "highest"
    return not (exact and (backend or requested_backend()) == "auto")


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, saving: bool, activation: str, layout: str, precision: str | None, backend: str
) -> tuple[Tensor, Tensor | None]:
    """(y, pairs ``[M, 2 H]`` where they are saved)."""
    pairs: Tensor | None
    with unseen_by_autograd(x), torch.no_grad():
        x2 = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
        if _by_triton(x, weight, activation, precision, backend):
            from fastkron_py.kernels import triton_gated

            y, pairs = triton_gated.forward(x2, weight, bias, triton_gated.Gated(activation, layout, resolved(precision)), saving)
        else:
            from fastkron_py.kernels import torch_gated

            with torch_products(x, precision):
                pairs = torch_gated.pairs_of(x2, weight, bias)
            y = torch_gated.gate(pairs, activation, layout)
        return y.reshape(*x.shape[:-1], y.shape[1]), pairs if saving else None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """The layer's result; arguments as in the operator's schema."""
    return _forward(x, weight, bias, False, *options)[0]


def multiply_saving(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """The result, and pairs ``[M, 2 H]``."""
    y, pairs = _forward(x, weight, bias, True, *options)
    assert pairs is not None  # noqa: S101
    return y, pairs


def _pair_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pairs: Tensor | None,
    in_place: bool,
    activation: str,
    layout: str,
    precision: str | None,
    backend: str,
) -> Tensor:
    """Gradients of the pairs ``[M, 2 H]``, for matrices x and dy."""
    if _by_triton(x, weight, activation, precision, backend):
        from fastkron_py.kernels import triton_gated

        gated = triton_gated.Gated(activation, layout, resolved(precision))
        if pairs is None:
            return triton_gated.recomputed_gradients(dy, x, weight, bias, gated)
        return triton_gated.stored_gradients(dy, pairs, gated, in_place)
    from fastkron_py.kernels import torch_gated

    with torch_products(x, precision):
        pairs = torch_gated.pairs_of(x, weight, bias) if pairs is None else pairs
    return torch_gated.pair_gradients(dy, pairs, activation, layout)


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pairs: Tensor | None,
    needs: Sequence[bool],
    in_place: bool,
    *options: Any,
) -> list[Tensor]:
    """[dx] + [dW] + [db], those that are needed; in_place: pairs may be overwritten."""
    need_x, need_weight, need_bias = needs
    if not any(needs):
        return []
    with unseen_by_autograd(x), torch.no_grad():
        rows = x.shape[:-1].numel()
        x2, dy2 = x.reshape(rows, x.shape[-1]), dy.reshape(rows, dy.shape[-1])
        d = _pair_gradients(dy2, x2, weight, bias, pairs, in_place, *options)
        results = []
        with torch_products(x, options[2]):
            if need_x:
                results.append((d @ weight.reshape(d.shape[1], x2.shape[1])).reshape(x.shape))
            if need_weight:
                results.append((d.mT @ x2).reshape(weight.shape))
        if need_bias and bias is not None:
            wide = torch.float64 if d.dtype == torch.float64 else torch.float32
            results.append(d.sum(0, dtype=wide).to(d.dtype).reshape(bias.shape))
        return results


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pairs: Tensor | None,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    *options: Any,
) -> list[Tensor]:
    """[dx] + [dW] + [db], those that are needed; arguments as in the operator's schema."""
    return _gradients(dy, x, weight, bias, pairs, (need_x, need_weight, need_bias), False, *options)


def in_torch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layout: str, precision: str | None, _: str) -> Tensor:
    """The same result by torch's own operations, which every transform of torch knows."""
    from fastkron_py.kernels import torch_gated

    with torch_products(x, precision):
        return torch_gated.forward(x, weight, bias, activation, layout)


def _wanted(x: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> list[Tensor]:
    return [t for t, need in zip((x, weight, bias), needs, strict=True) if need and t is not None]


def _take(found: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Each result in its argument's place, None for those that were not asked for."""
    given = iter(found)
    return [next(given) if need else None for need in needs]


def _second(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Cotangents of dy, x, weight and bias, of the backward operator."""
    from fastkron_py.kernels import torch_gated

    dy, x, weight, bias = ctx.saved_tensors
    if all(c is None for c in cotangents):
        return None, None, None, None
    activation, layout, precision, _ = ctx.options
    with torch_products(x, precision):
        return torch_gated.second_order(dy, (x, weight, bias), tuple(cotangents), activation, layout)


# ---- the operators ---------------------------------------------------------------------------

LIBRARY.impl("gated_linear", multiply, "CompositeExplicitAutograd")
LIBRARY.impl("gated_linear_saving", multiply_saving, "CompositeExplicitAutograd")
LIBRARY.impl("gated_linear_backward", gradients, "CompositeExplicitAutograd")


@torch.library.register_fake("fastkron::gated_linear", lib=LIBRARY)
def _(x, weight, bias, *options):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], hidden_size(weight)))


@torch.library.register_fake("fastkron::gated_linear_saving", lib=LIBRARY)
def _(x, weight, bias, *options):  # type: ignore[no-untyped-def]
    hidden = hidden_size(weight)
    return x.new_empty((*x.shape[:-1], hidden)), x.new_empty((x.shape[:-1].numel(), 2 * hidden))


@torch.library.register_fake("fastkron::gated_linear_backward", lib=LIBRARY)
def _(dy, x, weight, bias, pairs, need_x, need_weight, need_bias, *options):  # type: ignore[no-untyped-def]
    return [t.new_empty(t.shape) for t in _wanted(x, weight, bias, (need_x, need_weight, need_bias))]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, *options = inputs
    ctx.save_for_backward(x, weight, bias, None)
    ctx.options = options


def _setup_saving(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, *options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.options = options


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    x, weight, bias, pairs = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    found = torch.ops.fastkron.gated_linear_backward(dy, x, weight, bias, pairs, *needs, *ctx.options) if any(needs) else []
    return *_take(found, needs), *_NO_GRADIENTS


def _setup_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dy, x, weight, bias, _, need_x, need_weight, need_bias, *options = inputs
    ctx.save_for_backward(dy, x, weight, bias)
    ctx.needs = (need_x, need_weight, need_bias)
    ctx.options = options


def _backward_second(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return *_second(ctx, _take(cotangents, ctx.needs)), None, None, None, None, *_NO_GRADIENTS


torch.library.register_autograd("fastkron::gated_linear", _backward, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("fastkron::gated_linear_saving", _backward, setup_context=_setup_saving, lib=LIBRARY)
torch.library.register_autograd("fastkron::gated_linear_backward", _backward_second, setup_context=_setup_second, lib=LIBRARY)


def _each(call: Any, size: int, tensors: Sequence[Tensor | None], dims: Sequence[int | None], options: Sequence[Any]) -> list[Any]:
    """One call for each sample."""
    samples = [[t] * size if t is None or dim is None else t.unbind(dim) for t, dim in zip(tensors, dims, strict=True)]
    return [call(*sample, *options) for sample in zip(*samples, strict=True)]


def _stacked(found: Sequence[Sequence[Tensor]]) -> Any:
    results = [torch.stack(list(sample)) for sample in zip(*found, strict=True)]
    return results, [0] * len(results)


def _vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, int]:
    call = torch.ops.fastkron.gated_linear
    if in_dims[1] is None and in_dims[2] is None:  # samples are rows
        return call(x.movedim(in_dims[0], 0), weight, bias, *options), 0
    return torch.stack(_each(call, info.batch_size, (x, weight, bias), in_dims[:3], options)), 0


def _vmap_saving(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Any:
    results, dims = _stacked(_each(torch.ops.fastkron.gated_linear_saving, info.batch_size, (x, weight, bias), in_dims[:3], options))
    return tuple(results), tuple(dims)


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    return _stacked(_each(torch.ops.fastkron.gated_linear_backward, info.batch_size, arguments[:5], in_dims[:5], arguments[5:]))


torch.library.register_vmap("fastkron::gated_linear", _vmap, lib=LIBRARY)
torch.library.register_vmap("fastkron::gated_linear_saving", _vmap_saving, lib=LIBRARY)
torch.library.register_vmap("fastkron::gated_linear_backward", _vmap_backward, lib=LIBRARY)


# ---- eager calls, with less ado than the dispatcher's wrapper ----------------------------------


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, saving: bool, options: tuple[Any, ...]) -> Tensor:
        y, pairs = _forward(x, weight, bias, saving, *options)
        ctx.save_for_backward(x, weight, bias, pairs)
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias, pairs = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if not any(needs):
            return None, None, None, None, None
        tensors = (dy, x, weight, bias)
        if not is_ordinary(tensors) or wants_gradient(tensors):
            found = _Gradients.apply(*tensors, pairs, needs, ctx.options)  # type: ignore[no-untyped-call]
            return *_take(found, needs), None, None
        # Pairs belong to this graph alone. One that is not kept for another backward pass needs them no longer.
        in_place = pairs is not None and not torch._C._autograd._get_current_graph_task_keep_graph()
        found = _gradients(*tensors, pairs, needs, in_place, *ctx.options)
        if in_place:
            torch.autograd.graph.increment_version(pairs)  # whoever reads them nevertheless gets an error
        return *_take(found, needs), None, None


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pairs: Tensor | None,
        needs: tuple[bool, ...],
        options: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        return tuple(torch.ops.fastkron.gated_linear_backward(dy, x, weight, bias, pairs, *needs, *options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        dy, x, weight, bias, _, ctx.needs, ctx.options = inputs
        ctx.save_for_backward(dy, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return *_second(ctx, _take(cotangents, ctx.needs)), None, None, None


for _function in (_GatedLinear, _Gradients):
    # Else torch works it out at every call, which takes longer than a small kernel.
    _function.forward.__signature__ = inspect.signature(_function.forward)  # type: ignore[union-attr]


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, saving: bool, *options: Any) -> Tensor:
    """Call the operator, by the shortest way that is right; options as in its schema.

    Its implementation where nothing else is at work; its twin as an autograd function where gradients are wanted of an ordinary
    call; torch's own operations inside torch.func and forward mode; else, through torch's dispatcher, the operator itself.
    """
    if transforms_active():
        return in_torch(x, weight, bias, *options)
    tensors = (x, weight, bias)
    wanted = wants_gradient(tensors)
    if not is_ordinary(tensors):
        if saving and wanted:
            y: Tensor = torch.ops.fastkron.gated_linear_saving(x, weight, bias, *options)[0]
        else:
            y = torch.ops.fastkron.gated_linear(x, weight, bias, *options)
        return y
    if wanted:
        y = _GatedLinear.apply(x, weight, bias, saving, options)  # type: ignore[no-untyped-call]
        return y
    return multiply(x, weight, bias, *options)
