"""Every private name of torch that the library leans on, tried once. Those of Triton are in `launch`.

Where one is missing, or answers otherwise than it did, no call is cached: each is checked anew, and goes through torch's
dispatcher. Results are the same. ``python -m fastkron_py info`` says so. oneDNN's product stands apart: without it products are BLAS's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial, wraps
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastkron_py.runtime.gpu import zen

logger = logging.getLogger("fastkron_py")

Guard = Callable[..., bool]
T = TypeVar("T")
P = ParamSpec("P")
FUNCTIONALIZE: Final = "Functionalize"  # of torch.func's transforms


# ---- the names -----------------------------------------------------------------------------------


def tensor_guards() -> Any:
    """The guards of torch.compile: one call into C++ compares type, dtype, device, sizes, strides, requires_grad and dispatch keys.

    Dispatch keys are taken with those in force in the thread: they tell of autocast, of torch.func's transforms, of modes and of tracing.
    """
    from torch._C._dynamo.guards import TensorGuards

    return TensorGuards


def keys_in_force() -> int:
    """The dispatch keys that this thread adds to every call: those of modes, of transforms and of tracing."""
    return int(torch._C._dispatch_tls_local_include_set().raw_repr())


def keys_of(t: Tensor) -> int:
    """The dispatch keys of a tensor."""
    return int(torch._C._dispatch_keys(t).raw_repr())


def is_transforming() -> bool:
    """Whether a torch.func transform or a forward-mode level is in force in this thread."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def transforms() -> list[str]:
    """The names of the torch.func transforms that are in force in this thread, the outermost first; a forward-mode level is one, too."""
    names = [level.key().name for level in torch._C._functorch.get_interpreter_stack() or ()]
    return [*names, "Jvp"] if forward_ad._current_level >= 0 else names


def is_watching() -> bool:
    """Whether a torch function mode or a forward-mode level wants to see every call of this thread."""
    return torch._C._len_torch_function_stack() > 0 or forward_ad._current_level >= 0


@lru_cache(maxsize=1)
def without_views() -> Callable[[], Any]:
    """What makes a context manager in which autograd does not record that a tensor is a view of another.

    In another torch one that does nothing: a result that is a view cannot be changed in place there, and torch says so.
    """
    return _view_guard() if works("views") else contextlib.nullcontext


def _view_guard() -> Callable[[], Any]:
    return partial(torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))


def keeps_graph() -> bool:
    """Whether the graph that this thread's backward pass runs through is kept for another one; True outside of a backward pass."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def want_no_zeros(ctx: Any) -> None:
    """Let an autograd function's backward rule have None, not zeros, for results without a derivative; elsewhere it has zeros, as ever."""
    ctx._materialize_non_diff_grads = False


def is_batching() -> bool:
    """Whether torch.autograd's own vmap, which is not torch.func's, is in force in this thread."""
    key: Any = torch._C._parse_dispatch_key("VmapMode")  # which has no name in Python
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(key))


def has_batches(t: Any) -> bool:
    """Whether it is a tensor of a vmap."""
    key: Any = torch._C._parse_dispatch_key("Batched")
    return isinstance(t, Tensor) and bool(torch._C._dispatch_keys(t).has(key))


def without_batch(t: Tensor, level: int, size: int) -> Tensor:
    """A tensor with its batch of this level as the first dimension; one without is expanded by one of this size."""
    return torch._remove_batch_dim(t, level, size, 0)


def with_batch(t: Tensor, dim: int, level: int) -> Tensor:
    """The reverse: a tensor whose dimension is the batch of this level."""
    return torch._add_batch_dim(t, dim, level)


def will_execute(node: Any) -> bool:
    """Whether the backward pass that is under way gets to a node; a RuntimeError of a leaf that it accumulates or returns."""
    return bool(torch._C._will_engine_execute_node(node))


def mark_static(t: Any) -> Any:
    """The tensor, of whose sizes Dynamo makes no symbols; its own function of this name does so only while nothing is compiled."""
    t._dynamo_static_indices = set(range(t.ndim))
    return t


