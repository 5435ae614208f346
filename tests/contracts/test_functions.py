"""What every public function must do, each stated once over the table of functions."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from contracts_table import FUNCTIONS, Function
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.functional import jacobian
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fastkron_py
from fastkron_py.testing import assert_close, tolerances

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDE = {d: torch.complex128 if d.is_complex else torch.float64 for d in (*FUNCTIONS[0].dtypes,)}


def is_derived(function: Function) -> bool:
    """Whether it multiplies by other functions of the table: methods of lazy operators, row-wise products, batches of modes."""
    return function.name.startswith(("Kronecker", "(K1", "khatri_rao", "mode_matmul(x, {1: a batch"))


def every(
    contract: str, chosen: Callable[[Function], bool] = lambda f: True, *, later: Callable[[Function], bool] = lambda f: False
) -> Any:
    """One case for each function that the contract applies to; what a function does not support is expected to fail as its row says.

    Args:
        contract: its name in the table.
        chosen: functions that it applies to.
        later: those that `make test-full` tries, since their operators are others' too.
    """
    cases = []
    for f in FUNCTIONS:
        missing = f.unsupported.get(contract)
        if chosen(f) and (missing is None or missing.error is not None):
            cases.append(pytest.param(f, id=f.name, marks=[pytest.mark.full] if later(f) else []))
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
            for i, of_all in enumerate(outcome[0]):  # that of one tensor alone
                alone = [t if i == j else t.detach() for j, t in enumerate(tensors)]
                check_gradients(function, torch.autograd.grad(function.call(*alone).sum(), alone[i]), [of_all.cpu()])


@every("second derivatives")
def test_second_derivatives(function: Function) -> None:
    with supported(function, "second derivatives"):
        gradgradcheck(function.call, wanted(function), fast_mode=True)


@every("third derivatives")
def test_third_derivatives(function: Function) -> None:
    """The incoming gradient is a function of the tensors, too: gradgradcheck, for which it is not, sees no path that is counted twice."""
    tensors = draw(function, torch.float64)

    def derivatives(call: Callable[..., Tensor], device: torch.device) -> list[Tensor]:
        leaves = [t.to(device).requires_grad_() for t in tensors]
        found = [call(*leaves)]
        for order in range(3):
            total = torch.stack([t.square().sum() for t in found]).sum()
            found = list(torch.autograd.grad(total, leaves, create_graph=order < 2))
        return found

    with supported(function, "third derivatives"):
        expected = derivatives(function.definition, torch.device("cpu"))
        for mine, theirs in zip(derivatives(function.call, DEVICE), expected, strict=True):
            # Each order squares what its errors are relative to; a path that is left out or counted twice shows in the first digit.
            assert float((mine.cpu() - theirs).norm() / theirs.norm()) < 1e-9 * function.slack


def gradients_of(function: Function, tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
    """By the definition."""
    leaves = [t.detach().cpu().requires_grad_() for t in tensors]
    return list(torch.autograd.grad(function.definition(*leaves), leaves, dy.cpu()))


def check_gradients(function: Function, actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert_close(mine.cpu(), theirs, rms_tol=1e-11 * function.slack, max_tol=1e-10 * function.slack)


@every("writes in place")
def test_writes_in_place(function: Function) -> None:
    for backend in function.backends:
        with fastkron_py.backend(backend):
            for changed in range(len(draw(function, torch.float64)) + 1):
                leaves = wanted(function)
                given = [t * 1 for t in leaves]
                y = function.call(*given)
                dy = torch.randn_like(y)
                expected = gradients_of(function, leaves, dy)
                if changed == len(given):
                    y, dy = y.mul_(2), dy / 2
                else:
                    given[changed].mul_(2)
                try:
                    found = torch.autograd.grad(y, leaves, dy)
                except RuntimeError as error:
                    if not re.search("modified (by an )?inplace", str(error)):
                        raise
                    continue
                check_gradients(function, found, expected)


@every("batches of gradients", later=is_derived)
def test_batches_of_gradients(function: Function) -> None:
    options: dict[str, Any] = {"create_graph": True, "allow_unused": True, "materialize_grads": True}

    def check_batches(y: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        dys = torch.randn(2, *y.shape, dtype=y.dtype, device=y.device)
        one_by_one = [torch.autograd.grad(y, tensors, dy, **options) for dy in dys]
        found = torch.autograd.grad(y, tensors, dys, is_grads_batched=True, **options)
        check_gradients(function, found, [torch.stack(gs).cpu() for gs in zip(*one_by_one, strict=True)])
        return found

    with supported(function, "batches of gradients"):
        for backend in function.backends:
            with fastkron_py.backend(backend):
                for _ in range(2):  # the second call is a kept one
                    tensors = wanted(function)
                    first = check_batches(function.call(*tensors).sin(), tensors)
                    check_batches(torch.stack([f.square().sum() for f in first]), tensors)
        tensors = draw(function, torch.float64)
        expected = jacobian(lambda *t: function.definition(*t).sin(), tuple(t.cpu() for t in tensors))
        # Where solves take eigenvectors, derivatives are in forward mode already, which torch does not nest.
        for strategy in ("reverse-mode", "forward-mode") if "vmap" not in function.unsupported else ("reverse-mode",):
            found = jacobian(lambda *t: function.call(*t).sin(), tuple(tensors), vectorize=True, strategy=strategy)
            check_gradients(function, found, expected)


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


@every("gradients")
def test_tangents_of_incoming_gradients(function: Function) -> None:
    """Of a call that was recorded outside of forward mode: its gradients are linear in the incoming one."""
    for backend in function.backends:
        tensors = wanted(function)
        with fastkron_py.backend(backend):
            y = function.call(*tensors)
            dy, tangent = torch.randn(2, *y.shape, dtype=y.dtype, device=y.device)
            expected = torch.autograd.grad(y, tensors, tangent, retain_graph=True)
            with forward_ad.dual_level():
                try:
                    found = torch.autograd.grad(y, tensors, forward_ad.make_dual(dy, tangent))
                except (NotImplementedError, RuntimeError) as error:
                    if not re.search("aten::silu_backward|Nested forward mode|must implement the jvp", str(error)):
                        raise
                    continue
                tangents = [forward_ad.unpack_dual(g).tangent for g in found]
            check_gradients(function, tangents, [e.cpu() for e in expected])


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
        if "gradients" not in function.unsupported:
            stacked = [t.requires_grad_() for t in stacked]
            y = torch.func.vmap(function.call)(*stacked)
            dys = torch.randn_like(y)
            found = torch.autograd.grad(y, stacked, dys)
            for i, tensors in enumerate(several):
                check_gradients(function, [g[i] for g in found], gradients_of(function, tensors, dys[i]))


@every("gradients", lambda f: not {"vmap", "compile"} & f.unsupported.keys(), later=is_derived)
def test_compiled_vmap(function: Function) -> None:
    """Inside of a graph the operators' own rules serve, and in its backward pass those of their gradients."""
    several = [wanted(function) for _ in range(2)]
    stacked = [torch.stack(ts).detach().requires_grad_() for ts in zip(*several, strict=True)]

    def both(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.vmap(function.call, (0, *[None] * (len(tensors) - 1)))(tensors[0], *[t[0] for t in tensors[1:]])
        return torch.vmap(function.call)(*tensors), first

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch's own, of batched tensors
        try:
            of_all, of_first = torch.compile(both, fullgraph=True, backend="aot_eager")(*stacked)
        except torch._dynamo.exc.Unsupported as error:
            if "custom_function_call at dispatch key DispatchKey.FuncTorchVmapMode" not in str(error):
                raise
            pytest.skip("Dynamo of torch 2.11 takes no autograd function under vmap")
    dys = torch.randn_like(of_all)
    found = torch.autograd.grad(of_all, stacked, dys)
    for i, tensors in enumerate(several):
        check(function, of_all[i].detach(), tensors)
        check(function, of_first[i].detach(), [tensors[0], *several[0][1:]])
        check_gradients(function, [g[i] for g in found], gradients_of(function, tensors, dys[i]))


class _Recorder(TorchDispatchMode):
    """Keeps the calls of the library's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastkron":
            leaves = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), (args, kwargs or {}))
            self.calls.append((func, *leaves))
        return func(*args, **(kwargs or {}))


def operator_calls(function: Function) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The library's operators that a call and its backward pass take."""
    with _Recorder() as recorder:
        tensors = wanted(function)
        y = function.call(*tensors)
        if y.requires_grad:
            torch.autograd.grad(y.square().sum(), tensors)
    return recorder.calls


@every("opcheck", lambda f: not is_derived(f))
def test_opcheck(function: Function) -> None:
    """With graphs for any sizes only where `test_compile_dynamic` makes none."""
    more = [] if function.rows and "compile, any number of rows" not in function.unsupported else ["test_aot_dispatch_dynamic"]
    with supported(function, "opcheck"):
        for func, args, kwargs in operator_calls(function):
            torch.library.opcheck(func, args, kwargs, test_utils=["test_schema", "test_autograd_registration", "test_faketensor", *more])


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
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(function.call, fullgraph=True, backend=counter, dynamic=True)
        compilations = []  # Dynamo may restart within the first one
        for count in (6, 9, 2, 17):
            tensors = more_rows(wanted(function), count)
            tensors = [t.detach().requires_grad_("gradients" not in function.unsupported) for t in tensors]
            y = compiled(*tensors)
            check(function, y, tensors)
            if y.requires_grad:
                dy = torch.randn_like(y)
                check_gradients(function, torch.autograd.grad(y, tensors, dy), gradients_of(function, tensors, dy))
            compilations.append(counter.frame_count)
        assert len(set(compilations)) == 1


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
@every("export, strict", lambda f: not is_derived(f) or "export, strict" in f.unsupported)
def test_strict_export(function: Function) -> None:
    check_export(function, "export, strict", strict=True)


def check_export(function: Function, contract: str, strict: bool) -> None:
    """Export, save, load and run on other tensors."""
    with supported(function, contract):
        tensors = draw(function, torch.float64)
        function.call(*tensors)  # names are looked up for the first time outside of the trace, which would warn of a side effect
        rows = torch.export.Dim("rows", min=2, max=20)  # where plans depend on the number, one holds for some numbers
        any_rows = function.rows and not strict
        shapes = tuple([{0: rows} if any_rows and t.ndim > 1 and t.shape[0] == 6 else None for t in tensors])
        program = torch.export.export(_Module(function.call), tuple(tensors), strict=strict, dynamic_shapes=(shapes,))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        exported = torch.export.load(file).module()
        for count in (6, 9, 2) if any_rows else (6,):
            tensors = draw(function, torch.float64)
            tensors = tensors if count == 6 else more_rows(tensors, count)
            check(function, exported(*tensors), tensors)


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


@every("functionalize", lambda f: "gradients" not in f.unsupported and "functionalize" not in f.unsupported)
def test_functionalize_beside_other_transforms(function: Function) -> None:
    """It works, or says that it does not: the operator of torch's dispatcher would lose a tangent."""
    x, *rest = draw(function, torch.float64)

    def call(x: Tensor) -> Tensor:
        y: Tensor = function.call(x, *rest)
        return y

    def gradient(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return torch.func.grad(lambda x: call(x).square().sum())

    def tangent(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.func.jvp(call, (x,), (x,))[1]

    functionalize = torch.func.functionalize
    for transform in (gradient, tangent, lambda call: torch.vmap(call, in_dims=0)) if "jvp" not in function.unsupported else (gradient,):
        given = torch.stack([x, -x]) if transform not in (gradient, tangent) else x
        for both in (lambda: functionalize(transform(call))(given), lambda: transform(functionalize(call))(given)):  # noqa: B023
            try:
                found = both()
            except (NotImplementedError, RuntimeError) as error:
                if "functionalize" not in str(error).lower():
                    raise
            else:
                assert_close(found, transform(call)(given), rms_tol=1e-11 * function.slack, max_tol=1e-10 * function.slack)


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
