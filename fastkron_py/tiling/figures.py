"""What was measured of the kernels of linear layers, KAN layers, rational functions and adapters, and of products on CPUs.

`figures.json` has a section for each planner, whose key "fitted" names the machine and the benchmarks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_SECTIONS: Final = json.loads(Path(__file__).with_name("figures.json").read_text(encoding="utf-8"))


def figures(section: str) -> dict[str, Any]:
    """The constants of a section, by name."""
    return {name: value for name, value in _SECTIONS[section].items() if name != "fitted"}
