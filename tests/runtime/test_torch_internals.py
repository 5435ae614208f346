"""Private names of torch, broken one by one: results stay right, nothing is cached, and the library says why.

A name is broken for the library alone, by something that stands for the module it is read from: torch itself goes on with the name. Where
a name is gone, takes other arguments, or gives another answer, every verb gives what it gave before: in float64 torch's own operations
are repeated, but for the order of sums, and 1e-10 is far above rounding.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fastkron_py
from fastkron_py import gated_linear, kron_matmul, poly_kan, rational
from fastkron_py.cli.app import app
from fastkron_py.rational.api import layer_norm_rational, rational_linear
from fastkron_py.runtime import precision, torch_internals
from fastkron_py.runtime.call_cache import CACHE

# torch's own, of its vmap that does without a rule
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

F64 = torch.float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COEFFICIENTS = [(2, 4), (2, 2)]
VERBS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "kron_matmul": (lambda x, a, b: kron_matmul(x, [a, b], alpha=0.5), [(3, 4), (2, 3), (2, 2)]),
    "rational": (rational, [(3, 4), *COEFFICIENTS]),
    "layer_norm_rational": (layer_norm_rational, [(3, 4), (4,), (4,), *COEFFICIENTS]),
    "rational_linear": (rational_linear, [(3, 4), *COEFFICIENTS, (3, 4), (3,)]),
    "gated_linear": (lambda x, w, b: gated_linear(x, w, bias=b, layout="stacked"), [(3, 4), (2, 3, 4), (2, 3)]),
    "poly_kan": (poly_kan, [(3, 4), (3, 2, 4)]),
}


def results(verb: str, tensors: list[Tensor]) -> list[Tensor]:
    """Values, first and second derivatives, batches of both kinds, and forward mode; twice, so that calls could be cached."""
    function = VERBS[verb][0]
    found = []
    for _ in range(2):
        y = function(*tensors)
        first = torch.autograd.grad(y.sin().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
        found += [y.detach(), *[g.detach() for g in first], *second]
    with torch.no_grad():
        found += [function(*tensors), function(*tensors)]
    with fastkron_py.backend("triton"):
        y = function(*tensors)
        found += [y.detach(), *torch.autograd.grad(y.sum(), tensors)]
    return found


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def wanted() -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Tensors and results of each verb while all names are whole."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for verb, (_, shapes) in VERBS.items():
        tensors = [torch.randn(shape, dtype=F64, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
        found[verb] = tensors, results(verb, tensors)
    return found


def forget() -> None:
    """Nothing is cached, and the names are tried again."""
    CACHE.forget()
    torch_internals.forget()
    precision.getter.cache_clear()


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    forget()
    yield
    forget()


# ---- breaking names ----------------------------------------------------------------------------

GONE = object()


class Broken:
    """Stands for a module in which some names are changed, or gone."""

    def __init__(self, module: Any, **changed: Any) -> None:
        self._module, self._changed = module, changed

    def __getattr__(self, name: str) -> Any:
        found = self._changed[name] if name in self._changed else getattr(self._module, name)
        if found is GONE:
            raise AttributeError(f"module has no attribute {name!r}")
        return found


def with_other_arguments(*, unheard_of: Any) -> None:
    """What a name is in a version that wants other arguments."""


class Keys(SimpleNamespace):
    """Dispatch keys that are always the same."""

    def raw_repr(self) -> int:
        return 1

    def has(self, key: Any) -> bool:
        return True


class Guards:
    """Guards that anything passes."""

    def __init__(self, *tensors: Tensor, **options: Any) -> None:
        self.check = lambda *given: True


# Where the library reads each name, what it answers in the version where it answers something else, and what it serves.
NAMES: dict[str, tuple[str, Any, str]] = {
    "_dispatch_tls_local_include_set": ("torch._C", Keys, "dispatch keys"),
    "_dispatch_keys": ("torch._C", lambda t: Keys(), "dispatch keys"),
    "_are_functorch_transforms_active": ("torch._C", lambda: True, "transforms"),
    "_len_torch_function_stack": ("torch._C", lambda: 0, "modes"),
    "_ExcludeDispatchKeyGuard": ("torch._C", lambda keys: contextlib.nullcontext(), "views"),
    "DispatchKeySet": ("torch._C", lambda key: torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU), "views"),
    "_dispatch_tls_is_dispatch_key_included": ("torch._C", lambda key: True, "batches of gradients"),
    "_parse_dispatch_key": ("torch._C", lambda name: torch._C.DispatchKey.CPU, "batches of gradients"),
    "_will_engine_execute_node": ("torch._C", lambda node: False, "nodes of a backward pass"),
    "_get_current_graph_task_keep_graph": ("torch._C._autograd", lambda: False, "graphs that are kept"),
    "_get_fp32_precision_getter": ("torch._C", lambda backend, operation: "tf32", "precision"),
    "_autograd": ("torch._C", SimpleNamespace(_get_current_graph_task_keep_graph=lambda: False), "graphs that are kept"),
    "_remove_batch_dim": ("torch", lambda t, level, size, dim: t, "batches of gradients"),
    "_add_batch_dim": ("torch", lambda t, dim, level: t, "batches of gradients"),
    "_current_level": ("forward_ad", 0, "transforms"),
    "_make_dual": ("torch", lambda t, tangent, level: t, "transforms"),
    "TensorGuards": ("guards", Guards, "guards"),
}


def break_name(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, other, _ = NAMES[name]
    change = {"gone": GONE, "other arguments": with_other_arguments, "another answer": other}[fault]
    if place == "guards":
        import torch._C._dynamo.guards as module

        if fault == "gone":
            monkeypatch.delattr(module, name)
        else:
            monkeypatch.setattr(module, name, change)
    elif place == "torch._C":
        monkeypatch.setattr(torch_internals, "torch", Broken(torch, _C=Broken(torch._C, **{name: change})))
    elif place == "torch._C._autograd":
        inner = Broken(torch._C, _autograd=Broken(torch._C._autograd, **{name: change}))
        monkeypatch.setattr(torch_internals, "torch", Broken(torch, _C=inner))
    else:
        inner = torch if place == "torch" else torch_internals.forward_ad
        monkeypatch.setattr(torch_internals, place, Broken(inner, **{name: change}))


def test_all_names_are_whole() -> None:
    assert torch_internals.obstacle() is None
    assert all(torch_internals.works(names) for names in torch_internals._TRIALS)
    assert {group for *_, group in NAMES.values()} == set(torch_internals._TRIALS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("turn", range(3))
def test_a_broken_name(turn: int, name: str, wanted: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each fault with a third of the verbs, which take turns."""
    for i, fault in enumerate(("gone", "other arguments", "another answer")):
        forget()
        caplog.clear()
        with pytest.MonkeyPatch.context() as changed:
            break_name(name, fault, changed)
            obstacle = check_broken(name, dict(list(wanted.items())[(turn + i) % 3 :: 3]), caplog)
            if fault == "gone":
                assert f"call cache: off: {obstacle}" in CliRunner().invoke(app, ["info"], env={"COLUMNS": "200"}).output


