"""Programs that depend on where their inputs lie: which begin at 16-byte boundaries, and which of two lies ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastkron_py.runtime.builder import Builder, Spanning, describe
from fastkron_py.runtime.operator import Operator
from fastkron_py.runtime.program import FARTHEST, Program, order_of


def unaligned(t: Tensor) -> Tensor:
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def apart(count: int, *shape: int) -> list[Tensor]:
    """Tensors in memory of their own, the one of the lowest address first."""
    return sorted([torch.randn(shape) for _ in range(count)], key=Tensor.data_ptr)


def test_alignment_counts_where_it_was_asked_for() -> None:
    x, bias = torch.randn(4, 8), torch.randn(8)
    for first in (x, unaligned(x)):
        build = Builder([first, bias])
        assert build.is_aligned(build.inputs[0]) is (first is x)
        assert not build.is_aligned(build.inputs[0][:, 1:])
        program = build.program([build.call(torch.add, build.inputs, describe((4, 8), x.dtype))])
        assert [program.takes(given) for given in ((x, bias), (unaligned(x), bias))] == [first is x, first is not x]
        assert program.takes((first, unaligned(bias)))


def test_order() -> None:
    assert [order_of(n) for n in (-16, 0, 16, FARTHEST, -FARTHEST)] == [-1, 0, 1, 0, 0]
    low, high = apart(2, 4, 8)
    build = Builder([high, low])
    first, second = build.inputs
    assert [build.order(first, second), build.order(second, first)] == [-1, 1]
    assert build.order(first[:2], first[2:]) == 1
    assert build.order(first, build.empty((4, 8), low.dtype)) == 0  # nobody knows
    program = build.program([build.call(torch.add, (first, second), describe((4, 8), low.dtype))])
    assert [program.takes(given) for given in ((high, low), (low, high), (low, low))] == [True, False, False]


class Described:
    """A launcher that writes down the descriptors that it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __call__(self, *given: Any) -> None:
        self.given += [(d.base.data_ptr(), d.strides) for d in given]

    def ready(self) -> None:
        return None


def test_one_descriptor_of_two_tensors() -> None:
    """From any row on, and of one tensor's halves, between which the distance is always the same."""
    launcher = Described()

    def program(first: Tensor, second: Tensor) -> Program:
        build = Builder([first, second])
        one, other = build.inputs
        assert build.order(one, other) == 1
        pairs = [(one, other), (one[2:], other[2:]), (one[:2], one[2:])]
        box = [2, 2, 8]
        build.launch(launcher, [Spanning(TensorDescriptor(t, [2, *t.shape], [64, 8, 1], box), u) for t, u in pairs])
        return build.program([])

    low, middle, high = apart(3, 4, 8)
    built = program(low, high)
    for first, second in ((low, high), (low, middle), (middle, high)):
        assert built.takes((first, second))
        built((first, second))
        at, distance = first.data_ptr(), (second.data_ptr() - first.data_ptr()) // 4
        assert launcher.given == [(at, [distance, 8, 1]), (at + 64, [distance, 8, 1]), (at, [16, 8, 1])]
        launcher.given.clear()
    with pytest.raises(ValueError, match="expected a descriptor of memory from a 16-byte boundary on"):
        program(*sorted([unaligned(t) for t in (low, high)], key=Tensor.data_ptr))


def test_results_for_the_backward_pass_have_no_zeros_made() -> None:
    """Of a result that is kept, and has no derivative, autograd hands the backward rule no tensor of zeros."""
    found: list[Any] = []
    operator = Operator(
        "test_of_kept_results(Tensor x) -> (Tensor, Tensor)",
        program=_doubled,
        fake=lambda x: (torch.empty_like(x), torch.empty_like(x)),
        backward=lambda saved, dy: [2 * dy],
        kept=1,
    )
    inner = operator._reverse
    operator._reverse = lambda ctx, needs, cotangents: found.append(cotangents) or inner(ctx, needs, cotangents)  # type: ignore[method-assign, func-returns-value]
    x = torch.ones(3, requires_grad=True)
    for call in (operator, lambda x: operator.registered(x)[0]):
        call(x).sum().backward()
    assert len(found) == 2
    assert all(of_kept is None for _, of_kept in found)
    assert torch.equal(x.grad, torch.full((3,), 4.0))  # type: ignore[arg-type]


def _doubled(tensors: Any, options: Any) -> Program:
    build = Builder(tensors)
    like = describe((3,), torch.float32)
    return build.program(build.call(lambda x: (2 * x, x + 1), build.inputs, like, describe((3,), torch.float32)))
