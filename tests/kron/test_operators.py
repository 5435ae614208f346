"""The registered operators: what torch.library asks of them, fakes, backends, threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sampling import in_full
from shapes_list import Case, assert_near, call, expected, power, problem
from torch import Tensor

import fastkron_py
from fastkron_py import kron_matmul
from fastkron_py.kron import torch_steps
from fastkron_py.runtime import backend as backends
from fastkron_py.runtime.call_cache import CallCache

MULTIPLY = torch.ops.fastkron.kron_matmul.default
BACKWARD = torch.ops.fastkron.kron_matmul_backward.default

# name: (case, left, z's shape or None, alpha, beta, which of x, factors, z require grad)
SAMPLES: dict[str, tuple[Case, bool, tuple[int, ...] | None, float, float, str]] = {
    "one_factor": (power(3, 4, 4, 1), False, None, 1.0, 0.0, "x f"),
    "no_grad": (power(3, 4, 4, 2), False, None, 1.0, 0.0, ""),
    "x_only": (power(3, 4, 4, 2), False, None, 2.0, 0.0, "x"),
    "factors_only": (power(3, 4, 4, 2), False, None, 2.0, 0.0, "f"),
    "z_only": (power(3, 4, 4, 2), False, (1,), 1.0, 1.0, "z"),
    "rectangular": (Case(3, ((2, 3), (5, 2), (3, 4))), False, (24,), 0.5, -2.0, "x f z"),
    "left": (Case(3, ((2, 3), (5, 2))), True, (6, 3), 0.5, 1.0, "x f z"),
    "batches": (Case(2, ((2, 3), (3, 2)), (2, 1), (3,)), False, (3, 1, 1), 1.0, 0.5, "x f z"),
    "left_batches": (Case(2, ((2, 3), (3, 2)), (2, 1), (3,)), True, (2, 1, 1, 1), 1.0, 0.5, "x f"),
    "factor_batch_of_one": (Case(2, ((2, 3),), (1,), (1,)), False, None, 1.0, 0.0, "x f"),
    "no_rows": (Case(0, ((2, 3), (3, 2))), False, None, 1.0, 0.0, "x f"),
    "sum_over_nothing": (Case(2, ((0, 3), (3, 2))), False, (1, 6), 1.0, 2.0, "x f z"),
}


def sample(
    name: str, device: torch.device, generator: torch.Generator, backend: str, dtype: torch.dtype = torch.float64
) -> tuple[Any, ...]:
    """Arguments of the multiply operator."""
    case, left, z_shape, alpha, beta, needing = SAMPLES[name]
    x, factors = problem(case, dtype, device, generator, left=left)
    z = None if z_shape is None else torch.randn(z_shape, dtype=dtype, device=device)
    x.requires_grad_("x" in needing)
    for f in factors:
        f.requires_grad_("f" in needing)
    if z is not None:
        z.requires_grad_("z" in needing)
    return x, factors, z, alpha, beta, None, backend, left


OF_TORCH = ("left_batches",)
CHECKED = [*(("torch", name) for name in OF_TORCH), ("triton", "no_grad")]
CHECKED += in_full([("torch", name) for name in SAMPLES if name not in OF_TORCH])
CHECKED += in_full([("triton", "sum_over_nothing")])
# Graphs of any sizes run through the derivative's operator, but through none of its own derivative, which no compiler takes.
APART = ["test_schema", "test_autograd_registration", "test_faketensor"]


@pytest.mark.parametrize(("backend_name", "name"), CHECKED, indirect=["backend_name"])
def test_opcheck(name: str, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Schema, autograd registration and fakes of both operators, and AOT dispatch with dynamic shapes."""
    arguments = sample(name, device, generator, backend_name)
    torch.library.opcheck(MULTIPLY, arguments)
    x, factors, _, alpha, _, precision, backend, left = arguments
    dy = torch.randn_like(call(left)(x, factors)).requires_grad_(x.requires_grad)
    for needs in ((True, True), (True, False), (False, True)):
        given = (dy, x, factors, None, needs[0], [needs[1]] * len(factors), alpha, precision, backend, left)
        torch.library.opcheck(BACKWARD, given, test_utils=APART)


