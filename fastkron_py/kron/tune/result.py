"""The progress and the result of tuning."""

from __future__ import annotations

from dataclasses import dataclass

from fastkron_py.kron.tune.choice import Choice, Problem
from fastkron_py.kron.tune.entry import Entry


@dataclass(frozen=True)
class TuningProgress:
    """How far a search is.

    Attributes:
        problem: the tuned problem.
        trials: choices tried so far.
        dropped: how many of them failed.
        seconds: spent so far.
        budget: seconds to spend.
        default_seconds: time of the closed form's choice.
        best_seconds: shortest time so far.
    """

    problem: Problem
    trials: int
    dropped: int
    seconds: float
    budget: float
    default_seconds: float
    best_seconds: float


@dataclass(frozen=True)
class TuningResult:
    """The result of a search.

    Attributes:
        problem: that was tuned.
        default_seconds: time of the closed form's choice.
        best_seconds: time of the best choice, measured alternately with the closed form's.
        choice: the best choice, or None where nothing was clearly faster than the closed form.
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
        """How many times as fast as the closed form the best choice is."""
        return self.default_seconds / self.best_seconds

    @property
    def entry(self) -> Entry:
        """The result as an entry of a table."""
        return Entry(self.problem, self.choice, self.default_seconds * 1e6, self.best_seconds * 1e6)
