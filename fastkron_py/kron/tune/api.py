"""`tune`: search for the fastest launches of one problem, and keep them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fastkron_py.kron.canonical import canonical
from fastkron_py.kron.checks import check_problem, check_tensors, factor_list
from fastkron_py.runtime.backend import triton_obstacle
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import DTYPES, check_integer, check_precision, dtype_names
from fastkron_py.runtime.errors import type_error, type_name, value_error

if TYPE_CHECKING:
    from fastkron_py.kron.tune.table import Choice, Problem

BUDGET: Final = 120.0  # seconds; one process compiles for two to five of them for each kernel


@dataclass(frozen=True)
class TuningResult:
    """The result of a search, so far while it runs.

    Attributes:
        problem: that is tuned.
        default_seconds: time of the default choice, by the cost model.
        best_seconds: time of the best choice, measured alternately with the default.
        choice: the best choice, or None if nothing was clearly faster than the default.
        trials: how many choices were tried.
        dropped: those that failed, each as (choice, reason).
        seconds: that the search took.
        saved: whether the result was written to the user's table.
    """

    problem: Problem
    default_seconds: float
    best_seconds: float
    choice: Choice | None
    trials: int
    dropped: tuple[tuple[str, str], ...]
    seconds: float
    saved: bool = False

    @property
    def gain(self) -> float:
        """How many times as fast as the default the best choice is."""
        return self.default_seconds / self.best_seconds


Report = Callable[[TuningResult], None]


def tune(
    x: Tensor | int,
    factors: Sequence[Tensor | tuple[int, int] | int],
    *,
    left: bool = False,
    precision: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    budget: float = BUDGET,
    progress: bool | Report = True,
    save: bool = True,
) -> TuningResult:
    """Search for the fastest launches for Kronecker products of this problem, and use them from now on.

    Without tuning, a cost model chooses the launches, and nothing is timed. This times its plan (the default), the planner's other best
    plans, and those of each family of kernels. Results are compared with the default's. If one is clearly faster, later calls of the
    same problem take it: in this process at once, and in every later one, since it is written to the user's table
    (``FASTKRON_CACHE_DIR``, else the system's place for caches; ``FASTKRON_TUNING=off`` ignores all tables). A search that is interrupted
    (Ctrl-C) keeps what it has found faster by then.

    A problem is the factor shapes, dtype, precision, device and number of rows, to the nearest power of two. Give it by example,
    or by numbers.

    Args:
        x: as in `kron_matmul` (with left: `kron_matmul_left`); only its shape, strides, dtype and device count. Or the number
            of its rows (with left: columns).
        factors: tensors as in `kron_matmul` where x is one; else their shapes ``(P_i, Q_i)``, or P_i for square ones.
        left: tune `kron_matmul_left`.
        precision: as in `kron_matmul`.
        dtype: where x is a number: float32 unless given.
        device: where x is a number: the current CUDA device unless given, or the CPU where there is none.
        budget: seconds to spend, about. Compiling takes most of them; about ten plans are tried.
        progress: show it on a terminal's standard error; or a function that is called with the result so far after every trial.
        save: write the result to the user's table.

    Returns:
        A `TuningResult`: both times, the choice (None if the default stays), and which trials failed, and why.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes that do not fit, a budget that is not positive, or a device or dtype that Triton kernels do not
            take (they need a GPU, or Triton's interpreter with ``TRITON_INTERPRET=1``, where times mean little).
        KeyboardInterrupt: the search was interrupted.

    Example:
        >>> fastkron_py.tune(1024, [8] * 5)  # doctest: +SKIP
        >>> fastkron_py.tune(x, factors).gain  # doctest: +SKIP
        1.31
    """
    x4, matrices = example(x, factors, left, precision, dtype, device)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise type_error("budget", "a number of seconds", type_name(budget))
    if not 0 < budget < math.inf:
        raise value_error("budget", "a positive number of seconds", budget)
    if not isinstance(progress, bool) and not callable(progress):
        raise type_error("progress", "True, False or a function", type_name(progress))
    shows = progress is True and sys.stderr.isatty()
    report = progress if callable(progress) else _show if shows else lambda _: None
    try:
        return run(x4, matrices, precision, budget, report, save)
    finally:
        if shows:
            print(file=sys.stderr)


def _show(now: TuningResult) -> None:
    """Write how far the search is over the last line of standard error."""
    text = f"tuning: {now.trials} trials in {now.seconds:.0f} s, {now.best_seconds * 1e6:.1f} us (default {now.default_seconds * 1e6:.1f})"
    print(f"\r{text:<90}", end="", file=sys.stderr, flush=True)


def run(x4: Tensor, matrices: Sequence[Tensor], precision: str | None, budget: float, report: Report, save: bool) -> TuningResult:
    """Tune for checked operands in canonical form (see `example`).

    Raises:
        KeyboardInterrupt: after a faster choice, if one was found by then, was kept.
    """
    from fastkron_py.kron.tune import search, table

    result, is_interrupted = search.search(x4, matrices, precision, float(budget), report)
    if not is_interrupted or result.choice is not None:
        path, entry = table.cache_file() if save else None, table.entry_of(result)
        result = replace(result, saved=path is not None and table.append(path, [entry]))
        table.remember(entry)
        CACHE.forget()
    if is_interrupted:
        raise KeyboardInterrupt
    return result


def example(
    x: Any, factors: Any, left: bool, precision: Any, dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[Tensor, list[Tensor]]:
    """Random operands of the problem, in canonical form: x ``[B, L, K, R]``, factors ``[B, P_i, Q_i]``."""
    from fastkron_py.kron.tune.table import FACTORS_MOST

    listed = factor_list(factors)
    check_precision(precision)
    if len(listed) > FACTORS_MOST:
        raise value_error("factors", f"at most {FACTORS_MOST} factors", len(listed))
    if isinstance(x, Tensor):
        for name, value in (("dtype", dtype), ("device", device)):
            if value is not None:
                raise type_error(name, "None, since x is a tensor and has its own", value)
        matrices = listed
    else:
        x, matrices = _from_shapes(x, listed, left, dtype, device)
    names = ("x", "factors", "z")
    check_tensors(x, matrices, None, names)
    shape = check_problem(x, matrices, 0, None, left, names)
    if math.prod(shape) == 0 or x.numel() == 0:
        raise value_error("x", "a product that is not empty", f"a result of shape {shape} from x of shape {tuple(x.shape)}")
    if x.is_complex():
        raise value_error("dtype", "a real one, for which choices are kept", x.dtype)
    obstacle = triton_obstacle(x)
    if obstacle is not None:
        raise value_error("device", "one that Triton's kernels take", obstacle)
    if x.ndim == 1:
        x = x.unsqueeze(-1 if left else 0)
    x, matrices = _random_like(x.detach()), [_random_like(f.detach()) for f in matrices]
    problem = canonical(x, matrices, left)
    return problem.x, problem.factors


def _from_shapes(
    rows: Any, shapes: Sequence[Any], left: bool, dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[Tensor, list[Tensor]]:
    rows = check_integer("x", rows, "a torch tensor, or a number of rows")
    if rows < 1:
        raise value_error("x", "a number of rows of at least 1", rows)
    pairs = [_pair(f"factors[{i}]", shape) for i, shape in enumerate(shapes)]
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in DTYPES:
        raise type_error("dtype", f"a dtype among {dtype_names(DTYPES)}", dtype)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    width = math.prod([pair[1 if left else 0] for pair in pairs])
    if rows * width > torch.iinfo(torch.int64).max // dtype.itemsize:
        raise value_error("factors", "sizes for which x fits into memory", f"an x of {rows * width} elements")
    x = torch.empty((width, rows) if left else (rows, width), dtype=dtype, device=device)
    return x, [torch.empty(pair, dtype=dtype, device=device) for pair in pairs]


def _pair(name: str, shape: Any) -> tuple[int, int]:
    """(P, Q) from itself, or from P alone."""
    expected = "(P, Q) or P, since x is a number of rows"
    if isinstance(shape, Tensor):
        raise type_error(name, expected, "a tensor")
    sizes = [check_integer(name, size, expected) for size in (shape if isinstance(shape, list | tuple) else (shape, shape))]
    if len(sizes) != 2 or min(sizes) < 1:
        raise value_error(name, "positive sizes (P, Q), or P", shape)
    return sizes[0], sizes[1]


def _random_like(t: Tensor) -> Tensor:
    """A tensor with the strides of t, of numbers whose products neither overflow nor vanish."""
    overlapping = any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True))
    new = torch.empty_like(t) if overlapping else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return new.normal_().mul_(1 / math.sqrt(t.shape[-2]) if t.ndim > 1 else 1.0)
