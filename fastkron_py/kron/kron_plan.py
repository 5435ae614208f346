"""The plan of a product, to be read, printed and forced: `kron_plan` and `families`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.canonical import PLAIN, Canonical, canonical
from fastkron_py.kron.checks import Shape, check_problem, check_tensors, factor_list
from fastkron_py.runtime.backend import families_in_force, triton_obstacle
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.checks import DTYPES, check_integer, dtype_names
from fastkron_py.runtime.device import absent
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.gpu import NAMED
from fastkron_py.runtime.precision import resolved

if TYPE_CHECKING:
    from fastkron_py.kron import planner
    from fastkron_py.kron.gradient_problem import GroupProblem
    from fastkron_py.kron.problem import Problem


@contextlib.contextmanager
def families(*names: str) -> Iterator[None]:
    """Multiply by these families of kernels only, inside a ``with`` block, in this thread (and asyncio task).

    It is for comparisons: the default is the fastest. It holds for products on one GPU by Triton's backend, but not for gradients,
    and not for products of `fastkron_py.distributed`. A product that the families cannot multiply raises a ValueError that says why each
    of them cannot. `kron_plan` prints the families that a product takes.

    Args:
        names: of families: ``"tile"`` (Triton's kernels for any factors), ``"fragments"``, ``"slice_pair"``, ``"whole_row"``,
            ``"small_factors"``, ``"wgmma"`` (fused kernels, and one for large factors, of Hopper GPUs), ``"narrow"`` (for factors of
            a few columns, without tensor cores), ``"torch_products"``; all of them without a name.

    Raises:
        TypeError: a name is not a string.
        ValueError: an unknown name.

    Example:
        >>> with fastkron_py.families("tile"):
        ...     y = fastkron_py.kron_matmul(torch.ones(3, 6), [torch.eye(2), torch.eye(3)])
    """
    from fastkron_py.kron.families import BY_NAME

    for name in names:
        if not isinstance(name, str):
            raise type_error("names", "names of families", type_name(name))
        if name not in BY_NAME:
            raise value_error("names", f"some of {', '.join(BY_NAME)}", repr(name))
    token = families_in_force.set(names)
    try:
        yield
    finally:
        families_in_force.reset(token)


class PlannedLaunch(NamedTuple):
    """A launch of a plan; of a backward pass, a group of factors whose gradients one family computes.

    Attributes:
        start: its first factor.
        stop: one past its last factor.
        steps: rows and columns of each step's matrix: a factor, or several that are merged.
        family: whose kernel it is.
        share: of the plan's modelled cost.
        others: for other families, how many times this launch's modelled cost theirs is, or why they do not take its factors.
    """

    start: int
    stop: int
    steps: tuple[tuple[int, int], ...]
    family: str
    share: float
    others: dict[str, float | str]

    def __str__(self) -> str:
        """Return a row of the plan's table."""
        steps = ", ".join([f"{p}" if p == q else f"{p}x{q}" for p, q in self.steps])
        others = ", ".join([f"{name} {value:.2f}x" for name, value in self.others.items() if not isinstance(value, str)])
        return f"{f'{self.start}:{self.stop}':9}{steps:24} {self.family:16}{self.share:5.0%}  {others}".rstrip()


class Plan(NamedTuple):
    """The launches of a product, in the order in which they run. It prints as a table.

    Attributes:
        problem: the product, in words.
        launches: see `PlannedLaunch`.
        moves_to_front: each launch stores its modes ahead of all others; else modes stay in place.
        seconds: modelled, on the device.
        host_seconds: modelled, of the host; None for a backward pass.
    """

    problem: str
    launches: tuple[PlannedLaunch, ...]
    moves_to_front: bool
    seconds: float
    host_seconds: float | None = None

    def __str__(self) -> str:
        """Return the table, and the reasons of families without an offer."""
        how = "modes are moved to the front" if self.moves_to_front else "modes stay in place"
        head = f"{'factors':9}{'steps':24} {'family':16}share  other families, by modelled cost"
        reasons = [f"{name} {why}" for launch in self.launches for name, why in launch.others.items() if isinstance(why, str)]
        host = "" if self.host_seconds is None else f", host {1e6 * self.host_seconds:.0f} us"
        return "\n".join(
            [f"{self.problem}; {how}; device {1e6 * self.seconds:.0f} us{host}", head, *map(str, self.launches), *dict.fromkeys(reasons)]
        )


def kron_plan(
    x: Tensor | Sequence[int],
    factors: Sequence[Tensor | Sequence[int]],
    *,
    gradients: bool = False,
    left: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Return the plan of `kron_matmul` (left: `kron_matmul_left`): which launches multiply which factors, and what other families offered.

    With gradients it is the plan of the backward pass, for x and all factors: the groups of factors whose gradients are computed together,
    in their order. What multiplies between groups is not listed. Costs are those of the gradients and, of a group in one kernel, of the
    next group's incoming gradient.

    Nothing is multiplied, and no GPU is needed, but Triton. Costs are the modelled seconds that the planner compares: of the device, and of
    the host, unless `host_time` says that these do not count. Tuned choices are not looked up.

    Args:
        x: ``[*batch, M, K]`` (left: ``[*batch, K, M]``), or its shape.
        factors: each ``[*batch, P_i, Q_i]``, or its shape.
        gradients: whether the plan is that of the backward pass.
        left: the factors stand on the left of x.
        device: the GPU; its name ("A100", "H100", "H200", "B200", "RTX 3090", "RTX 4090", "RTX 5090", "MI300X") for a plan without one;
            by default x's device, or for shapes the current GPU.
        dtype: of shapes; torch's default if None.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes that do not fit, an empty product, or a device on which torch multiplies.

    Example:
        >>> plan = fastkron_py.kron_plan((1024, 4096), [(64, 64), (64, 64)], device="H100")
        >>> [launch.family for launch in plan.launches]
        ['fragments']
    """
    given = [_on_meta("x", x, dtype), *[_on_meta(f"factors[{i}]", f, dtype) for i, f in enumerate(factor_list(factors))]]
    check_tensors(given[0], given[1:], None, ("x", "factors", "z"))
    shape = check_problem(given[0], given[1:], 0, None, left, ("x", "factors", "z"))
    if math.prod(shape) == 0 or given[0].numel() == 0:
        raise value_error("x", "a product that is not empty", f"a result of shape {shape}")
    found = _device(x, device)
    return _plan_of_gradients(given[0], given[1:], left, *found) if gradients else _plan(given[0], given[1:], left, *found)


def _on_meta(name: str, given: Any, dtype: torch.dtype | None) -> Tensor:
    """A tensor without memory, of a tensor's strides or of a shape."""
    if isinstance(given, Tensor):
        if dtype is not None:
            raise type_error("dtype", f"None, since {name} is a tensor and has its own", dtype)
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise type_error(name, "a torch tensor, or a shape", type_name(given))
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise type_error("dtype", f"a dtype among {dtype_names(DTYPES)}", dtype)
    return torch.empty([check_integer(name, n, "a torch tensor, or a shape") for n in given], dtype=dtype, device="meta")


def _device(x: Any, device: Any) -> tuple[torch.device, str]:
    """The device that is planned for, and its name."""
    if isinstance(device, str) and device in NAMED:
        return absent(device), device
    if device is None:
        device = x.device if isinstance(x, Tensor) else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise value_error("device", f"a GPU, or one of {', '.join(NAMED)}", repr(device)) from None
    obstacle = "nothing is multiplied there" if found.type == "meta" else triton_obstacle(torch.empty(0, device=found))
    if obstacle is not None:
        raise value_error("device", f"a GPU, or the name of one ({', '.join(NAMED)})", f"{found}, where torch multiplies: {obstacle}")
    return found, str(found)


def _problem(x: Tensor, factors: Sequence[Tensor], left: bool, device_name: str) -> tuple[Canonical, str]:
    """The product in canonical form, and in words."""
    x = x.unsqueeze(-1 if left else 0) if x.ndim == 1 else x
    problem = canonical(x, factors, left)
    sizes = " x ".join([f"{f.shape[1]}" if f.shape[1] == f.shape[2] else f"({f.shape[1]}x{f.shape[2]})" for f in problem.factors])
    text = f"x {list(x.shape)} {'on the right of' if left else 'times'} {sizes}, {str(x.dtype).removeprefix('torch.')}, {device_name}"
    return problem, text


def _plan_of_gradients(x: Tensor, factors: Sequence[Tensor], left: bool, device: torch.device, device_name: str) -> Plan:
    from fastkron_py.kron.families import gradient_offers
    from fastkron_py.kron.gradients import add_backward, cut_of
    from fastkron_py.kron.plan.gradients import bids

    problem, text = _problem(x, factors, left, device_name)
    groups, rows, _, columns = problem.x.shape
    result = (groups, rows, math.prod([f.shape[2] for f in problem.factors]), columns)
    cut = cut_of(problem, device)
    passes: Sequence[tuple[slice, Shape, Tensor]] = [(slice(None), result, problem.x)]
    if cut is not None:
        pairs = zip(cut.spans, (cut.first, cut.second), strict=True)
        passes = [(span, made.result_shape, x.new_empty(made.shape)) for span, made in pairs][::-1]
    found: list[tuple[int, GroupProblem]] = []
    for part, shape, operand in passes:
        build = Builder([x.new_empty(shape), operand, *problem.factors[part]])
        build.device = device
        dy, operand, *mine = build.inputs
        taken: list[tuple[int, GroupProblem]] = []
        with families():
            add_backward(build, dy, operand, mine, [True] * (1 + len(mine)), resolved(None), PLAIN, x.dtype, taken=taken)
        found += [((part.start or 0) + start, group) for start, group in taken]
    launches = list[PlannedLaunch]()
    for start, group in found:
        asked = group.swapped() if group.is_transposed else group
        best = bids(asked)[0]
        own, steps = best.seconds, tuple([step for step in zip(*group.step_sizes, strict=True)][group.split == 0 :])
        others = _others(gradient_offers(asked), best.family, own)
        launches.append(PlannedLaunch(start, start + len(group.factor_shapes), steps, best.family, own, others))
    total = sum([launch.share for launch in launches])
    shares = tuple([launch._replace(share=launch.share / total) for launch in launches])
    return Plan(f"backward pass of {text}", shares, False, total)


def _plan(x: Tensor, factors: Sequence[Tensor], left: bool, device: torch.device, device_name: str) -> Plan:
    from fastkron_py.kron import forward
    from fastkron_py.kron.planner import choose
    from fastkron_py.kron.problem import Host

    given, text = _problem(x, factors, left, device_name)
    x4 = given.x if forward.is_mergeable(given.x) else given.x.contiguous()
    problem = forward.with_whole_rows(forward.multiply_problem(x4, given.factors, device, resolved(None)), lambda: True)
    made = choose(problem)
    priced = [_priced(problem, made, number) for number in range(len(made.launches))]
    total = sum([seconds for seconds, _ in priced])
    rows = [
        PlannedLaunch(launch.start, launch.stop, tuple([(s.p, s.q) for s in launch.steps]), launch.family, own / total, others)
        for launch, (own, others) in zip(made.launches, priced, strict=True)
    ]
    moves = made.transposed and any([place.before > 1 for place in made.places])
    return Plan(text, tuple(rows), moves, made.seconds, Host.of(problem.gpu).call + made.host)


def _priced(problem: Problem, made: planner.Plan, number: int) -> tuple[float, dict[str, float | str]]:
    """The modelled seconds of a launch where it stands, and how many times that of other families is, or their reasons for none."""
    from fastkron_py.kron.families import offers
    from fastkron_py.kron.planner import placed_segment

    launch, is_final = made.launches[number], number + 1 == len(made.launches)
    segment = placed_segment(problem, launch.start, launch.stop, made.places[number], not made.transposed, is_final)
    found = offers(segment)
    bids = [bid for bid in found[launch.family] if not isinstance(bid, str)]
    own = min([bid.seconds for bid in bids if bid.launch.shifted(launch.start) == launch])
    return own, _others(found, launch.family, own)


def _others(found: Mapping[str, list[Any] | str], family: str, own: float) -> dict[str, float | str]:
    """What `_priced` says of the other families, of all offers."""
    best = {name: made if isinstance(made, str) else min([offer.seconds for offer in made]) / own for name, made in found.items()}
    return {name: value for name, value in best.items() if name != family}
