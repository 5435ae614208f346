"""CPUs that differ in their fastest products: AMD's by generation, as Linux tells. Plain Python."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Final

_ZEN5: Final = 26  # family of Zen 5, or later
_ZEN4: Final = 25  # of Zen 3, too, which has no AVX-512


@lru_cache(maxsize=1)
def zen() -> int:
    """AMD's generation, 4 or 5 (or later); 0 for other CPUs, and elsewhere than on Linux."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            fields = [line.partition(":") for line in itertools.takewhile(str.strip, lines)]
    except OSError:
        return 0
    about = {name.strip(): value.strip() for name, _, value in fields}
    family = about.get("cpu family", "")
    if about.get("vendor_id") != "AuthenticAMD" or not family.isdecimal():
        return 0
    if int(family) >= _ZEN5:
        return 5
    return 4 if int(family) == _ZEN4 and "avx512f" in about.get("flags", "").split() else 0
