"""Empties the library's caches of calls, programs and constants, so that no test rests on what an earlier one left there.

Helper of conftest: no tests here. Functions under `functools.lru_cache` are found in the modules that are imported by then. Kept are plans,
which are plain values of plain arguments and take most of the time, and what is found out about the machine once.
"""

from __future__ import annotations

import sys
from functools import _lru_cache_wrapper

from fastkron_py.runtime.call_cache import CACHE

PLAIN = (
    ".plan",
    ".config",
    "_config",
    ".cpu_costs",
    ".torch_internals",
    ".runtime.device",
    ".runtime.gpu",
    ".runtime.backend",
    ".runtime.eager",
)
"""Parts of the names of modules whose caches hold no tensor and depend on no mode."""

_seen = 0  # modules when they were last looked through
_scanned: set[str] = set()
_caches: list[_lru_cache_wrapper] = []


def empty() -> None:
    """Empty them all."""
    global _seen
    CACHE.forget()
    if len(sys.modules) != _seen:
        _seen = len(sys.modules)
        _scan()
    for cache in _caches:
        cache.cache_clear()


def _scan() -> None:
    """Find the caches of modules that were not imported before."""
    for name in [n for n in sys.modules if n.startswith("fastkron_py.") and n not in _scanned]:
        _scanned.add(name)
        if not any(part in name for part in PLAIN):
            members = vars(sys.modules[name]).values()
            _caches.extend(m for m in members if isinstance(m, _lru_cache_wrapper) and m.__module__ == name)
