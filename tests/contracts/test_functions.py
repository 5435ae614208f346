"""What every public function must do, each stated once over the table of functions."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from contracts_table import FUNCTIONS, Function
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fastkron_py
from fastkron_py.testing import assert_close, tolerances

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDE = {d: torch.complex128 if d.is_complex else torch.float64 for d in (*FUNCTIONS[0].dtypes,)}


def every(contract: str, chosen: Callable[[Function], bool] = lambda f: True) -> Any:
    """One case for each function that the contract applies to; what a function does not support is expected to fail as its row says."""
    cases = []
    for f in FUNCTIONS:
        missing = f.unsupported.get(contract)
        if chosen(f) and (missing is None or missing.error is not None):
            cases.append(pytest.param(f, id=f.name))
    return pytest.mark.parametrize("function", cases)


@contextlib.contextmanager
def supported(function: Function, contract: str) -> Iterator[None]:
    """Inside, the function does what the contract says, or raises what its row says."""
    missing = function.unsupported.get(contract)
    if missing is None:
        yield
        return
    with pytest.raises(missing.error, match=missing.text):
        yield


def draw(function: Function, dtype: torch.dtype, device: torch.device = DEVICE) -> list[Tensor]:
    """Random tensors for a function; half precision's are rounded ones."""
    base = dtype if dtype.is_complex or dtype == torch.float64 else torch.float32
    return [t.to(device=device, dtype=dtype) for t in function.make(lambda *shape: torch.randn(*shape, dtype=base))]


def check(function: Function, actual: Tensor, tensors: list[Tensor], dtype: torch.dtype | None = None) -> None:
    """Compare a result with the definition in float64."""
    dtype = dtype or tensors[0].dtype
    expected = function.definition(*[t.detach().cpu().to(WIDE[t.dtype]) for t in tensors])
    assert actual.dtype == (dtype if function.within is None else torch.float32)
    compare(function, actual, expected, dtype)