def test_opcheck_of_layouts(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Strides of the fakes are those of the results whatever the strides of the arguments."""
    for layout in ["transposed", "expanded"]:
        x, factors = problem(power(4, 3, 3, 2), torch.float32, device, generator)
        change = (lambda t: t.mT.contiguous().mT) if layout == "transposed" else (lambda t: t[:1, :1].expand(t.shape))
        x, factors = change(x), [change(f) for f in factors]
        torch.library.opcheck(MULTIPLY, (x, factors, x, 1.0, 1.0, None, backend_name, False))
        torch.library.opcheck(BACKWARD, (x, x, factors, None, True, [True, True], 1.0, None, backend_name, False), test_utils=APART)


def test_opcheck_can_fail(device: torch.device) -> None:
    """The control: a fake of the wrong shape is caught."""
    with torch.library._scoped_library("fastkron_control", "DEF") as library:
        library.define("wrong(Tensor x) -> Tensor")
        library.impl("wrong", lambda x: x.clone(), "CompositeExplicitAutograd")
        torch.library.register_fake("fastkron_control::wrong", lambda x: x.new_empty(1), lib=library)
        with pytest.raises(Exception, match=r"(?i)mismatch|shape"):
            torch.library.opcheck(torch.ops.fastkron_control.wrong.default, (torch.ones(3, device=device),))


# ---- choosing a backend --------------------------------------------------------------------------


@pytest.fixture
def default_backend() -> Iterator[None]:
    """Restores the process's default."""
    before = backends._default
    yield
    fastkron_py.set_backend(before)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends chosen from now on, in order: for each program that is built, and every one is built anew."""
    from fastkron_py.kron import multiply as module

    monkeypatch.setattr(CallCache, "find", lambda *_: None)
    monkeypatch.setattr(CallCache, "program", lambda _cache, _key, build: build())
    chosen: list[str] = []
    choose = module.choose_backend

    def spy(name: str, x: Tensor) -> str:
        chosen.append(choose(name, x))
        return chosen[-1]

    monkeypatch.setattr(module, "choose_backend", spy)
    return chosen


def test_set_backend_and_nested_contexts(monkeypatch: pytest.MonkeyPatch, default_backend: None, device: torch.device) -> None:
    chosen = spied(monkeypatch)
    x, f = torch.ones(2, 3, device=device), torch.ones(3, 3, device=device)
    fastkron_py.set_backend("triton")
    kron_matmul(x, [f])
    with fastkron_py.backend("torch"):
        kron_matmul(x, [f])
        with fastkron_py.backend("triton"):
            kron_matmul(x, [f])
        kron_matmul(x, [f])
        with pytest.raises(ZeroDivisionError), fastkron_py.backend("triton"):
            raise ZeroDivisionError
        kron_matmul(x, [f])
    kron_matmul(x, [f])
    fastkron_py.set_backend("auto")
    kron_matmul(x, [f])
    auto = "triton" if device.type == "cuda" else "torch"
    assert chosen == ["triton", "torch", "triton", "torch", "torch", "triton", auto]


def test_backward_uses_the_forward_backend(monkeypatch: pytest.MonkeyPatch, backend_name: str, device: torch.device) -> None:
    """Also outside of the block, and on autograd's own thread."""
    monkeypatch.setattr(torch_steps, "is_small", lambda shapes, elements: False)  # else autograd records torch's product
    monkeypatch.setattr(torch_steps, "is_faster", lambda sizes: False)
    chosen = spied(monkeypatch)
    x = torch.ones(2, 3, device=device, requires_grad=True)
    f = torch.ones(3, 3, device=device, requires_grad=True)
    y = kron_matmul(x, [f])
    with fastkron_py.backend("torch" if backend_name == "triton" else "triton"):
        y.sum().backward()
    assert len(chosen) > 1
    assert set(chosen) == {backend_name}


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's remark on a fresh thread whose first call is a product
def test_threads_multiply_at_once(device: torch.device, generator: torch.Generator) -> None:
    """Two threads, two backends, one result each."""
    x, factors = problem(power(3, 4, 4, 3), torch.float32, device, generator)
    results: dict[str, Tensor] = {}

    def work(name: str) -> None:
        with fastkron_py.backend(name):
            results[name] = kron_matmul(x, factors)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("torch", "triton")]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for y in results.values():
        assert_near(y, expected(x, factors))
    assert len(results) == 2


def test_tasks_do_not_disturb_each_other() -> None:
    async def work(name: str) -> list[str]:
        seen = []
        with fastkron_py.backend(name):
            for _ in range(5):
                await asyncio.sleep(0)
                seen.append(backends.requested_backend())
        return seen

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(work("torch"), work("triton")))

    assert asyncio.run(both()) == [["torch"] * 5, ["triton"] * 5]
