"""What torch asks of the gated operators: derivatives of every order, fakes, compilation, vmap, autocast."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from gated_cases import ACTIVATIONS, LAYOUTS, pack, problem
from sampling import in_full
from torch import Tensor
from torch.autograd import forward_ad

import fastkron_py
from fastkron_py import gated_linear
from fastkron_py.functional import gated_mlp
from fastkron_py.testing import assert_close

# Torch's own, in forward mode and where it first compiles.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:.*TensorFloat32 tensor cores.*:UserWarning",
)

FORWARD = torch.ops.fastkron.gated_linear.default
SAVING = torch.ops.fastkron.gated_linear_saving.default
BACKWARD = torch.ops.fastkron.gated_linear_backward.default
IN_PLACE = torch.ops.fastkron.gated_linear_backward_.default
BACKWARDS = ("save", "recompute")


def sample(device: torch.device, generator: torch.Generator, layout: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x, weight and bias that need gradients, and dy."""
    x, up, gate, dy = problem(3, 2, 4, dtype, device, generator)
    bias = pack(torch.randn(2), torch.randn(2), layout).to(device, dtype)
    return x.requires_grad_(), pack(up, gate, layout).requires_grad_(), bias.requires_grad_(), dy


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "relu"])  # which has a kink
def test_gradcheck(activation: str, device: torch.device, generator: torch.Generator) -> None:
    for layout, backward in product(LAYOUTS, BACKWARDS):
        x, weight, bias, _ = sample(device, generator, layout)

        def call(x: Tensor, weight: Tensor, bias: Tensor, layout: str = layout, backward: str = backward) -> Tensor:
            return gated_linear(x, weight, bias=bias, layout=layout, activation=activation, backward=backward)

        assert torch.autograd.gradcheck(call, (x, weight, bias), fast_mode=activation != "silu")
        assert torch.autograd.gradgradcheck(call, (x, weight, bias), fast_mode=True)


def test_registered_operators_have_derivatives(device: torch.device, generator: torch.Generator) -> None:
    """The operators themselves, which compiled graphs hold, beside the eager call's shorter way."""
    for layout in LAYOUTS:
        *given, _ = sample(device, generator, layout)
        for operator in (FORWARD, SAVING):

            def call(x: Tensor, weight: Tensor, bias: Tensor, operator=operator, layout=layout) -> Tensor:
                found = operator(x, weight, None, bias, None, None, "silu", layout, None, "")
                return found[0] if isinstance(found, tuple) else found

            assert torch.autograd.gradcheck(call, given, fast_mode=True)
            assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize(
    ("needs", "layout"),
    [
        ((True, True, True, True, True), "interleaved"),
        ((False, False, False, True, False), "stacked"),
        *in_full([((True, True, True, True, True), "stacked"), ((True, False, False, False, False), "interleaved")]),
    ],
    ids=str,
)
def test_opcheck(needs: tuple[bool, ...], layout: str, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    *given, _ = sample(device, generator, layout, torch.float32)
    given += [torch.randn(3, 2, device=device), torch.randn(3, device=device)]
    dy = torch.randn(3, 3, device=device)
    options = ("silu", layout, "highest", backend_name)
    given = [t.detach().requires_grad_(need) for t, need in zip(given, needs, strict=True)]
    given.insert(2, None)
    needs = (*needs[:2], False, *needs[2:])
    torch.library.opcheck(FORWARD, (*given, *options))
    if needs[0]:
        torch.library.opcheck(FORWARD, (*given[:2], None, None, None, None, *options))
    torch.library.opcheck(SAVING, (*given, *options))
    pairs = SAVING(*(None if t is None else t.detach() for t in given), *options)[1]
    torch.library.opcheck(BACKWARD, (dy, *given, None, *needs, *options))
    torch.library.opcheck(BACKWARD, (dy, *given, pairs, *needs, *options))
    frozen = [None if t is None else t.detach() for t in given]
    torch.library.opcheck(IN_PLACE, (dy, *frozen, pairs, *needs, *options), test_utils=("test_schema", "test_faketensor"))


def test_gradcheck_of_a_whole_mlp(device: torch.device, generator: torch.Generator) -> None:
    for layout, backward in product(LAYOUTS, BACKWARDS):
        x, weight, bias, _ = sample(device, generator, layout)
        down = torch.randn(3, 2, dtype=torch.float64, device=device, requires_grad=True)
        down_bias = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)

        def call(x: Tensor, weight: Tensor, bias: Tensor, down: Tensor, down_bias: Tensor, layout=layout, backward=backward) -> Tensor:
            return gated_mlp(x, weight, down, bias=bias, down_bias=down_bias, layout=layout, backward=backward)

        assert torch.autograd.gradcheck(call, (x, weight, bias, down, down_bias), fast_mode=True)
        assert torch.autograd.gradgradcheck(call, (x, weight, bias, down, down_bias), fast_mode=True)
        alone = call(x, weight.detach(), bias.detach(), down, down_bias.detach())
        (ddown,) = torch.autograd.grad(alone.sum(), down)
        y = gated_linear(x, weight, bias=bias, layout=layout).detach()
        assert_close(ddown, y.sum(0).expand(3, 2).contiguous(), rms_tol=1e-13, max_tol=1e-13)


