"""`bench`: compare methods on problems that the user gives, or run the benchmarks of the source tree."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.markup import escape
from torch import Tensor

import fastkron_py
from fastkron_py import kron_matmul, reference
from fastkron_py.cli.demo import matmul_transpose_loop
from fastkron_py.cli.display import bytes_text, chosen_device, device_name, fail, number, seconds_text, table
from fastkron_py.cli.measure import best_seconds, peak_bytes
from fastkron_py.cli.shapes import Shape, parse_shapes
from fastkron_py.kron.tune.table import DTYPES
from fastkron_py.runtime.checks import check_choice

DEFAULT_SHAPES: Final = {"cpu": "1024:8^3,1024:32^2,16:16^4", "cuda": "1024:8^5,1024:32^3,256:64^3"}
SECONDS: Final = 0.5
CLEAR: Final = 2.0  # of quartiles: further apart, other programs have disturbed the turns
TURNS: Final = 20  # of each method of a problem, if they fit into the seconds
TURNS_LEAST: Final = 5
OURS: Final = "fastkron_py"
HAS_GPYTORCH: Final = find_spec("linear_operator") is not None  # the package in which its products are
# Far above rounding and far below a wrong result: sums of millions of products, as in gradients of factors, lose digits in any library.
LIMITS: Final = {torch.float16: 0.05, torch.bfloat16: 0.2, torch.float32: 1e-3, torch.float64: 1e-10}
MISSING: Final = (
    "The benchmarks are in the source tree, not in the installed package. Clone the repository and run "
    "'python -m fastkron_py bench NAME' or 'make bench NAME=...' in it, or compare your own sizes here: fastkron bench --shapes 1024:8^5"
)


def busy() -> str:
    """A warning if other programs leave torch fewer cores than it has threads; empty if they do not, or if the system does not tell."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on every system
        return ""
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    if load <= cores - threads + 0.5:
        return ""
    return f"warning: the machine is busy (load {load:.1f}; torch uses {threads} of {cores} cores): times may be too long"