def compare(function: Function, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the function's tolerance for a dtype."""
    rms, largest = (function.slack * t for t in tolerances(dtype, function.steps))
    if function.within is not None:
        rms, largest = function.within, 4 * function.within
    assert_close(actual.detach().cpu(), expected, rms_tol=rms, max_tol=largest)


def wanted(function: Function) -> list[Tensor]:
    """Tensors of float64 whose gradients are wanted."""
    return [t.requires_grad_() for t in draw(function, torch.float64)]


@every("values")
def test_values(function: Function) -> None:
    for backend in function.backends:
        for dtype in function.dtypes:
            tensors = draw(function, dtype)
            with fastkron_py.backend(backend):
                for _ in range(2):  # the second call is a kept one
                    check(function, function.call(*tensors), tensors)


@every("gradients")
def test_gradients(function: Function) -> None:
    for backend in function.backends:
        with supported(function, "gradients"), fastkron_py.backend(backend):
            gradcheck(function.call, wanted(function), fast_mode=True)
            tensors = wanted(function)
            outcome = []
            for _ in range(2):
                y = function.call(*tensors)
                outcome.append(torch.autograd.grad(y.sum(), tensors))
            for first, second in zip(*outcome, strict=True):
                assert_close(second, first)


@every("second derivatives")
def test_second_derivatives(function: Function) -> None:
    with supported(function, "second derivatives"):
        gradgradcheck(function.call, wanted(function), fast_mode=True)


@every("jvp")
def test_jvp(function: Function) -> None:
    tensors = draw(function, torch.float64)
    tangents = [torch.randn_like(t) for t in tensors]
    with supported(function, "jvp"):
        y, tangent = torch.func.jvp(function.call, tuple(tensors), tuple(tangents))
        of_cpu = [tuple(t.cpu() for t in ts) for ts in (tensors, tangents)]
        _, expected = torch.func.jvp(function.definition, *of_cpu)
        check(function, y, tensors)
        assert_close(tangent.cpu(), expected, rms_tol=1e-12 * function.slack, max_tol=1e-11 * function.slack)


@every("vmap")
def test_vmap(function: Function) -> None:
    several = [draw(function, torch.float64) for _ in range(3)]
    stacked = [torch.stack(ts) for ts in zip(*several, strict=True)]
    with supported(function, "vmap"):
        y = torch.func.vmap(function.call)(*stacked)
        for i, tensors in enumerate(several):
            check(function, y[i], tensors)
        first_alone = torch.func.vmap(function.call, in_dims=(0, *[None] * (len(stacked) - 1)))(stacked[0], *several[0][1:])
        for i in range(3):
            check(function, first_alone[i], [several[i][0], *several[0][1:]])


class _Recorder(TorchDispatchMode):
    """Keeps the calls of the library's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastkron":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@every("opcheck")
def test_opcheck(function: Function) -> None:
    with supported(function, "opcheck"):
        recorder = _Recorder()
        with recorder:
            function.call(*draw(function, torch.float64))
        for func, args, kwargs in recorder.calls:
            torch.library.opcheck(func, args, kwargs)


@every("compile")
def test_compile(function: Function) -> None:
    with supported(function, "compile"):
        torch._dynamo.reset()
        compiled = torch.compile(function.call, fullgraph=True, backend="aot_eager")
        tensors = wanted(function) if "gradients" not in function.unsupported else draw(function, torch.float64)
        y = compiled(*tensors)
        check(function, y, tensors)
        if y.requires_grad:
            expected = torch.autograd.grad(function.call(*tensors).sum(), tensors)
            for mine, theirs in zip(torch.autograd.grad(y.sum(), tensors), expected, strict=True):
                assert_close(mine, theirs, rms_tol=1e-12, max_tol=1e-11)


@every("compile, any number of rows", lambda f: f.rows)
def test_compile_dynamic(function: Function) -> None:
    with supported(function, "compile, any number of rows"):
        torch._dynamo.reset()
        compiled = torch.compile(function.call, fullgraph=True, backend="aot_eager", dynamic=True)
        for count in (6, 9):
            tensors = more_rows(draw(function, torch.float64), count)
            check(function, compiled(*tensors), tensors)


def more_rows(tensors: list[Tensor], count: int) -> list[Tensor]:
    """Tensors whose first dimension is x's number of rows, 6, with another number of them."""
    return [t.new_empty(count, *t.shape[1:]).normal_() if t.ndim > 1 and t.shape[0] == 6 else t for t in tensors]


class _Module(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(*tensors)


@every("export")
def test_export(function: Function) -> None:
    check_export(function, "export", strict=False)


@pytest.mark.full  # Dynamo traces as in `test_compile`, and what follows is `test_export`'s
@every("export, strict")
def test_strict_export(function: Function) -> None:
    check_export(function, "export, strict", strict=True)


def check_export(function: Function, contract: str, strict: bool) -> None:
    """Export, save, load and run on other tensors."""
    with supported(function, contract):
        program = torch.export.export(_Module(function.call), tuple(draw(function, torch.float64)), strict=strict)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        tensors = draw(function, torch.float64)
        check(function, torch.export.load(file).module()(*tensors), tensors)


@every("jit.trace")
def test_trace(function: Function) -> None:
    with supported(function, "jit.trace"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of jit
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of checks on sizes, which are constants of a trace
        traced = torch.jit.trace(function.call, tuple(draw(function, torch.float64)))
        tensors = draw(function, torch.float64)
        check(function, traced(*tensors), tensors)


@every("fake tensors")
def test_fake_tensors(function: Function) -> None:
    for made_before in (False, True):
        tensors = draw(function, torch.float64)
        if made_before:
            function.call(*tensors)
        with supported(function, "fake tensors"):
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = function.call(*[mode.from_tensor(t) for t in tensors])
            y = function.call(*tensors)
            check(function, y, tensors)
            assert (fake.shape, fake.dtype) == (y.shape, y.dtype)


@every("meta tensors")
def test_meta_tensors(function: Function) -> None:
    tensors = draw(function, torch.float64)
    with supported(function, "meta tensors"):
        meta = function.call(*[t.to("meta") for t in tensors])
        y = function.call(*tensors)
        check(function, y, tensors)
        assert (meta.shape, meta.dtype, meta.device.type) == (y.shape, y.dtype, "meta")


@every("functionalize")
def test_functionalize(function: Function) -> None:
    tensors = draw(function, torch.float64)
    with supported(function, "functionalize"):
        check(function, torch.func.functionalize(function.call)(*tensors), tensors)
        check(function, function.call(*tensors), tensors)


@every("default device")
def test_default_device(function: Function) -> None:
    tensors = draw(function, torch.float64)
    with supported(function, "default device"):
        with torch.device("meta"):
            y = function.call(*tensors)
        check(function, y, tensors)
        check(function, function.call(*tensors), tensors)


@every("inference mode")
def test_inference_mode(function: Function) -> None:
    tensors = wanted(function)
    with supported(function, "inference mode"):
        with torch.inference_mode():
            check(function, function.call(*tensors), tensors)
        y = function.call(*tensors)
        check(function, y, tensors)
        if "gradients" not in function.unsupported:
            torch.autograd.grad(y.sum(), tensors)


@every("autocast", lambda f: torch.bfloat16 in f.dtypes)
def test_autocast(function: Function) -> None:
    tensors = draw(function, torch.float32)
    with supported(function, "autocast"):
        for _ in range(2):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                y = function.call(*tensors)
            if function.autocast:
                assert y.dtype == torch.bfloat16
                expected = function.definition(*[t.to(torch.bfloat16).double().cpu() for t in tensors])
                compare(function, y, expected, torch.bfloat16)
            else:
                check(function, y, tensors)


@every("arrays", lambda f: f.arrays)
def test_arrays(function: Function) -> None:
    pytest.importorskip("array_api_compat")
    tensors = draw(function, torch.float64, torch.device("cpu"))
    arrays = [t.numpy() for t in tensors]
    for a in arrays:
        a.flags.writeable = False
    with supported(function, "arrays"):
        y = function.call(*arrays)
        assert isinstance(y, np.ndarray)
        check(function, torch.from_numpy(np.array(y)), tensors)
        assert not y.flags.writeable or not any(np.shares_memory(y, a) for a in arrays)


@every("arrays of the other byte order", lambda f: f.arrays)
def test_other_byte_order(function: Function) -> None:
    pytest.importorskip("array_api_compat")
    tensors = draw(function, torch.float64, torch.device("cpu"))
    with supported(function, "arrays of the other byte order"):
        y = function.call(*[t.numpy().astype(">f8") for t in tensors])
        check(function, torch.from_numpy(np.array(y)), tensors)


@every("no rows", lambda f: f.rows)
def test_no_rows(function: Function) -> None:
    for backend in function.backends:
        tensors = more_rows(wanted(function), 0)
        tensors = [t.detach().requires_grad_() for t in tensors]
        with supported(function, "no rows"), fastkron_py.backend(backend):
            y = function.call(*tensors)
            assert y.shape == function.definition(*[t.cpu() for t in tensors]).shape
            if y.requires_grad:
                for t, g in zip(tensors, torch.autograd.grad(y.sum(), tensors), strict=True):
                    assert g.shape == t.shape
                    assert not g.any()


@every("strides")
def test_strides(function: Function) -> None:
    def spread(t: Tensor) -> Tensor:
        """Equal, with every second element of memory unused."""
        wide = torch.full((*t.shape, 2), torch.nan, dtype=t.dtype, device=t.device)
        wide[..., 0] = t
        return wide[..., 0]

    def transposed(t: Tensor) -> Tensor:
        return t.mT.contiguous().mT if t.ndim > 1 else t

    for backend in function.backends:
        for change in (spread, transposed):
            tensors = draw(function, torch.float32)
            with supported(function, "strides"), fastkron_py.backend(backend):
                check(function, function.call(*[change(t) for t in tensors]), tensors)


@every("conjugate and negative views", lambda f: torch.complex128 in f.dtypes)
def test_lazy_views(function: Function) -> None:
    with supported(function, "conjugate and negative views"):
        tensors = draw(function, torch.complex128)
        views = [t.conj() for t in tensors]
        for _ in range(2):
            check(function, function.call(*views), [v.resolve_conj() for v in views])
        negative = [t.conj().imag for t in tensors]
        assert negative[0].is_neg()
        for _ in range(2):
            check(function, function.call(*negative), [n.resolve_neg() for n in negative])


@every("sparse tensors")
def test_sparse_tensors_are_refused_or_multiplied(function: Function) -> None:
    tensors = draw(function, torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that such tensors are in beta state
        try:
            y = function.call(tensors[0].to_sparse(), *tensors[1:])
        except (TypeError, ValueError, RuntimeError) as error:
            text = str(error).lower()
        else:  # torch's own products of sparse tensors
            check(function, y, tensors)
            return
    assert any(word in text for word in ("sparse", "strided", "layout"))


@every("dtypes that differ", lambda f: len(f.make(lambda *s: torch.zeros(*s))) > 1)
def test_other_dtype(function: Function) -> None:
    tensors = draw(function, torch.float64)
    with pytest.raises((TypeError, RuntimeError), match=r"dtype|float|not implemented"):
        function.call(tensors[0], *[t.to(torch.int32) for t in tensors[1:]])
