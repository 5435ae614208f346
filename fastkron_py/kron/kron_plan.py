"""The plan of a product, to be read, printed and forced: `kron_plan` and `families`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron.canonical import canonical
from fastkron_py.kron.checks import check_problem, check_tensors, factor_list
from fastkron_py.runtime.backend import families_in_force, triton_obstacle
from fastkron_py.runtime.checks import DTYPES, check_integer
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.gpu import NAMED

if TYPE_CHECKING:
    from fastkron_py.kron.plan.steps import Launch
    from fastkron_py.kron.problem import Candidate, Problem


@contextlib.contextmanager
def families(*names: str) -> Iterator[None]:
    """Multiply by these families of kernels only, inside a ``with`` block, in this thread (and asyncio task).

    It is for comparisons: the default takes what is fastest. It holds for products on one GPU by Triton's backend, but not for gradients,
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
    """A launch of a plan.

    Attributes:
        start: its first factor.
        stop: one past its last factor.
        steps: rows and columns of each step's matrix: a factor, or several that are multiplied out.
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
        problem: what is multiplied, in words.
        launches: see `PlannedLaunch`.
        moves_to_front: each launch stores its modes ahead of all others; else modes stay in place.
    """

    problem: str
    launches: tuple[PlannedLaunch, ...]
    moves_to_front: bool

    def __str__(self) -> str:
        """Return the table, and what was in the way of families without an offer."""
        how = "modes are moved to the front" if self.moves_to_front else "modes stay in place"
        head = f"{'factors':9}{'steps':24} {'family':16}share  other families, by modelled cost"
        reasons = [f"{name} {why}" for launch in self.launches for name, why in launch.others.items() if isinstance(why, str)]
        return "\n".join([f"{self.problem}; {how}", head, *map(str, self.launches), *dict.fromkeys(reasons)])


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

    Nothing is multiplied, and no GPU is needed, but Triton. The modelled costs are what the planner compares: they are in proportion to
    time for one problem, but are no seconds. A launch of one mode may pass to Hopper's kernel for large factors, or to torch's products,
    after it is planned; its cost is then the least of those of the other families. Tuned choices are not looked up.

    Args:
        x: ``[*batch, M, K]`` (left: ``[*batch, K, M]``), or its shape.
        factors: each ``[*batch, P_i, Q_i]``, or its shape.
        gradients: of the backward pass; not there yet.
        left: the factors stand on the left of x.
        device: the GPU; its name ("A100", "H100", "H200", "B200", "RTX 3090", "RTX 4090", "RTX 5090", "MI300X") for a plan without one;
            by default x's device, or for shapes the current GPU.
        dtype: of shapes; torch's default if None.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes that do not chain, an empty product, a device on which torch multiplies, or `gradients`.

    Example:
        >>> plan = fastkron_py.kron_plan((1024, 4096), [(64, 64), (64, 64)], device="H100")
        >>> [launch.family for launch in plan.launches]
        ['fragments']
    """
    if gradients:
        raise value_error("gradients", "False: plans of backward passes cannot be printed yet", gradients)
    given = [_on_meta("x", x, dtype), *[_on_meta(f"factors[{i}]", f, dtype) for i, f in enumerate(factor_list(factors))]]
    check_tensors(given[0], given[1:], None, ("x", "factors", "z"))
    shape = check_problem(given[0], given[1:], 0, None, left, ("x", "factors", "z"))
    if math.prod(shape) == 0 or given[0].numel() == 0:
        raise value_error("x", "a product that is not empty", f"a result of shape {shape}")
    return _plan(given[0], given[1:], left, *_device(x, device))


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
        raise type_error("dtype", "a dtype among " + ", ".join(str(d).removeprefix("torch.") for d in DTYPES), dtype)
    return torch.empty([check_integer(name, n, "a torch tensor, or a shape") for n in given], dtype=dtype, device="meta")


def _device(x: Any, device: Any) -> tuple[torch.device, str]:
    """The device that is planned for, and its name."""
    if isinstance(device, str) and device in NAMED:
        from fastkron_py.runtime.device import absent

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


def _plan(x: Tensor, factors: Sequence[Tensor], left: bool, device: torch.device, device_name: str) -> Plan:
    from fastkron_py.kron import forward
    from fastkron_py.kron.planner import choose
    from fastkron_py.runtime.precision import resolved

    x = x.unsqueeze(-1 if left else 0) if x.ndim == 1 else x
    canonical_ = canonical(x, factors, left)
    x4 = canonical_.x if forward.is_mergeable(canonical_.x) else canonical_.x.contiguous()
    problem = forward.with_whole_rows(forward.multiply_problem(x4, canonical_.factors, device, resolved(None)), lambda: True)
    launches, places, transposed = choose(problem)
    sizes = " x ".join([f"{p}" if p == q else f"({p}x{q})" for p, q in problem.shapes])
    text = f"x {list(x.shape)} {'on the right of' if left else 'times'} {sizes}, {str(x.dtype).removeprefix('torch.')}, {device_name}"
    priced = [_priced(problem, launch) for launch in launches]
    total = sum([cost for cost, _ in priced])
    rows = [_row(launch, cost / total, others) for launch, (cost, others) in zip(launches, priced, strict=True)]
    return Plan(text, tuple(rows), transposed and any([place.before > 1 for place in places]))


def _row(launch: Launch, share: float, others: dict[str, float | str]) -> PlannedLaunch:
    return PlannedLaunch(launch.start, launch.stop, tuple([(s.p, s.q) for s in launch.steps]), launch.family, share, others)


def _priced(problem: Problem, launch: Launch) -> tuple[float, dict[str, float | str]]:
    """The modelled cost of a launch, and how many times that of other families is, or what is in their way."""
    from fastkron_py.kron.families import offers
    from fastkron_py.kron.planner import segment_of, widths_of

    in_place = (False, True) if problem.half else (False,)
    found = [offers(segment_of(problem, launch.start, launch.stop, widths_of(problem), placed)) for placed in in_place]
    costs = {name: [cost for made in found for cost, _ in _offered(made[name])] for name in found[-1]}
    own = [cost for made in found for cost, other in _offered(made[launch.family]) if other.shifted(launch.start) == launch]
    cost = min(own or [cost for made in costs.values() for cost in made]) + problem.launch_cost
    others = {name: (min(costs[name]) + problem.launch_cost) / cost if costs[name] else str(offer) for name, offer in found[-1].items()}
    return cost, {name: value for name, value in others.items() if name != launch.family}


def _offered(offer: list[Candidate] | str) -> list[Candidate]:
    return [] if isinstance(offer, str) else offer
