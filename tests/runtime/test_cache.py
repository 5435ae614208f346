"""The cache of calls and programs: which go when it is full, which calls it does not take for one another, and who keeps them out.

The operator here is declared for these tests: ``y = x + w + step * rows``. Numbers are small integers, so that sums are exact.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cache_spy import CacheSpy
from modes import Functions, Operators
from torch import Tensor

from fastkron_py import backend
from fastkron_py.runtime import call_cache
from fastkron_py.runtime.builder import Builder, describe
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.operator import Operator, Saved
from fastkron_py.runtime.program import Program

BUILT: list[tuple[Any, ...]] = []  # options of the programs that were built


def _program(tensors: Sequence[Any], options: tuple[Any, ...]) -> Program:
    BUILT.append(options)
    step, rows = options
    build = Builder(tensors)
    x, w = build.inputs
    like = describe(x.shape, x.dtype)
    return build.program([build.call(lambda x, w: (x + w + step * rows).contiguous(), (x, w), like)])


def _backward(saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
    return tuple([dy * 1.0 if need else None for need in saved.needs])


add = Operator(
    "test_cache_add(Tensor x, Tensor w, float step, int rows) -> Tensor",
    program=_program,
    fake=lambda x, w, step, rows: torch.empty_like(x),
    backward=_backward,
    in_torch=lambda tensors, options: tensors[0] + tensors[1] + options[0] * options[1],
)


def verb(x: Any, w: Any, step: Any = 1.0, rows: Any = 1) -> Any:
    """As a verb with costly checks: it looks up a key of its own before them."""
    key = "test cache", step, type(step), rows, type(rows)
    entry = CACHE.find(key, (x, w))
    if entry is not None:
        return entry.call((x, w), entry.options)
    if not isinstance(x, Tensor) or not isinstance(w, Tensor):
        raise TypeError("x, w: expected tensors")
    if type(step) is not float or type(rows) is not int or x.layout != torch.strided or x.is_nested:
        raise TypeError("step, rows: expected a float and an integer")
    return add(x, w, step, rows, key=key)


class Spy(CacheSpy):
    """Of one operator: the number of its calls."""

    def take(self) -> int:  # type: ignore[override]
        return sum(super().take().values())


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """In the backend that is chosen, which tests here change."""
    BUILT.clear()
    return Spy(monkeypatch)


def drawn(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randint(-9, 10, shape or (3, 4)).float().requires_grad_(requires_grad)


def check(x: Tensor, w: Tensor, step: float = 1.0, rows: int = 1) -> None:
    assert torch.equal(verb(x, w, step, rows), x + w + step * rows)


# ---- what is found -----------------------------------------------------------------------------


def test_a_call_is_found_on_other_tensors_like_them(spy: Spy) -> None:
    for turn in range(3):
        check(drawn(), drawn())
        assert spy.take() == (turn > 0)
    assert len(BUILT) == 1


def test_other_tensors_are_other_calls(spy: Spy) -> None:
    x, w = drawn(), drawn()
    check(x, w)
    others = [
        (drawn(5, 4), drawn(5, 4)),
        (drawn(3, 8)[:, ::2], w),
        (drawn(4, 3).mT, w),
        (x.double(), w),
        (x, w[:1].expand(3, 4)),
        (drawn(requires_grad=True), w),
        (x, torch.nn.Parameter(w)),
        (x, x),
    ]
    for other in others:
        for turn in range(2):
            check(*other)
            assert spy.take() == turn, other


def test_other_plain_values_are_other_calls(spy: Spy) -> None:
    """Also those that are equal and of another type, as True, 1 and 1.0 are."""
    x, w = drawn(), drawn()
    for step, rows in ((1.0, 1), (1.0, 2), (2.0, 1), (-0.5, 3)):
        for turn in range(2):
            check(x, w, step, rows)
            assert spy.take() == turn
    for step, rows in ((1, 1), (True, 1), (1.0, True), (1.0, 1.0)):
        with pytest.raises(TypeError, match="expected a float"):
            verb(x, w, step, rows)
    assert spy.take() == 0


def test_gradients_are_of_the_call_s_own_tensors(spy: Spy) -> None:
    for turn in range(3):
        x, w = drawn(requires_grad=True), drawn()
        y = verb(x, w)
        (dx,) = torch.autograd.grad(y, x, torch.full((3, 4), 3.0))
        assert torch.equal(dx, torch.full((3, 4), 3.0))
        assert not torch.autograd.grad(verb(x.detach(), w.requires_grad_()).sum(), w)[0].eq(0).any()
        assert spy.take() == 2 * (turn > 0)


def test_other_grad_modes(spy: Spy) -> None:
    """Tensors that require a gradient, with gradients recorded or not, and in inference mode, there with tensors of another sort, too."""
    x, w = drawn(requires_grad=True), drawn()
    for turn in range(2):
        assert verb(x, w).requires_grad
        with torch.no_grad():
            assert not verb(x, w).requires_grad
        with torch.inference_mode():
            assert verb(x, w).is_inference()
        assert spy.take() == 3 * turn
    with torch.inference_mode():
        inside = drawn()
        for turn in range(2):
            assert verb(inside, inside).is_inference()
            assert verb(inside, w).is_inference()
            assert spy.take() == 2 * turn
    assert not verb(x.detach(), w).is_inference()


def test_where_gradients_make_no_difference_neither_does_their_mode(spy: Spy) -> None:
    x, w = drawn(), drawn()
    check(x, w)
    with torch.no_grad():
        check(x, w)
    assert spy.take() == 1


def test_backends_and_precisions_are_told_apart(spy: Spy) -> None:
    x, w = drawn(), drawn()
    setting = torch.backends.cuda.matmul.fp32_precision
    try:
        for name, precision in (("torch", "ieee"), ("auto", "ieee"), ("auto", "tf32")):
            torch.backends.cuda.matmul.fp32_precision = precision
            for turn in range(2):
                with backend(name):
                    check(x, w)
                assert spy.take() == turn
    finally:
        torch.backends.cuda.matmul.fp32_precision = setting
    assert len(BUILT) == 3


# ---- who keeps calls out -----------------------------------------------------------------------


def test_modes_see_the_call(spy: Spy) -> None:
    x, w = drawn(), drawn()
    check(x, w)
    with Functions() as functions:
        check(x, w)
    assert functions.seen
    with Operators() as operators:
        check(x, w)
    assert "fastkron.test_cache_add.default" in operators.names
    assert torch.equal(torch.func.vmap(verb)(x, w), x + w + 1)
    _, tangent = torch.func.jvp(verb, (x, w), (w, x))
    assert torch.equal(tangent, x + w)
    assert spy.take() == 0
    check(x, w)
    assert spy.take() == 1


def test_calls_inside_of_modes_are_not_kept(spy: Spy) -> None:
    x, w = drawn(), drawn()
    with Functions():
        check(x, w)
    with Operators():
        check(x, w)
    torch.func.vmap(verb)(x, w)
    assert not CACHE._calls
    check(x, w)
    assert spy.take() == 0


def test_subclasses_see_the_call(spy: Spy) -> None:
    class Seen(Tensor):
        functions: list[Any] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.functions.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x, w = drawn(), drawn()
    check(x, w)
    Seen.functions.clear()
    verb(x.as_subclass(Seen), w)
    assert add.registered in [getattr(f, "overloadpacket", f) for f in Seen.functions]
    assert spy.take() == 0


def test_debug_logging_is_not_left_out(spy: Spy, caplog: pytest.LogCaptureFixture) -> None:
    """Each call says which backend it takes, so each is built anew while somebody reads that."""
    x, w = drawn(), drawn()
    check(x, w)
    with caplog.at_level(logging.DEBUG, logger="fastkron_py"):
        for _ in range(2):
            check(x, w)
    assert spy.take() == 0
    assert len(BUILT) >= 3
    check(x, w)
    assert spy.take() == 1


# ---- how many --------------------------------------------------------------------------------


def test_the_least_recently_used_go(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls, and of programs."""
    monkeypatch.setattr(call_cache, "MOST_KEYS", 4)  # a verb's call is kept by two keys: the verb's and the operator's

    def is_found(rows: int) -> bool:
        check(drawn(rows, 2), drawn(rows, 2))
        return spy.take() > 0

    assert [is_found(rows) for rows in (1, 2, 1, 1, 2)] == [False, False, True, True, True]
    assert is_found(1)
    assert not is_found(3)  # in whose place goes a call of 2 rows
    assert is_found(1)
    assert is_found(3)
    assert len(CACHE._calls) <= 4
    for rows in range(4, 20):
        is_found(rows)
        assert len(CACHE._calls) <= 4
        assert len(CACHE._programs) <= 4
    BUILT.clear()
    assert is_found(19)
    assert not is_found(4)
    assert len(BUILT) == 1
