"""Launchers of the Triton kernels: canonical operands in, a plan carried out, canonical results out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from fastkron_py.kron.forward_problem import Kind
from fastkron_py.kron.launches import Case, Rows, launch_configs
from fastkron_py.kron.plan.plan import Launch, Setting, places, plan, turns
from fastkron_py.kron.tune.choice import Choice
from fastkron_py.kron.tune.tuned import tuned
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.launch import RECORDING, Ready
from fastkron_py.runtime.precision import resolved
from fastkron_py.runtime.program import ALPHA, Replay, Tape, bits


def mergeable(t: Tensor) -> Tensor:
    """Return t ``[B, L, n, R]`` itself if (n, R) is one run of memory, else a copy."""
    _, _, n, columns = t.shape
    inner = columns == 1 or t.stride(3) == 1
    outer = n == 1 or t.stride(2) == columns
    return t if inner and outer else t.contiguous()


def _rows(t: Tensor) -> Rows:
    """Strides of a tensor ``[B, L, n, R]`` of which (n, R) is one run of memory."""
    return Rows(t.stride(0), t.stride(1), 1)


def _addend(z: Tensor) -> tuple[Tensor, Rows]:
    """Describe z, of any strides: broadcast rows and columns are read in place where (n, R) has a constant stride."""
    _, _, n, columns = z.shape
    if columns == 1:
        return z, Rows(z.stride(0), z.stride(1), z.stride(2) if n > 1 else 0)
    if n == 1 or z.stride(2) == columns * z.stride(3):
        return z, Rows(z.stride(0), z.stride(1), z.stride(3))
    z = z.contiguous()
    return z, _rows(z)


class Prepared:
    """One launch of a program: which factors, where to, and its launch configurations."""

    def __init__(self, case: Case, shape: tuple[int, int, int, int], config: Any = None) -> None:
        self.start, self.stop = case.launch.start, case.launch.stop
        self.shape = shape  # of the result
        self.configs = launch_configs(case, config)
        self.first = 0  # the first configuration that the device has shared memory for, as far as is known
        self.compiled: Any = None  # that configuration's compiled kernel on its grid, for aligned pointers
        self.strides: tuple[Any, ...] = ()
        self.rest: tuple[Any, ...] = ()
        self._ready: Ready | None = None

    def run(self, x: Tensor, factors: Sequence[Tensor], z: Tensor | None, alpha: int, beta: int, y: Tensor | None = None) -> Tensor:
        """Launch on a fresh result, or on y; alpha and beta as bit patterns."""
        y = torch.empty(self.shape, dtype=x.dtype, device=x.device) if y is None else y
        self(x, tuple(factors[self.start : self.stop]), y if z is None else z, y, alpha, beta)
        return y

    def __call__(self, *given: Any) -> None:
        """Launch on x, the launch's own factors, z (y where there is none), y, alpha and beta."""
        if RECORDING.recorder is not None:
            RECORDING.recorder.launch(self, given)
            return
        x, mine, addend, y, alpha, beta = given
        # Triton compiles for pointers on a 16-byte boundary or not.
        pointers = [t.data_ptr() for t in (x, addend, *mine)]
        result = y.data_ptr()
        aligned = not result & 15 and not any([p & 15 for p in pointers])
        if aligned and self.compiled is not None:
            # As integers: of a tensor, Triton would ask for its address, and the driver for each address's device.
            self.compiled(pointers[0], tuple(pointers[2:]), pointers[1], result, *self.strides, alpha, beta, *self.rest)
            return
        while True:
            kernel, grid, arguments = self.configs[self.first]
            try:
                compiled = kernel[grid](x_ptr=x, factor_ptrs=mine, z_ptr=addend, y_ptr=y, alpha=alpha, beta=beta, **arguments)
            except OutOfResources:
                if self.first + 1 == len(self.configs):
                    raise
                self.first += 1
                continue
            if aligned and compiled is not None:  # the interpreter compiles nothing
                self._keep(kernel, compiled, grid, arguments)
            return

    def ready(self) -> Ready | None:
        """See `kernels.launcher.Launch`."""
        return self._ready

    def _keep(self, kernel: Any, compiled: Any, grid: tuple[int], arguments: dict[str, Any]) -> None:
        """Remember a compiled kernel, which is launched several times faster than through its JIT function."""
        names = kernel.arg_names
        scalars = names.index("alpha")  # alpha and beta stand between the strides and the rest
        self.strides = tuple(arguments[name] for name in names[names.index("x_strides") : scalars])
        self.rest = tuple(arguments[name] for name in names[scalars + 2 :])
        self.compiled = compiled[(*grid, 1, 1)]
        self._ready = Ready(compiled, grid, self.strides, self.rest)


@lru_cache(maxsize=1024)
def _program(kind: Kind) -> tuple[Prepared, ...]:
    """The launches of a multiply, ready to run: those that were tuned for it, or else the plan's."""
    return program_of(kind, tuned(kind))


def forget_programs() -> None:
    """Build every program anew when it is next needed."""
    _program.cache_clear()


def setting_of(kind: Kind) -> Setting:
    """What a plan for this kind depends on besides the factors."""
    groups, rows, _, columns = kind.shape
    before, after = math.prod(kind.sizes[: kind.start]), math.prod(kind.sizes[kind.stop :]) * columns
    return Setting(kind.dtype.itemsize, groups * rows * before, after, devices.has_chained(kind.device, kind.dtype), before)