def check_broken(name: str, wanted: Any, caplog: pytest.LogCaptureFixture) -> str:
    """Results are right and not cached, which is said once; why."""
    with caplog.at_level(logging.WARNING, logger="fastkron_py"):
        for verb, (tensors, right) in wanted.items():
            assert_same(results(verb, tensors), right)
        obstacle = torch_internals.obstacle()
    group = NAMES[name][2]
    assert obstacle is not None
    assert not torch_internals.works(group)
    assert any(group in reason for reason in torch_internals.failures().values())
    assert not CACHE._calls
    warned = [r.message for r in caplog.records if r.message.startswith("calls are not cached")]
    assert len(warned) == len(torch_internals.failures())  # once for each reason, not for each call
    return obstacle


def test_a_default_dtype_or_device_breaks_nothing() -> None:
    """The trials have tensors of their own dtype on the CPU."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(F64)
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert torch_internals.obstacle() is None
        torch_internals.forget()
        with torch.autograd.forward_ad.dual_level():
            assert torch_internals.obstacle() is None
    finally:
        torch.set_default_dtype(before)


# ---- a first import inside of a mode -------------------------------------------------------------

MODES = {
    "inference mode": "torch.inference_mode()",
    "fake tensors": "torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)",
    "no gradients": "torch.no_grad()",
    "a device": "torch.device('meta')",
    "forward mode": "torch.autograd.forward_ad.dual_level()",
}
SCRIPT = """
import json, os, sys, torch, torch._subclasses.fake_tensor
def first(mode, verb):
    with eval(mode):
        import fastkron_py
        eval(verb)
    from fastkron_py.runtime import torch_internals
    from fastkron_py.runtime.call_cache import CallCache
    find, found = CallCache.find, []
    CallCache.find = lambda *given: (found.append(find(*given)), found[-1])[1]
    x, a, b = torch.randn(3, 4), torch.randn(2, 4), torch.randn(2, 2)
    right = fastkron_py.rational(x, a, b), fastkron_py.rational(x, a, b)
    print(json.dumps([len(list(filter(None, found))), torch.equal(*right), torch_internals.obstacle()]), flush=True)
for case in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        first(*case)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""


CALL = "fastkron_py.rational(torch.randn(3, 4), torch.randn(2, 4), torch.randn(2, 2))"
FIRST = [("inference mode", CALL), ("fake tensors", CALL)]
OTHERS = [(mode, verb) for mode in MODES for verb in (CALL, "None") if (mode, verb) not in FIRST]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case is a fork of one process that has imported torch")
@pytest.mark.parametrize("cases", [FIRST, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["some", "others"])
def test_a_first_import_inside_of_a_mode(cases: list[tuple[str, str]]) -> None:
    """Calls outside of it are cached."""
    given = json.dumps([(MODES[mode], verb) for mode, verb in cases])
    done = subprocess.run([sys.executable, "-c", SCRIPT, given], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    # With no gradients a call inside is cached as well.
    expected = [[1 + (mode == "no gradients" and verb == CALL), True, None] for mode, verb in cases]
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")] == expected