@pytest.mark.parametrize(("backward", "layout"), [*zip(BACKWARDS, LAYOUTS, strict=True)])
def test_compiles_in_one_graph(backward: str, layout: str, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    torch.compiler.reset()
    x, weight, bias, dy = sample(device, generator, layout, torch.float32)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return gated_linear(x, weight, bias=bias, layout=layout, backward=backward, precision="highest")

    compiled: Callable[..., Tensor] = torch.compile(call, fullgraph=True)
    wanted = (x, weight, bias)
    y = compiled(*wanted)
    assert_close(y.detach(), call(*wanted).detach())
    for a, e in zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(call(*wanted), wanted, dy), strict=True):
        assert_close(a, e)


@pytest.mark.parametrize("backward", BACKWARDS)
def test_vmap_over_a_backward_pass(backward: str, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Several gradients of one result at once: nothing that the others read is overwritten."""
    x, weight, _, dy = sample(device, generator, "stacked", torch.float32)
    y = gated_linear(x, weight, layout="stacked", backward=backward)
    dys = torch.stack([dy, 2 * dy, -dy])

    def gradients(dy: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, (x, weight), dy, retain_graph=True)

    for found in (torch.func.vmap(gradients)(dys), torch.autograd.grad(y, (x, weight), dys, is_grads_batched=True)):
        for i, each in enumerate(dys):
            for mine, alone in zip(found, torch.autograd.grad(gated_linear(x, weight, layout="stacked"), (x, weight), each), strict=True):
                assert_close(mine[i], alone)


@pytest.mark.parametrize("backward", ["save", "recompute"])
def test_forward_mode_through_a_backward_pass(backward: str, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Of a layer that was recorded outside of it: a tangent of dy reaches the gradients, which are linear in dy."""
    for layout in LAYOUTS:
        x, up, gate, dy = problem(3, 5, 4, torch.float32 if backend_name == "triton" else torch.float64, device, generator)
        leaves = [t.requires_grad_() for t in (x, pack(up, gate, layout))]
        y = gated_linear(*leaves, activation="sigmoid", layout=layout, backward=backward)  # torch's silu_backward has no forward mode
        tangent = torch.randn_like(dy)
        want = torch.autograd.grad(y, leaves, tangent, retain_graph=True)
        with forward_ad.dual_level():
            found = torch.autograd.grad(y, leaves, forward_ad.make_dual(dy, tangent))
            tangents = [forward_ad.unpack_dual(g).tangent for g in found]
        for got, w in zip(tangents, want, strict=True):
            assert_close(got, w.double(), rms_tol=2e-6, max_tol=1e-5)


def test_vmap_of_the_operators(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """The rules that a compiled graph uses."""
    x, weight, bias, dy = (t.detach() for t in sample(device, generator, "stacked", torch.float32))
    options = ("silu", "stacked", "highest", backend_name)
    rest, needs = (None, bias, None, None), (True, True, False, True, False, False)
    xs, ws, dys = (torch.stack([t, 2 * t]) for t in (x, weight, dy))
    for dims in ((0, None), (None, 0), (0, 0)):
        arguments = [a if d is None else s for a, s, d in zip((x, weight), (xs, ws), dims, strict=True)]
        y = torch.vmap(lambda a, b: FORWARD(a, b, *rest, *options), in_dims=dims)(*arguments)
        saved = torch.vmap(lambda a, b: SAVING(a, b, *rest, *options), in_dims=dims)(*arguments)
        found = torch.vmap(lambda a, b, g: BACKWARD(g, a, b, *rest, None, *needs, *options), in_dims=(*dims, 0))(*arguments, dys)
        for i in range(2):
            a, b = (t if d is None else t[i] for t, d in zip(arguments, dims, strict=True))
            assert_close(y[i], FORWARD(a, b, *rest, *options))
            for mine, alone in zip(saved, SAVING(a, b, *rest, *options), strict=True):
                assert_close(mine[i], alone)
            for mine, alone in zip(found, BACKWARD(dys[i], a, b, *rest, None, *needs, *options), strict=True):
                assert_close(mine[i], alone)


def test_autocast(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, weight, _, _ = sample(device, generator, "interleaved", torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = gated_linear(x, weight)
        assert gated_linear(x.double(), weight.double()).dtype == torch.float64
    assert torch.equal(y, gated_linear(x.bfloat16(), weight.bfloat16()))
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_triton_is_refused_where_it_cannot_be(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastkron_py.runtime import backend as backends

    monkeypatch.setattr(backends, "triton_obstacle", lambda x: "it is Sunday")
    with fastkron_py.backend("triton"), pytest.raises(ValueError, match="backend 'triton', but it is Sunday"):
        gated_linear(torch.randn(3, 2, device=device), torch.randn(4, 2, device=device))