def constant_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Let Dynamo call a function when it traces, and take the result for a constant; torch's own decorator imports the compiler."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    made: Any = function if isinstance(function, FunctionType) else wraps(function)(call)  # a cache is no function to Dynamo
    made._dynamo_marked_constant = True
    return made


def device_getter() -> Callable[[], int]:
    """The function behind `torch.cuda.current_device`; that itself where there is no such name."""
    return getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def precision_getter() -> Callable[[str, str], Any]:
    """The precision of an operation of a backend, such as ``torch.backends.cuda.matmul.fp32_precision`` for ("cuda", "matmul")."""
    return torch._C._get_fp32_precision_getter


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16, summed in float32, and torch uses them; False where torch does not say."""
    asked = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return torch.backends.mkldnn.is_available() and any([ask is not None and ask() for ask in asked])


@lru_cache(maxsize=1)
def onednn_product() -> Callable[[Tensor, Tensor], Tensor] | None:
    """``a @ b`` of float32 matrices by oneDNN, in new memory and without gradients; None where torch's BLAS is as fast, or on a failure.

    MKL has no AVX-512 kernels for AMD's CPUs. Zen 4 and Zen 5 have these instructions. TorchInductor calls the same operator.
    """
    if not torch.backends.mkldnn.is_available() or zen() == 0:
        return None
    found: list[Callable[[Tensor, Tensor], Tensor]] = []

    def attempt() -> None:
        with contextlib.suppress(Exception):  # whatever a private name does in another version
            linear = _onednn_linear()

            def product(a: Tensor, b: Tensor) -> Tensor:
                return linear(a, b.mT, None, "none", [], "")

            a = torch.arange(12, dtype=torch.float32, device="cpu").view(3, 4)
            if torch.equal(product(a, a.mT), a @ a.mT) and torch.equal(product(a.mT, a), a.mT @ a):
                found.append(product)

    apart(attempt)
    return found[0] if found else None


def _onednn_linear() -> Callable[..., Any]:
    return torch.ops.mkldnn._linear_pointwise.default


# ---- trying them ---------------------------------------------------------------------------------


def obstacle() -> str | None:
    """Why calls are not cached here, None if they are."""
    return next(iter(failures().values()), None)


def works(names: str) -> bool:
    """Whether some of the names answer as expected: those that `_TRIALS` has by this word."""
    return names not in failures()


def forget() -> None:
    """Try the names again when they are next needed."""
    failures.cache_clear()
    without_views.cache_clear()


@lru_cache(maxsize=1)
def failures() -> dict[str, str]:
    """The reasons why names fail, by the words of `_TRIALS`. The names are tried when this is first asked."""
    found: dict[str, str] = {}

    def attempt() -> None:
        for names, trial in _TRIALS.items():
            try:
                if not trial():
                    found[names] = f"{names} of torch {torch.__version__} answer otherwise than expected"
            except Exception as error:  # whatever a private name does in another version
                found[names] = f"{names} of torch {torch.__version__}: {type(error).__name__}: {error}"

    apart(attempt)
    for reason in found.values():
        logger.warning("calls are not cached: %s", reason)
    return found


def apart(call: Callable[[], T]) -> T:
    """What a function returns in a thread of its own, in which no mode, transform or tracing of the caller's is in force."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _try_guards() -> bool:
    # Tensors of a dtype of their own: the default one is the user's.
    a = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
    b = a.clone().requires_grad_()
    check = guard((a, b))
    others = [(b, b), (a.double(), b), (a.mT.contiguous().mT, b), (a.new_zeros(2, 4), b)]
    with torch.autocast("cpu", torch.bfloat16):
        tells_of_autocast = not check(a, b)
    return check(torch.ones_like(a), b) and tells_of_autocast and not any([check(*other) for other in others])


