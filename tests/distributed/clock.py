"""A clock for `watch` that goes on with each look at who is gone, and stops where it is told to: no machine is too slow for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

from fastkron_py.distributed import watch

STEP = 0.05
"""Seconds of this clock from a look to the next."""


class Clock:
    """Takes the place of the time that the watching thread sees, of this process.

    Args:
        ended: who is gone, in place of what barriers tell.
    """

    def __init__(self, ended: Callable[[], list[int]] = watch.ended_ranks) -> None:
        self.now, self.limit = 0.0, 0.0
        self._ended = ended
        watch.INTERVAL, watch.GRACE = 0.005, 0.3
        watch.time = mock.Mock(monotonic=lambda: self.now)
        watch.ended_ranks = self._look

    def _look(self) -> list[int]:
        if self.now < self.limit:
            self.now += STEP
        return self._ended()

    def run_to(self, limit: float, until: Callable[[], bool] = lambda: False) -> None:
        """Return when the thread has looked so often that this time has come, or when something has happened."""
        self.limit = limit
        while self.now < limit and not until():
            time.sleep(0.001)