def source_tree() -> Path | None:
    """The folder that this package was imported from, or the current one, if it has the benchmarks."""
    for root in (Path(fastkron_py.__file__).resolve().parents[1], Path.cwd()):
        if (root / "benchmarks" / "catalogue.py").is_file() and (root / "fastkron_py" / "__init__.py").is_file():
            return root
    return None


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Benchmarks of the source tree; all that fit this machine by default.")
    ] = None,
    shapes: Annotated[str, typer.Option(help="Compare on these problems instead: ROWS:FACTORS,... as in '1024:8^5,256:52>65x50>20'.")] = "",
    dtype: Annotated[str, typer.Option(help=f"Of --shapes: {', '.join(DTYPES)}.")] = "float32",
    gradients: Annotated[bool, typer.Option("--gradients", help="Of --shapes: time forward and backward passes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for NAME.json and the plots; out/benchmarks by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases and rounds, to see that it works.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, max=1e6, callback=number, help="Limit of one benchmark; with --shapes, of one method on one problem."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU by default, if there is one.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="LABEL", help="Cases with this in their label; may be repeated.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the benchmarks.")] = False,
) -> None:
    """Compare with a torch loop and GPyTorch on problems of your own, or run the source tree's benchmarks.

    Each method is checked against float64 before it is timed.

    In --shapes, FACTORS are P, or P>Q for P rows and Q columns, joined by x; ^N repeats one.
    """
    of_the_tree = names or quick or only or list_ or out is not None
    of_the_comparison = shapes or gradients or dtype != "float32"
    root = source_tree()
    if of_the_comparison and of_the_tree:
        fail(Console(stderr=True), "NAME, --quick, --only, --list and --out cannot be combined with --shapes, --dtype and --gradients")
    if root is not None and of_the_comparison and not shapes:
        fail(Console(stderr=True), "--dtype and --gradients need --shapes")
    if shapes or (root is None and not of_the_tree):
        _compare(shapes, dtype, device or "auto", gradients, seconds or SECONDS)
        return
    if root is None:
        Console(stderr=True).print(f"[bold red]{MISSING}[/bold red]", soft_wrap=True)
        raise typer.Exit(1)
    command = [sys.executable, "-m", "benchmarks", *(names or []), "--out", str((out or Path("out/benchmarks")).resolve())]
    command += ["--quick"] if quick else []
    command += ["--list"] if list_ else []
    command += [] if seconds is None else ["--seconds", str(seconds)]
    command += [part for label in only or [] for part in ("--only", label)]
    command += [] if device is None else ["--device", device]
    # The benchmarks' own command line checks its arguments.
    raise typer.Exit(subprocess.run(command, cwd=root, check=False).returncode)  # noqa: S603


def _compare(shapes: str, dtype: str, device: str, with_gradients: bool, seconds: float) -> None:
    console = Console()
    try:
        check_choice("dtype", dtype, DTYPES)
        settings = Settings(getattr(torch, dtype), chosen_device(device), with_gradients, seconds)
        problems = parse_shapes(shapes or DEFAULT_SHAPES[settings.device.type])
    except (ValueError, RuntimeError) as error:
        fail(console, str(error))
    if warning := busy():
        console.print(warning, style="yellow", markup=False)
    rows, failed = [], []
    with console.status("") as status:
        for shape in problems:
            status.update(escape(str(shape)))
            try:
                found = compare(shape, settings)
            except RuntimeError as error:  # out of memory
                found = [Measurement(OURS, failure=str(error).splitlines()[0])]
            rows += _rows(shape, found)
            failed += [str(shape) for m in found if m.method == OURS and m.failure]
    passes = "forward and backward" if with_gradients else "forward"
    title = f"{passes.capitalize()}, {dtype}, {device_name(settings.device)}, torch {torch.__version__}"
    console.print(table(title, ["problem", "method", "time", "memory", "relative error", f"{OURS} is"], rows))
    console.print("Memory is the most that a call allocates at once. The error is that of the worst result, against float64.", style="dim")
    console.print(
        "Methods take turns. The time is the shortest; a factor is the median of the turns, with quartiles in brackets.", style="dim"
    )
    if not HAS_GPYTORCH:
        console.print("Install GPyTorch to include it in the comparison: pip install 'fastkron_py\\[gp]'", style="dim")
    if failed:
        fail(console, f"not measured: {', '.join(failed)}")


def _rows(shape: Shape, found: list[Measurement]) -> list[list[str]]:
    ours = next((m for m in found if m.method == OURS and not m.failure), None)
    rows = []
    for m in found:
        error = "" if m.error != m.error else f"{m.error:.1e}"
        if m.failure:
            rows.append([str(shape), m.method, escape(m.failure), "", error, ""])
        else:
            faster = "" if ours is None or m is ours else _factor(*ours.speedups(m))
            rows.append([str(shape), m.method, seconds_text(min(m.turns)), bytes_text(m.memory_bytes), error, faster])
    return rows


def _factor(low: float, middle: float, high: float) -> str:
    """Quartiles of a speed-up, to two digits. Turns that disagree say nothing about the factor."""
    found = (low, middle, high) if middle >= 1 else (1 / high, 1 / middle, 1 / low)
    texts = [f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:#.2g}" for ratio in found]
    verdict = "faster" if middle >= 1 else "slower"
    if high > CLEAR * low:
        return f"unclear: {texts[0]}x to {texts[2]}x {verdict}"
    return f"{texts[1]}x {verdict} ({texts[0]} to {texts[2]})"


# ---- the comparison -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The options that all problems share."""

    dtype: torch.dtype
    device: torch.device
    with_gradients: bool
    seconds: float  # for each method of each problem, about


@dataclass
class Measurement:
    """One method on one problem. ``failure`` is empty where it was timed; else it holds the reason."""

    method: str
    turns: list[float] = field(default_factory=list)  # seconds of a call, the shortest of each turn
    memory_bytes: int = 0
    error: float = float("nan")
    failure: str = ""

    def speedups(self, other: Measurement) -> list[float]:
        """Quartiles of another method's time divided by this one's, turn by turn: other work slows both, or shows in their distance."""
        return quantiles((b / a for a, b in zip(self.turns, other.turns, strict=True)), n=4, method="inclusive")


@dataclass(frozen=True)
class _Method:
    """``multiply(x, factors)`` is ``x @ K``; if ``is_left``, it is ``K.T @ x.T`` of transposed operands."""

    name: str
    multiply: Callable[[Tensor, list[Tensor]], Tensor]
    is_left: bool = False


def _methods() -> list[_Method]:
    methods = [_Method("torch loop", matmul_transpose_loop), _Method(OURS, kron_matmul)]
    return [_Method("GPyTorch", _gpytorch, is_left=True), *methods] if HAS_GPYTORCH else methods


def _gpytorch(columns: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """GPyTorch's operator, applied to columns as GPyTorch itself applies it."""
    from linear_operator import operators

    return operators.KroneckerProductLinearOperator(*map(operators.DenseLinearOperator, factors)).matmul(columns)


def compare(shape: Shape, settings: Settings) -> list[Measurement]:
    """Check and time each method on random operands of one problem.

    Raises:
        RuntimeError: the operands or the float64 reference do not fit into memory.
    """
    generator = torch.Generator(settings.device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float32, device=settings.device)

    rows, sizes = shape
    # Scaled so that results are of size 1, which half types hold.
    factors = [(random(p, q) / p**0.5).to(settings.dtype) for p, q in sizes]
    x = random(rows, math.prod(p for p, _ in sizes)).to(settings.dtype)
    dy = random(rows, math.prod(q for _, q in sizes)).to(settings.dtype)
    exact = _call(_Method("", reference.kron_matmul), x.double(), [f.double() for f in factors], dy.double(), settings.with_gradients)()
    methods = _methods()
    calls = [_call(method, x, factors, dy, settings.with_gradients) for method in methods]
    found = [Measurement(method.name) for method in methods]

    def each(step: Callable[[_Method, Callable[[], list[Tensor]], Measurement], None]) -> None:
        """Take a step with each method that has not failed."""
        for method, call, one in zip(methods, calls, found, strict=True):
            try:
                if not one.failure:
                    step(method, call, one)
            except (RuntimeError, MemoryError) as error:
                one.error, one.failure = float("nan"), str(error).splitlines()[0] if str(error) else type(error).__name__

    def check(method: _Method, call: Callable[[], list[Tensor]], one: Measurement) -> None:
        results = [r.mT for r in call()] if method.is_left else call()
        one.error = max(float((r.double() - e).norm() / e.norm()) for r, e in zip(results, exact, strict=True))
        one.failure = "" if one.error <= LIMITS[settings.dtype] else "WRONG"  # NaN is wrong

    def take_turn(_: _Method, call: Callable[[], list[Tensor]], one: Measurement) -> None:
        one.turns.append(best_seconds(call, settings.device, settings.seconds / TURNS))

    def weigh(_: _Method, call: Callable[[], list[Tensor]], one: Measurement) -> None:
        one.memory_bytes = peak_bytes(call, settings.device)

    each(check)
    # In turns, since other work on the machine comes and goes.
    end = time.perf_counter() + settings.seconds * len(methods)
    for turn in range(TURNS):
        if turn >= TURNS_LEAST and time.perf_counter() > end:
            break
        each(take_turn)
    each(weigh)
    return found


def _call(method: _Method, x: Tensor, factors: list[Tensor], dy: Tensor, with_gradients: bool) -> Callable[[], list[Tensor]]:
    """The call that is timed: returns the product, and with gradients those of x and of each factor."""
    if method.is_left:
        x, dy, *factors = (t.mT.contiguous() for t in (x, dy, *factors))
    if not with_gradients:
        return lambda: [method.multiply(x, factors)]
    inputs = [t.detach().requires_grad_() for t in (x, *factors)]

    def call() -> list[Tensor]:
        y = method.multiply(inputs[0], inputs[1:])
        return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    return call