def _try_keys() -> bool:
    outside = keys_in_force()
    with torch.inference_mode():
        inside = keys_in_force()
    t = torch.zeros(2, dtype=torch.complex64, device="cpu")
    return keys_of(t) == keys_of(torch.ones_like(t)) != keys_of(t.conj()) and outside == keys_in_force() != inside


def _is_forward_mode() -> bool:
    """Whether a forward-mode level is in force, which is level 0: levels are the process's, and do not nest.

    `forward_ad.make_dual` says the same, but imports decompositions first, which takes 0.1 s.
    """
    t = torch.zeros((), device="cpu")
    try:
        torch._make_dual(t, t, level=0)
    except RuntimeError:
        return False
    return True


def _try_transforms() -> bool:
    is_read = "_current_level" in forward_ad.make_dual.__code__.co_names
    is_known = FUNCTIONALIZE in torch._C._functorch.TransformType.__members__
    return is_read and is_known and is_transforming() == _is_forward_mode() == bool(transforms())


def _try_modes() -> bool:
    outside = is_watching()
    with torch.device("cpu"):
        inside = is_watching()
    return inside and outside == _is_forward_mode()


def _try_views() -> bool:
    t = torch.zeros(2, device="cpu")
    with _view_guard()():
        silent = t[:1]
    return not silent._is_view() and t[:1]._is_view()


class _Product(torch.autograd.Function):
    """A product, whose backward pass asks which of the two nodes before it are gone to."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, answers: list[bool]) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.answers = answers
        return a * b

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        ctx.answers += [will_execute(node) for node, _ in ctx.next_functions[:2]]
        return dy * b, dy * a, None


def _try_nodes() -> bool:
    answers: list[bool] = []
    a, b = (torch.ones(3, dtype=torch.float32, device="cpu", requires_grad=True) for _ in range(2))
    apply: Any = super(torch.autograd.Function, _Product).apply  # torch.func's part takes imports
    (slope,) = torch.autograd.grad(apply(a * 2.0, b * 3.0, answers).sum(), a)
    return answers == [True, False] and slope.tolist() == [6.0] * 3


def _try_graphs() -> bool:
    answers: list[bool] = []
    t = torch.ones(3, dtype=torch.float32, device="cpu", requires_grad=True)
    y = t * 2.0
    y.register_hook(lambda dy: answers.append(keeps_graph()))
    for keep in (True, False):
        torch.autograd.grad(y.sum(), t, retain_graph=keep)
    return answers == [True, False] and keeps_graph()


def _try_batches() -> bool:
    t = torch.zeros(2, 3, device="cpu")
    batched = with_batch(t, 0, 1)
    shapes = [tuple(u.shape) for u in (batched, without_batch(batched, 1, 7), without_batch(t, 1, 7))]
    return shapes == [(3,), (2, 3), (7, 2, 3)] and has_batches(batched) and not has_batches(t) and not is_batching()


_TRIALS: Final[dict[str, Callable[[], bool]]] = {
    "guards": _try_guards,
    "dispatch keys": _try_keys,
    "transforms": _try_transforms,
    "modes": _try_modes,
    "views": _try_views,
    "nodes of a backward pass": _try_nodes,
    "graphs that are kept": _try_graphs,
    "batches of gradients": _try_batches,
    "precision": lambda: bool(precision_getter()("cuda", "matmul") == torch.backends.cuda.matmul.fp32_precision),
}


# ---- guards --------------------------------------------------------------------------------------


def guard(tensors: Sequence[Tensor]) -> Guard:
    """The function that tells whether other tensors, as arguments, are like these."""
    # One guard for all refuses a tensor that comes twice; then there is one for each.
    is_distinct = len({id(t) for t in tensors}) == len(tensors)
    guards, groups = tensor_guards(), [tensors] if is_distinct else [(t,) for t in tensors]
    checks: list[Guard] = [guards(*group, dynamic_dims_sizes=None, dynamic_dims_strides=None).check for group in groups]
    return checks[0] if is_distinct else lambda *given: all([check(t) for check, t in zip(checks, given, strict=True)])
