"""Operators by one declaration: every way of calling them gives the same, with derivatives of any order.

The operators here are declared for these tests, and made of torch operations in float64, which the formulas repeat bit for bit or but
for the order of a sum: 1e-12 is far above rounding and far below a mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkron_py.runtime import operator
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.operator import Operator, Saved, source_tag
from fastkron_py.runtime.program import Program, Scalar

F64 = torch.float64
BUILT: list[str] = []  # names of the operators whose programs were built


@pytest.fixture(autouse=True)
def nothing_built() -> None:
    BUILT.clear()


def drawn(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=F64).requires_grad_(requires_grad)


def same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


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


def test_tensors_come_first() -> None:
    with pytest.raises(ValueError, match="expected tensors before other arguments"):
        Operator("test_order(int n, Tensor x) -> Tensor", program=_product, fake=torch.empty_like)


# ---- graphs that torch keeps on disk ----------------------------------------------------------------


def test_graphs_on_disk_belong_to_the_code_that_made_them(tmp_path: Path) -> None:
    """torch finds compiled graphs by operators' names: after an update it ran the backward pass of the version before."""
    for copy, code in {"a": "backward = 1", "b": "backward = 1", "c": "backward = 2"}.items():
        (tmp_path / copy / "runtime").mkdir(parents=True)
        (tmp_path / copy / "runtime" / "operator.py").write_text(code)
    a, b, c = (source_tag(tmp_path / copy) for copy in "abc")
    assert a == b != c
    assert source_tag(Path(torch.__file__).parent / "no such folder") != a
    assert torch.compiler.config.cache_key_tag.endswith(source_tag(Path(operator.__file__).parents[1]))
