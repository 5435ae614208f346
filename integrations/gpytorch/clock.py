"""How much of a model's time goes into Kronecker products, fastkron_py's or linear_operator's own."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from linear_operator.operators import KroneckerProductLinearOperator

from fastkron_py.integrations.gpytorch.operators import FastProducts

METHODS: Final = ("_matmul", "_t_matmul", "_bilinear_derivative")


class KroneckerClock:
    """Counts and times every Kronecker product and gradient inside a ``with`` block, in all threads: a tool for measuring.

    On a GPU it takes events of the stream, and waits for nothing until the block's end.

    Attributes:
        seconds: in products and gradients; known after the block.
        calls: how many of them there were.

    Example:
        >>> with use_fastkron(), KroneckerClock() as clock:
        ...     loss = -mll(model(x), y)
        >>> clock.calls > 0
        True
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._inside = threading.local()
        self._events: list[tuple[Any, Any]] = []
        self._kept: list[tuple[type, str, Any]] = []

    def __enter__(self) -> KroneckerClock:
        for owner in (KroneckerProductLinearOperator, FastProducts):
            for name in METHODS:
                self._kept.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._kept:
            if original is None:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._kept.clear()
        if self._events:
            torch.cuda.synchronize()
            self.seconds += sum(start.elapsed_time(end) for start, end in self._events) / 1e3
            self._events.clear()

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(operator: Any, *args: Any) -> Any:
            if getattr(self._inside, "on", False):  # a gradient that calls products is one thing
                return method(operator, *args)
            self._inside.on = True
            self.calls += 1
            try:
                return self._run(method, operator, *args)
            finally:
                self._inside.on = False

        return timed

    def _run(self, method: Callable[..., Any], operator: Any, *args: Any) -> Any:
        if args[0].is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = method(operator, *args)
            end.record()
            self._events.append((start, end))
            return result
        begin = time.perf_counter()
        result = method(operator, *args)
        self.seconds += time.perf_counter() - begin
        return result
