"""`use_fastkron`: which Kronecker products that linear_operator and GPyTorch make become fastkron_py's.

The choice is made where an operator is built, and then belongs to the operator, by its class: backward passes run on
threads of autograd's own, where no context variable of the caller's is seen. So a hook in the constructor of
`KroneckerProductLinearOperator` asks a context variable, and changes the class of the new operator. More hooks save work
around such operators (`interpolation`). All are in place only while some context has the integration on.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from linear_operator.operators import InterpolatedLinearOperator, KroneckerProductLinearOperator, LinearOperator

from fastkron_py.integrations.gpytorch import interpolation
from fastkron_py.integrations.gpytorch.operators import adopt
from fastkron_py.integrations.versions import untested
from fastkron_py.runtime.checks import check_type
from fastkron_py.runtime.errors import type_error, warn

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
TESTED: Final = {"linear_operator": ((0, 6), (0, 7)), "gpytorch": ((1, 14), (1, 16))}  # from the first on, up to but without the second


class _State:
    """The state of a context from one `use_fastkron` on, linked to the state before."""

    def __init__(self, enabled: bool, owner: use_fastkron, previous: _State | None) -> None:
        self.enabled = enabled
        self.owner = weakref.ref(owner)
        self.previous = previous
        if enabled:
            _hooks.acquire()
            # At the state's end, however it comes: its block is left, or the thread or task that it belonged to has ended.
            weakref.finalize(self, _hooks.release).atexit = False


_current: contextvars.ContextVar[_State | None] = contextvars.ContextVar("fastkron_py_gpytorch", default=None)


def is_active() -> bool:
    """Whether Kronecker products made now, in this thread or task, become fastkron_py's."""
    state = _current.get()
    return state is not None and state.enabled


# ---- hooks -------------------------------------------------------------------------------------


