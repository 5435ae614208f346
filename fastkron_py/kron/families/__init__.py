"""The families of kernels, each a module, by name.

A family makes offers for neighbouring factors, which `planner` chooses from, and launches those that are chosen. It is plain Python: its
kernels, and what launches them, are imported by the functions that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from fastkron_py.kron.families import butterfly, fragments, narrow, slice_pair, tile, torch_products, wgmma, whole_row
from fastkron_py.kron.plan.steps import Launch
from fastkron_py.kron.problem import Candidate, LaunchProblem, Problem, Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from fastkron_py.kron.canonical import Scale
    from fastkron_py.runtime.builder import Builder
    from fastkron_py.runtime.gpu import GPU
    from fastkron_py.runtime.launch import LaunchConfig


class Family(Protocol):
    """A family of kernels.

    Attributes:
        name: of the family, by which a `Launch` names it.
        moves_to_front: whether its launches may store their modes ahead of all others; else modes stay in place.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def moves_to_front(self) -> bool: ...  # noqa: D102

    def refusal(self, problem: Problem) -> str | None:
        """Return what is in the way of any offer: a GPU, a dtype, or where x lies."""

    def candidates(self, segment: Segment) -> list[Candidate] | str:
        """Return launches of all of a segment, each with its modelled cost, or what is in the way."""

    def launch_configs(self, problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
        """Return the configurations of a launch in order of preference: a tuned one, if there is one, then the closed form's."""

    def add(
        self, build: Builder, problem: LaunchProblem, x: Tensor, factors: Sequence[Tensor], z: Tensor | None, y: Tensor | None, scale: Scale
    ) -> Tensor:
        """Add a launch to a program; see `problem.add_launch`."""


class Tunable(Family, Protocol):
    """A family with configurations to choose from: dataclasses of int and bool.

    Attributes:
        config_types: the types of its configurations, which differ in their fields' names.
    """

    @property
    def config_types(self) -> tuple[type, ...]: ...  # noqa: D102

    def choices(self, problem: LaunchProblem) -> tuple[Any, ...]:
        """Return a handful of valid configurations, the closed form's first."""

    def obstacle(self, launch: Launch, config: Any, itemsize: int) -> str | None:
        """Return why a configuration is not valid for a launch that the family offers, or None."""


FAMILIES: Final[tuple[Family, ...]] = (narrow, tile, slice_pair, whole_row, butterfly, fragments, wgmma, torch_products)
"""Of offers of equal cost, that of the earlier family is taken."""

BY_NAME: Final = {family.name: family for family in FAMILIES}
TUNABLE: Final[dict[str, Tunable]] = {family.name: family for family in (tile, fragments)}


def family_of(launch: Launch) -> Family:
    """Return the family of a launch."""
    return BY_NAME[launch.family]


def offers(segment: Segment) -> dict[str, list[Candidate] | str]:
    """Return the offers of the families that may make some, by name, or what is in their way."""
    problem = segment.problem
    return {family.name: family.refusal(problem) or family.candidates(segment) for family in asked(problem)}


def asked(problem: Problem) -> list[Family]:
    """Return the families that may multiply."""
    return [family for family in FAMILIES if problem.allows(family.name)]


def missing(dtype: torch.dtype, gpu: GPU) -> tuple[str, ...]:
    """Return the families that would multiply this type on a GPU, but whose kernels this Triton cannot compile."""
    in_gluon = (fragments, wgmma, whole_row, butterfly)
    return tuple([family.name for family in in_gluon if family.takes(dtype, gpu) and family.kernel() is None])


def most_elements(problem: Problem) -> int:
    """Return the real numbers of the largest tile of any family: no one has offers for segments that are wider on one side at least."""
    return max(tile.CHAIN_TILE[problem.itemsize], fragments.WARP_TILE if fragments.takes(problem.dtype, problem.gpu) else 0)
