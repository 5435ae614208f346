"""The families of kernels: the modules of this package, each of which has a name.

A family makes offers for neighbouring factors, which `planner` chooses from, and launches those that are chosen. It is plain Python: its
kernels, and what launches them, are imported by the functions that need them. A file that is put here is a family, and no other file
lists it: docs/how_it_works/add_a_family.md adds one.
"""

from __future__ import annotations

import pkgutil
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from fastkron_py.kron.plan.steps import Launch
from fastkron_py.kron.problem import GradientOffer, LaunchProblem, Offer, Problem, Segment
from fastkron_py.runtime.kernels import LaunchConfig

if TYPE_CHECKING:
    import torch

    from fastkron_py.kron.gradient_problem import GroupProblem
    from fastkron_py.runtime.gpu import GPU


class Family(Protocol):
    """A family of kernels. It may also have ``refusal(problem)``, why there is no offer at all, and its own `problem.add_launch`, ``add``.

    Attributes:
        name: of the family, by which a `Launch` names it.
        order: of offers of about equal seconds, that of the family with the lower number is taken; with the same one, the faster.
        moves_to_front: whether its launches may store their modes ahead of all others; else modes stay in place.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def order(self) -> int: ...  # noqa: D102

    @property
    def moves_to_front(self) -> bool: ...  # noqa: D102

    def offers(self, segment: Segment) -> list[Offer] | str:
        """Return launches of all of a segment, each with its modelled seconds, or the reason why there are none."""

    def launch_configs(self, problem: LaunchProblem) -> tuple[LaunchConfig, ...]:
        """Return the configurations of a launch in order of preference."""


_GRADIENTS: Final = "_gradients"  # ends the names of modules that backward passes alone import
_names = [module.name for module in pkgutil.iter_modules(__path__)]
_found: list[Any] = [import_module(f"{__name__}.{module}") for module in _names if not module.endswith(_GRADIENTS)]

FAMILIES: Final[tuple[Family, ...]] = tuple(sorted(_found, key=lambda family: family.order))
BY_NAME: Final = {family.name: family for family in FAMILIES}


class GradientFamily(Protocol):
    """A family of kernels that compute gradients. Its module is imported by backward passes alone, where products need none of it."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def gradient_order(self) -> int: ...  # noqa: D102

    def gradient_offers(self, problem: GroupProblem) -> list[GradientOffer] | str:
        """Return launches of a group's gradients and, of a fused group, its dx, each with its modelled seconds; or why there are none."""


@lru_cache(maxsize=1)
def gradient_families() -> tuple[GradientFamily, ...]:
    """Return the families with gradients, in their order; of offers of about equal seconds, that of the earlier one is taken."""
    apart: list[Any] = [import_module(f"{__name__}.{module}") for module in _names if module.endswith(_GRADIENTS)]
    found = [family for family in (*_found, *apart) if hasattr(family, "gradient_offers")]
    return tuple(sorted(found, key=lambda family: family.gradient_order))


def gradient_offers(problem: GroupProblem) -> dict[str, list[GradientOffer] | str]:
    """Return the offers of all families for a group, by name, or their reasons for none."""
    return {family.name: family.gradient_offers(problem) for family in gradient_families()}


def family_of(launch: Launch) -> Family:
    """Return the family of a launch."""
    return BY_NAME[launch.family]


def offers(segment: Segment) -> dict[str, list[Offer] | str]:
    """Return the offers of the families that may make some, by name, or their reasons for none."""
    problem = segment.problem
    return {family.name: refusal(family, problem) or family.offers(segment) for family in asked(problem)}


def refusal(family: Any, problem: Problem) -> str | None:
    """Return why a family has no offer at all: a GPU, a dtype, or where x lies."""
    reason: str | None = family.refusal(problem) if hasattr(family, "refusal") else None
    return reason


def asked(problem: Problem) -> list[Family]:
    """Return the families that may multiply."""
    return [family for family in FAMILIES if problem.allows(family.name)]


def missing(dtype: torch.dtype, gpu: GPU) -> tuple[str, ...]:
    """Return the families that would multiply this type on a GPU, but whose kernels this Triton cannot compile."""
    in_gluon = [family for family in _found if hasattr(family, "kernel")]
    return tuple([family.name for family in in_gluon if family.takes(dtype, gpu) and family.kernel() is None])


def most_elements(problem: Problem) -> int:
    """Return the real numbers of the largest tile of any family: no one has offers for segments that are wider on one side at least."""
    most: int = max([family.most_elements(problem) for family in _found if hasattr(family, "most_elements")])
    return most