def case_of(kind: Kind, launch: Launch, shape: tuple[int, int, int, int], turn: bool, apart: int, x: Rows, y: Rows, final: bool) -> Case:
    """A launch of a multiply, from x to y; the final one scales, and adds z. Shape and apart as of `Case`, turn of the whole program."""
    z = kind.z if final else None
    groups, span = shape[0], slice(launch.start, launch.stop)
    return Case(
        launch,
        kind.dtype,
        kind.precision,
        "axpby" if z is not None else "scale" if final and kind.scaled else "plain",
        shape,
        turn and apart > 1,
        apart,
        kind.shape[3] == 1,
        x,
        y,
        y if z is None else z,
        tuple([(s[-2], s[-1]) for s in kind.factor_shapes[span]]),
        tuple([(s[0] if groups > 1 else 0, s[1], s[2]) for s in kind.factor_strides[span]]),
        devices.multiprocessor_count(kind.device),
    )


def program_of(kind: Kind, choice: Choice | None) -> tuple[Prepared, ...]:
    """The launches of a multiply by this choice, or by the closed form.

    A run over all modes from last to first turns each launch's modes to the front, which reads whole runs of
    memory and leaves them in order at the end; other runs multiply in place.
    """
    groups, rows, _, columns = kind.shape
    shapes = [(s[-2], s[-1]) for s in kind.factor_shapes]
    configs: Sequence[Any]
    if choice is None:
        mine = shapes[kind.start : kind.stop]
        planned = plan(tuple(p for p, _ in mine), tuple(q for _, q in mine), setting_of(kind))
        launches = [launch.shifted(kind.start) for launch in planned]
        configs = [None] * len(launches)
    else:
        launches, configs = choice.as_launches(shapes), [chosen.config for chosen in choice.launches]
    turn = turns(launches, len(shapes), columns)
    x, program = kind.x, []
    for i, (launch, (before, after)) in enumerate(zip(launches, places(launches, kind.sizes, columns, turn), strict=True)):
        width = before * launch.q * after
        y = Rows(rows * width, width, 1)
        final = i == len(launches) - 1
        case = case_of(kind, launch, (groups, rows, before, after), turn, before, x, y, final)
        program.append(Prepared(case, (groups, rows, width // columns, columns), configs[i]))
        x = y
    return tuple(program)


def kind_of(
    x: Tensor,
    factors: Sequence[Tensor],
    start: int,
    stop: int,
    sizes: tuple[int, ...],
    precision: str,
    scaled: bool,
    z: Rows | None = None,
) -> Kind:
    """The kind of a multiply of x ``[B, L, K, R]``, of which (K, R) is one run of memory."""
    shapes, strides = tuple([f.shape for f in factors]), tuple([f.stride() for f in factors])
    return Kind(x.shape, _rows(x), z, shapes, strides, start, stop, sizes, scaled, precision, x.dtype, x.device)


def _carry_out(
    x: Tensor,
    factors: Sequence[Tensor],
    start: int,
    stop: int,
    sizes: tuple[int, ...],
    precision: str,
    alpha: float = 1.0,
    beta: float = 0.0,
    z: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply x ``[B, L, K, R]``, whose modes have these sizes, with factors start to stop."""
    x = mergeable(x)
    z_rows = None
    if z is not None:
        z, z_rows = _addend(z)
    program = _program(kind_of(x, factors, start, stop, sizes, precision, alpha != 1, z_rows))
    last = len(program) - 1
    alpha_bits, beta_bits = bits(alpha), bits(beta)
    for i, prepared in enumerate(program):
        addend, y = (z, out) if i == last else (None, None)
        x = prepared.run(x, factors, addend, alpha_bits, beta_bits, y)
    return x


def multiply(
    x: Tensor,
    factors: Sequence[Tensor],
    z: Tensor | None,
    alpha: float,
    beta: float,
    precision: str | None,
    out: Tensor | None = None,
) -> Tensor:
    """``alpha * x (F1 (x) ... (x) FN) + beta * z`` on the GPU (or interpreted).

    Args:
        x: ``[B, L, K, R]``, not empty.
        factors: ``[B, P_i, Q_i]``, any strides.
        z: ``[B, L, N, R]``, any strides, or None.
        alpha: scales the product.
        beta: scales z.
        precision: ``"highest"``, ``"high"``, ``"medium"`` or None for torch's setting.
        out: where the result shall be, ``[B, L, N, R]``, contiguous; new memory if None.

    Returns:
        ``[B, L, N, R]``, contiguous.
    """
    with devices.on_device(x):
        sizes = tuple([f.shape[1] for f in factors])
        return _carry_out(x, factors, 0, len(factors), sizes, resolved(precision), alpha, beta, z, out)


def replay(x: Tensor, factors: Sequence[Tensor], precision: str, scaled: bool, shape: Sequence[int]) -> Replay | None:
    """What `multiply` without z does to operands like these, ready to be repeated; None where that takes a copy of x.

    Args:
        x: ``[B, L, K, R]``, of which one multiply has been done.
        factors: ``[B, P_i, Q_i]``.
        precision: ``"highest"``, ``"high"`` or ``"medium"``.
        scaled: alpha is not 1.
        shape: of the results, instead of ``[B, L, N, R]``.
    """
    if mergeable(x) is not x:
        return None
    with devices.on_device(x):
        sizes = tuple([f.shape[1] for f in factors])
        tape = Tape((x, *factors))
        source = 0
        for prepared in _program(kind_of(x, factors, 0, len(factors), sizes, precision, scaled)):
            y = tape.buffer(prepared.shape, x.dtype)
            tape.launch(prepared, (source, tuple(range(1 + prepared.start, 1 + prepared.stop)), y, y), (ALPHA, bits(0.0)))
            source = y
        return Replay(tape, [source], [tuple(shape)])
