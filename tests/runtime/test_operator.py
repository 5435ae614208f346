"""Operators by one declaration: every way of calling them gives the same, with derivatives of any order.

The operators here are declared for these tests, and made of torch operations in float64, which the formulas repeat bit for bit or but
for the order of a sum: 1e-12 is far above rounding and far below a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from modes import Operators
from torch import Tensor

from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.operator import Operator, Saved
from fastkron_py.runtime.program import Program, Scalar

# torch itself scripts some decompositions when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

F64 = torch.float64
BUILT: list[str] = []  # names of the operators whose programs were built


@pytest.fixture(autouse=True)
def nothing_built() -> None:
    BUILT.clear()


def drawn(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=F64).requires_grad_(requires_grad)


def same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def second(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the gradients' squares."""
    gradients = torch.autograd.grad(function(*tensors).square().sum(), tensors, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in gradients), tensors))


# ---- an optional tensor, one that is not saved, a run-time number, forward mode and batches ---------


def _product(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """``alpha * x * w + bias``."""
    BUILT.append("product")
    build = Builder(tensors)
    like = describe(tensors[0].shape, tensors[0].dtype)
    is_scaled = options[0] == "scaled"

    def product(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
        *bias, alpha = rest
        y = alpha * (x * w) if is_scaled else x * w
        return (y + bias[0] if bias else y).contiguous()

    present = [t for t in build.inputs if t is not None]
    return build.program([build.call(product, present, like, scalars=(Scalar(0),))])


def _product_backward(saved: Saved, dy: Tensor) -> list[Tensor | None]:
    x, w, bias = saved.tensors
    assert bias is None  # its values are not read, and so not saved
    kind, alpha = saved.options
    need_x, need_w, need_bias = saved.needs
    return [
        product(dy, w, None, kind, alpha) if need_x else None,
        product(dy, x, None, kind, alpha).sum_to_size(w.shape) if need_w else None,
        dy.sum_to_size(saved.shapes[2]) if need_bias else None,
    ]


def _product_jvp(saved: Saved, tangents: Sequence[Tensor | None]) -> Tensor:
    x, w, _ = saved.tensors
    tx, tw, tb = tangents
    terms = [product(t, u, None, *saved.options) for t, u in ((tx, w), (tw, x)) if t is not None]
    total = sum(terms, torch.zeros_like(x))
    return total if tb is None else total + tb


def _product_vmap(size: int, dims: Sequence[Any], tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, int]:
    """The batch becomes the first dimension of all, expanded where there is none."""
    rank = max(t.ndim - (dim is not None) for t, dim in zip(tensors, dims, strict=True) if t is not None)
    moved = []
    for t, dim in zip(tensors, dims, strict=True):
        if t is None:
            moved.append(None)
            continue
        u = t.movedim(dim, 0) if dim is not None else t.expand(size, *t.shape)
        moved.append(u.reshape(size, *[1] * (rank + 1 - u.ndim), *u.shape[1:]))
    return product(*moved, *options), 0


product = Operator(
    "test_product(Tensor x, Tensor w, Tensor? bias, str kind, float alpha) -> Tensor",
    program=_product,
    fake=lambda x, w, bias, kind, alpha: torch.empty_like(x, memory_format=torch.contiguous_format),
    backward=_product_backward,
    jvp=_product_jvp,
    vmap=_product_vmap,
    unsaved=(2,),
    scalars=(1,),
)


def scaled(x: Tensor, w: Tensor, bias: Tensor | None = None, alpha: float = -1.5) -> Tensor:
    y: Tensor = product(x, w, bias, "scaled", alpha)
    return y


def formula(x: Tensor, w: Tensor, bias: Tensor | None = None, alpha: float = -1.5) -> Tensor:
    return alpha * x * w + (0 if bias is None else bias)


OPERANDS = [(drawn(3, 4), drawn(4), drawn(3, 4)), (drawn(3, 4), drawn(3, 4))]
WITH_AND_WITHOUT = pytest.mark.parametrize("tensors", OPERANDS, ids=["bias", "no bias"])


@WITH_AND_WITHOUT
def test_derivatives_of_any_order(tensors: tuple[Tensor, ...]) -> None:
    same(scaled(*tensors), formula(*tensors))
    assert torch.autograd.gradcheck(scaled, tensors, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(scaled, tensors)
    for _ in range(2):  # cached, too
        same(second(scaled, tensors), second(formula, tensors))


@WITH_AND_WITHOUT
def test_well_made_for_the_dispatcher(tensors: tuple[Tensor, ...]) -> None:
    given = (*tensors, *[None] * (3 - len(tensors)), "scaled", 2.0)
    torch.library.opcheck(product.registered, given)
    same(product.registered(*given), formula(*tensors, alpha=2.0))
    same(second(lambda *t: product.registered(*t, *given[len(t) :]), tensors), second(lambda *t: formula(*t, alpha=2.0), tensors))


@WITH_AND_WITHOUT
def test_transforms(tensors: tuple[Tensor, ...]) -> None:
    tensors = tuple([t.detach() for t in tensors])
    directions = tuple([torch.randn_like(t) for t in tensors])
    same(torch.func.jvp(scaled, tensors, directions), torch.func.jvp(formula, tensors, directions))
    # Forward over forward, reverse over forward, and both over a batch.
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        for inner in (torch.func.jacfwd, torch.func.jacrev):
            got, wanted = (outer(inner(lambda *t, f=f: f(*t).sin().sum())) for f in (scaled, formula))
            same(got(*tensors), wanted(*tensors))
    dims = (0, None, 0)[: len(tensors)] if tensors[1].ndim == 1 else (0, 1)
    batched = [t if dim is None else torch.stack([t, 2 * t, -t], dim) for t, dim in zip(tensors, dims, strict=True)]
    same(torch.func.vmap(scaled, dims)(*batched), torch.func.vmap(formula, dims)(*batched))
    gradients = [torch.func.vmap(torch.func.grad(lambda *t, f=f: f(*t).sin().sum()), dims)(*batched) for f in (scaled, formula)]
    same(*gradients)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(tensors[0], directions[0])
        tangents = [torch.autograd.forward_ad.unpack_dual(f(x, *tensors[1:])).tangent for f in (scaled, formula)]
    same(*tangents)


@WITH_AND_WITHOUT
def test_compiles_into_one_graph(tensors: tuple[Tensor, ...]) -> None:
    got, wanted = (lambda *t, f=f: f(*t).sin().sum() for f in (scaled, formula))
    compiled = torch.compile(got, fullgraph=True, backend="aot_eager")
    same(torch.autograd.grad(compiled(*tensors), tensors), torch.autograd.grad(wanted(*tensors), tensors))
    torch._dynamo.reset()


def test_only_the_gradients_that_are_asked_for() -> None:
    """Of leaves that need none, and of nodes that a backward pass with a graph does not go to."""
    x, w, bias = (t.detach() for t in OPERANDS[0])
    w.requires_grad_()
    BUILT.clear()
    (dw,) = torch.autograd.grad(scaled(x, w, bias).sum(), w)
    same(dw, -1.5 * x.sum(0))
    assert len(BUILT) == 2  # the call's, and one product with dy
    x.requires_grad_()
    BUILT.clear()
    CACHE.forget()
    (dx,) = torch.autograd.grad(scaled(x, w, bias).sum(), x, create_graph=True)
    same(dx, -1.5 * w.expand(3, 4))
    assert len(BUILT) == 2


def test_what_is_saved() -> None:
    tensors = OPERANDS[0]
    saved: list[int] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        scaled(*tensors)
    assert saved == [t.data_ptr() for t in tensors[:2]]  # not the bias
    y = scaled(*tensors)
    with torch.no_grad():
        tensors[0].mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_run_time_numbers_share_a_program() -> None:
    """But for one and zero, where kernels leave out a product."""
    x, w = (t.detach() for t in OPERANDS[1])
    for alpha in (2.0, -3.0, 0.5, 2.0):
        same(scaled(x, w, alpha=alpha), formula(x, w, alpha=alpha))
    assert len(BUILT) == 1
    for alpha in (1.0, 0.0, 1.0, 0.0):
        same(scaled(x, w, alpha=alpha), formula(x, w, alpha=alpha))
    assert len(BUILT) == 3
    assert torch.equal(product(x, w, None, "plain", 7.0), x * w)  # another option is another program
    assert len(BUILT) == 4


def test_autocast_is_settled_before() -> None:
    """A call, and the backward pass of one made outside, keep their dtypes under autocast."""
    tensors = [t.detach().float().requires_grad_() for t in OPERANDS[1]]
    y = scaled(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert scaled(*tensors).dtype == torch.float32
        (dx,) = torch.autograd.grad(y.sum(), tensors[0])
        with without_autocast(torch.device("cpu")):
            assert not torch.is_autocast_enabled("cpu")
    assert dx.dtype == torch.float32
    assert torch.equal(dx, -1.5 * tensors[1].detach())


def test_results_can_be_changed_in_place() -> None:
    tensors = OPERANDS[0]
    for _ in range(2):
        y = scaled(*tensors)
        got = torch.autograd.grad(y.mul_(2.0).sum(), tensors)
        same(got, torch.autograd.grad((2 * formula(*tensors)).sum(), tensors))


def test_modes_see_the_registered_operator() -> None:
    tensors = OPERANDS[0]
    scaled(*tensors)
    with Operators() as operators:
        same(scaled(*tensors), formula(*tensors))
    assert operators.names[0] == "fastkron.test_product.default"
    assert scaled(*[t.to("meta") for t in tensors]).is_meta


def _either(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    build = Builder(tensors)
    x, a, b = build.inputs
    like = describe(x.shape, x.dtype)
    if a is None:
        return build.program([build.call(lambda x, b: x * b, (x, b), like)])
    return build.program([build.call(lambda x, a: x + a, (x, a), like)])


either = Operator(
    "test_either(Tensor x, Tensor? a, Tensor? b) -> Tensor",
    program=_either,
    fake=lambda x, a, b: torch.empty_like(x),
)


def test_which_optional_tensor_is_absent() -> None:
    """Of two that are alike: the same tensors in other places are another call, and another program."""
    x, t = drawn(3, requires_grad=False), drawn(3, requires_grad=False)
    for _ in range(2):
        assert torch.equal(either(x, t, None), x + t)
        assert torch.equal(either(x, None, t), x * t)


# ---- a list of tensors, a result that is kept, another way for transforms --------------------------


def _chain(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    """``(x @ m_1 @ ... @ m_n) ** power`` and, kept, the product."""
    BUILT.append("chain")
    (power,) = options
    build = Builder(tensors)
    like = [describe((tensors[0].shape[0], tensors[-1].shape[1]), tensors[0].dtype) for _ in range(2)]

    def chain(x: Tensor, *matrices: Tensor) -> tuple[Tensor, Tensor]:
        z = _multiplied(x, matrices)
        return z**power, z

    return build.program(build.call(chain, build.inputs, *like))


def _multiplied(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    for m in matrices:
        x = x @ m
    return x


def _chain_in_torch(tensors: Sequence[Tensor], options: tuple[Any, ...]) -> Tensor:
    return _multiplied(tensors[0], tensors[1:]) ** options[0]


def _chain_fake(x: Tensor, matrices: Sequence[Tensor], power: int) -> tuple[Tensor, Tensor]:
    z = _multiplied(x, matrices)
    return torch.empty_like(z), torch.empty_like(z)


def _chain_backward(saved: Saved, dy: Tensor) -> Sequence[Tensor | None]:
    (power,) = saved.options
    (kept,) = saved.kept
    if torch.is_grad_enabled():  # what was kept is a constant to autograd
        kept = _multiplied(saved.tensors[0], saved.tensors[1:])
    dz = dy * power * kept ** (power - 1)
    found = iter(chain_gradients(dz, list(saved.tensors), list(saved.needs)))
    return [next(found) if need else None for need in saved.needs]


def _gradients(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    BUILT.append("chain_gradients")
    (needs,) = options
    build = Builder(tensors)
    likes = [describe(t.shape, t.dtype) for t, need in zip(tensors[1:], needs, strict=True) if need]

    def gradients(dz: Tensor, *given: Tensor) -> list[Tensor]:
        return _chain_gradients_in_torch((dz, *given), options)

    made = build.call(gradients, build.inputs, *likes)
    return build.program([made] if isinstance(made, Tensor) else made)


def _chain_gradients_in_torch(tensors: Sequence[Tensor], options: tuple[Any, ...]) -> list[Tensor]:
    dz, x, *matrices = tensors
    before = [x]
    for m in matrices:
        before.append(before[-1] @ m)
    found = []
    for t, m in zip(before[-2::-1], matrices[::-1], strict=True):
        found.append(t.mT @ dz)
        dz = dz @ m.mT
    return [g.contiguous() for g, need in zip([dz, *found[::-1]], options[0], strict=True) if need]


chain_gradients = Operator(
    "test_chain_gradients(Tensor dz, Tensor[] tensors, bool[] needs) -> Tensor[]",
    program=_gradients,
    fake=lambda dz, tensors, needs: [torch.empty_like(t) for t, need in zip(tensors, needs, strict=True) if need],
    backward=lambda saved, *cotangents: torch.func.vjp(lambda *t: tuple(_chain_gradients_in_torch(t, saved.options)), *saved.tensors)[1](
        tuple(cotangents)
    ),
    in_torch=_chain_gradients_in_torch,
)
chain = Operator(
    "test_chain(Tensor x, Tensor[] matrices, int power) -> (Tensor, Tensor)",
    program=_chain,
    fake=_chain_fake,
    backward=_chain_backward,
    in_torch=_chain_in_torch,
    kept=1,
)


def cubed(x: Tensor, *matrices: Tensor) -> Tensor:
    y: Tensor = chain(x, list(matrices), 3)
    return y


def cubed_formula(x: Tensor, *matrices: Tensor) -> Tensor:
    return _multiplied(x, matrices) ** 3


LISTS = [(drawn(2, 3), drawn(3, 4), drawn(4, 2)), (drawn(2, 3), drawn(3, 3))]
LENGTHS = pytest.mark.parametrize("tensors", LISTS, ids=["two", "one"])


@LENGTHS
def test_lists_and_kept_results(tensors: tuple[Tensor, ...]) -> None:
    y = cubed(*tensors)
    assert isinstance(y, Tensor)  # the kept result is not shown
    same(y, cubed_formula(*tensors))
    assert torch.autograd.gradcheck(cubed, tensors, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(cubed, tensors)
    for _ in range(2):
        same(second(cubed, tensors), second(cubed_formula, tensors))
    with torch.no_grad():
        assert isinstance(cubed(*tensors), Tensor)


@LENGTHS
def test_lists_in_the_dispatcher_and_in_graphs(tensors: tuple[Tensor, ...]) -> None:
    x, *matrices = tensors
    torch.library.opcheck(chain.registered, (x, matrices, 3))
    dz = drawn(2, tensors[-1].shape[1])
    torch.library.opcheck(chain_gradients.registered, (dz, list(tensors), [True] * len(tensors)))
    got = torch.compile(lambda *t: cubed(*t).sin().sum(), fullgraph=True, backend="aot_eager")
    same(torch.autograd.grad(got(*tensors), tensors), torch.autograd.grad(cubed_formula(*tensors).sin().sum(), tensors))
    torch._dynamo.reset()


@LENGTHS
def test_lists_in_transforms(tensors: tuple[Tensor, ...]) -> None:
    tensors = tuple([t.detach() for t in tensors])
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        got, wanted = (outer(torch.func.grad(lambda *t, f=f: f(*t).sin().sum())) for f in (cubed, cubed_formula))
        same(got(*tensors), wanted(*tensors))
    batch = torch.stack([tensors[0], -tensors[0]], 1)
    dims = (1, *[None] * (len(tensors) - 1))
    same(torch.func.vmap(cubed, dims)(batch, *tensors[1:]), torch.func.vmap(cubed_formula, dims)(batch, *tensors[1:]))


@LENGTHS
def test_lists_of_results(tensors: tuple[Tensor, ...]) -> None:
    """Those asked for, as a list in every way of calling."""
    dz = drawn(2, tensors[-1].shape[1])
    for needs in ([True] * len(tensors), [False, True, *[False] * (len(tensors) - 2)]):
        wanted = _chain_gradients_in_torch((dz, *tensors), (needs,))
        for _ in range(2):
            got = chain_gradients(dz, list(tensors), needs)
            assert isinstance(got, list)
            same(got, wanted)
        same(chain_gradients.registered(dz, list(tensors), needs), wanted)
        with torch.no_grad():
            assert isinstance(chain_gradients(dz, list(tensors), needs), list)


def test_a_rule_that_is_wrong_is_seen() -> None:
    """The control of gradcheck: a derivative of another sign."""
    wrong = Operator(
        "test_wrong(Tensor x) -> Tensor",
        program=lambda tensors, options: _square(tensors),
        fake=torch.empty_like,
        backward=lambda saved, dy: [-2 * dy * saved.tensors[0]],
    )
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(wrong, (drawn(3),))


def _square(tensors: Sequence[Any]) -> Program:
    build = Builder(tensors)
    return build.program([build.call(torch.square, build.inputs, describe(tensors[0].shape, tensors[0].dtype))])


def test_tensors_come_first() -> None:
    with pytest.raises(ValueError, match="expected tensors before other arguments"):
        Operator("test_order(int n, Tensor x) -> Tensor", program=_chain, fake=_chain_fake)
