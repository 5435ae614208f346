"""What was measured of the families of kernels, a file for each GPU: prices of quantities, and figures of formulas.

The modelled time of a launch is the sum of its quantities, each times its price (`priced`). Families state the quantities, in seconds of
the GPU's own bandwidth and rates (`runtime.gpu`), so that the same prices serve a GPU that was not timed. The host and choices of tiles
have formulas, whose constants are figures (`figure`). A file may name another one as ``"like"``, and hold what
differs alone.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastkron_py.runtime.gpu import GPU

_OVERLAP: Final = 4  # power of the sum of two times that overlap in part


def figure(family: str, gpu: GPU, name: str, *keys: object) -> float:
    """Return a figure of a family: seconds, a share of a rate, or a multiple of what memory takes.

    Args:
        family: a section of the file.
        gpu: whose file it is.
        name: of the figure.
        keys: which one, of a figure that depends on bytes of an element or on anything else.

    Raises:
        KeyError: the file has no such figure.
    """
    return _figures(gpu.rates)[(family, name, *map(str, keys))]


def priced(family: str, gpu: GPU, itemsize: int, quantities: Mapping[str, float]) -> float:
    """Return the modelled seconds of a launch: the sum of its quantities, each times its price, which `benchmarks.kron.calibrate` fits.

    Args:
        family: a section of the file.
        gpu: whose file it is.
        itemsize: bytes of a real number.
        quantities: of the launch, in seconds, by name; one without a price costs nothing. "streamed" is the least that a launch takes.
    """
    prices = _prices(gpu.rates)[family, itemsize]
    return float(at_least(sum([price * quantities[name] for name, price in prices if name in quantities]), quantities["streamed"]))


def at_least(seconds: Any, least: Any) -> Any:
    """Return the longer of two times, and somewhat more where they are about equal: what memory and a kernel take overlaps in part.

    It grows with both, so that of two launches that memory bounds the one with less work stays the faster one.
    """
    return (seconds**_OVERLAP + least**_OVERLAP) ** (1 / _OVERLAP)


@lru_cache
def _prices(file: str) -> dict[tuple[str, int], tuple[tuple[str, float], ...]]:
    """Names and prices of quantities, by family and bytes of a real number."""
    found = dict[tuple[str, int], list[tuple[str, float]]]()
    for names, value in _figures(file).items():
        if names[0] == "prices":
            found.setdefault((names[1], int(names[2])), []).append((names[3], value))
    return {key: tuple(prices) for key, prices in found.items()}


@lru_cache
def _figures(file: str) -> dict[tuple[str, ...], float]:
    """The figures of a file, and of those that it is like, by section, name and keys."""
    made = json.loads(resources.files(__name__).joinpath(f"{file}.json").read_text(encoding="utf-8"))
    like = made.pop("like", None)
    return {**({} if like is None else _figures(like)), **_flat((), made)}


def _flat(names: tuple[str, ...], value: Any) -> dict[tuple[str, ...], float]:
    if not isinstance(value, dict):
        return {names: float(value)}
    return {path: number for name, inner in value.items() for path, number in _flat((*names, name), inner).items()}