def _hooked(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ours with the original before its arguments."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return call


def _construct(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """A constructor after which a Kronecker product is one of ours, where the integration is on."""
    original(self, *args, **kwargs)
    if is_active():
        _hooks.follow()
        adopt(self)


def _evaluate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A grid kernel's forward whose batch of one-dimensional grids (SKIP) is dense where that is faster."""
    result = original(self, *args, **kwargs)
    return interpolation.made_dense(result) if is_active() else result


Place = tuple[type, str, Callable[..., Any]]
"""A hooked function: owner, name, and the function that is called with the original before the arguments."""


def _places() -> tuple[Place, ...]:
    """Those of GPyTorch and linear_operator; their modules differ in versions that were not tested."""
    from gpytorch.distributions import MultivariateNormal
    from gpytorch.kernels import GridKernel
    from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy, InterpolatedPredictionStrategy

    from fastkron_py.integrations.gpytorch import covariances

    return (
        (KroneckerProductLinearOperator, "__init__", _construct),
        (InterpolatedLinearOperator, "_matmul", interpolation.matmul),
        (InterpolatedLinearOperator, "_t_matmul", interpolation.t_matmul),
        (InterpolatedLinearOperator, "_bilinear_derivative", interpolation.differentiate),
        (InterpolatedLinearOperator, "_diagonal", interpolation.diagonal),
        (GridKernel, "forward", _evaluate),
        (MultivariateNormal, "log_prob", covariances.log_prob),
        (LinearOperator, "solve", covariances.solve),
        (DefaultPredictionStrategy, "exact_predictive_covar", covariances.predicted_covariance),
        (InterpolatedPredictionStrategy, "exact_predictive_covar", covariances.predicted_covariance),
    )


def _of_botorch() -> tuple[Place, ...]:
    """BoTorch's place once somebody has imported it, which takes seconds."""
    module = sys.modules.get("botorch.posteriors.multitask")
    if module is None or not hasattr(module, "MultitaskGPPosterior"):
        return ()
    from fastkron_py.integrations.gpytorch import covariances

    return ((module.MultitaskGPPosterior, "__init__", covariances.multitask_posterior),)


class _Hooks:
    """Puts the hooks in place for the first user, and takes them away after the last."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a release may come in the midst of an acquire, from the garbage collector
        self._users = 0
        self._placed: list[tuple[type, str, Callable[..., Any], Callable[..., Any]]] = []

    def acquire(self) -> None:
        places = _places()  # may import; not under the lock, which a release on another thread may hold an import up for
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._place(places)
        self.follow()

    def follow(self) -> None:
        """Put those of BoTorch in place too, which may have been imported since."""
        places = _of_botorch()
        with self._lock:
            if self._users and not {p[:2] for p in places} <= {p[:2] for p in self._placed}:
                self._place(places)

    def _place(self, places: tuple[Place, ...]) -> None:
        for owner, name, ours in places:
            original = vars(owner)[name]
            hook = _hooked(original, ours)
            setattr(owner, name, hook)
            self._placed.append((owner, name, original, hook))

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for owner, name, original, hook in self._placed:
                    if vars(owner).get(name) is hook:  # else somebody has hooked in after us; ours does nothing by itself
                        setattr(owner, name, original)
                self._placed.clear()


_hooks: Final = _Hooks()


# ---- the public name ----------------------------------------------------------------------------


class use_fastkron:  # noqa: N801
    """Let the Kronecker products of GPyTorch's models run on fastkron_py: as a block, a decorator or a plain call.

    In force from the call on: to the end of the ``with`` block, during the decorated function's calls, or, as a plain
    call, until `close` of the returned object or the end of the thread. It holds for this thread (and asyncio task) only,
    and nests. Operators that models make meanwhile keep their class, so that a backward pass may come
    later; so do predictions that a model has cached, until it forgets them. Models without Kronecker products are not touched.

    Where gpytorch or linear_operator is of a version that was not tested with this package, a warning names the range and
    nothing is changed.

    Args:
        enabled: False has products made by linear_operator itself again.

    Raises:
        TypeError: enabled is not a bool.

    Example:
        >>> with use_fastkron():  # model and mll are GPyTorch's
        ...     loss = -mll(model(x), y)
        ...     loss.backward()
    """

    def __init__(self, enabled: bool = True) -> None:
        check_type("enabled", enabled, bool, "a bool (the block is `with use_fastkron():`, without the model)")
        self._enabled = enabled
        self._unclaimed: _State | None = self._push()

    def _push(self) -> _State:
        found = untested(TESTED) if self._enabled else None
        if found is not None:
            warn(f"use_fastkron has no effect: it does not support {found}", UserWarning)
        state = _State(self._enabled and found is None, self, _current.get())
        _current.set(state)
        return state

    def __enter__(self) -> use_fastkron:
        if self._unclaimed is None or _current.get() is not self._unclaimed:
            self._push()
        self._unclaimed = None
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the earlier state in this thread; a second call has no effect."""
        self._unclaimed = None
        state = _current.get()
        while state is not None and state.owner() is not self:
            state = state.previous
        if state is not None:
            _current.set(state.previous)

    def __call__(self, function: FunctionT) -> FunctionT:
        """Decorate a function: in force during its calls; a generator's or a coroutine's while its own code runs.

        Raises:
            TypeError: an asynchronous generator.
        """
        self.close()
        if inspect.isasyncgenfunction(function):
            raise type_error("function", "no asynchronous generator: use a with block in its body", function.__qualname__)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with use_fastkron(self._enabled):
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with use_fastkron(self._enabled):  # in this task's context alone
                return await function(*args, **kwargs)

        @functools.wraps(function)
        def run_steps(*args: Any, **kwargs: Any) -> Any:
            steps = function(*args, **kwargs)
            resume: Callable[[], Any] = functools.partial(next, steps)
            while True:
                with use_fastkron(self._enabled):
                    try:
                        item = resume()
                    except StopIteration as stop:
                        return stop.value
                try:
                    resume = functools.partial(steps.send, (yield item))
                except BaseException as error:
                    resume = functools.partial(steps.throw, error)

        if inspect.iscoroutinefunction(function):
            return run_async  # type: ignore[return-value]
        return run_steps if inspect.isgeneratorfunction(function) else run  # type: ignore[return-value]
