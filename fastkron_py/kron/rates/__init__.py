"""What was measured of the families of kernels, a file for each GPU: prices of quantities, and figures of formulas and of limits.

The modelled time of a launch is the sum of its quantities, each times its price (`priced`). Families state the quantities, in seconds of
the GPU's own bandwidth and rates (`runtime.gpu`), so that the same prices serve a GPU that was not timed. The host, choices of tiles, and
sizes beyond which another kernel is faster have figures, each family's in a record of its own (`figures`). A file may name another one as
``"like"``, and hold what differs alone.
"""

from __future__ import annotations

import json
from functools import lru_cache
from operator import itemgetter, mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fastkron_py.runtime.gpu import GPU

_OVERLAP: Final = 4  # power of the sum of two times that overlap in part
_R = TypeVar("_R")


def figures(kind: Callable[..., _R], section: str, gpu: GPU) -> _R:
    """Return a section of a GPU's file as a record, whose fields are its figures; those of several numbers map each to its own.

    Args:
        kind: the type of the record.
        section: a family, "host" or "memory".
        gpu: whose file it is.

    Raises:
        TypeError: the file has other figures than the record.
    """
    found: _R = _record(kind, section, gpu.rates)
    return found


def priced(family: str, gpu: GPU, itemsize: int, quantities: Mapping[str, float]) -> float:
    """Return the modelled seconds of a launch: the sum of its quantities, each times its price, which `benchmarks.kron.calibrate` fits.

    Args:
        family: a section of the file's prices.
        gpu: whose file it is.
        itemsize: bytes of a real number.
        quantities: of the launch, in seconds, by name; one without a price costs nothing. "streamed" is the least that a launch takes.
    """
    take, prices = _prices(gpu.rates)[family, itemsize]
    *_, least = found = take(quantities)
    return float(at_least(sum(map(mul, prices, found)), least))


def at_least(seconds: Any, least: Any) -> Any:
    """Return the longer of two times, and somewhat more where they are about equal: what memory and a kernel take overlaps in part.

    It grows with both, so that of two launches that memory bounds the one with less work stays the faster one.
    """
    return (seconds**_OVERLAP + least**_OVERLAP) ** (1 / _OVERLAP)


@lru_cache
def _prices(file: str) -> dict[tuple[str, int], tuple[Callable[[Mapping[str, float]], tuple[float, ...]], tuple[float, ...]]]:
    """What takes the quantities that have prices, and then "streamed"; and these prices. By family and bytes of a real number."""
    sizes = [(family, itemsize, of) for family, by_size in _read(file)["prices"].items() for itemsize, of in by_size.items()]
    return {(family, itemsize): (itemgetter(*of, "streamed"), tuple(of.values())) for family, itemsize, of in sizes}


@lru_cache
def _record(kind: Callable[..., _R], section: str, file: str) -> _R:
    return kind(**_read(file)[section])


@lru_cache
def _read(file: str) -> dict[str, Any]:
    """A file's sections, with those of the file that it is like; numbers as names are numbers."""
    text = Path(__file__).with_name(f"{file}.json").read_text(encoding="utf-8")
    made: dict[str, Any] = json.loads(
        text, object_hook=lambda of: {int(name) if name.isdecimal() else name: value for name, value in of.items()}
    )
    like = made.pop("like", None)
    return made if like is None else _over(_read(like), made)


def _over(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old values with the new ones in their places."""
    return old | {name: _over(old[name], value) if isinstance(value, dict) and name in old else value for name, value in new.items()}
