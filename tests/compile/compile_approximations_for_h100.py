"""Compile a loop whose `quick_minus_signed` replaces one of its operands; the registers of its instructions, a line of JSON each.

Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

import json
import re

import torch
import triton
import triton.language as tl
from compile_for_h100 import H100
from triton.runtime import driver

from fastkron_py.rational.denominators.device import quick_minus_signed


@triton.jit
def _loop(ptr, count, REPLACED: tl.constexpr):
    i = tl.arange(0, 128)
    c = tl.load(ptr + i)
    f = tl.load(ptr + 128 + i)
    g = tl.load(ptr + 256 + i)
    x = tl.load(ptr + 384 + i)
    for _ in range(count):
        result = quick_minus_signed(c, f, g, x)
        if REPLACED == "c":
            c = result
        elif REPLACED == "f":
            f = result
        elif REPLACED == "g":
            g = result
        else:
            x = result
    tl.store(ptr + i, c + f + g + x)


def main() -> None:
    driver.set_active(H100())
    for replaced in "cfgx":
        ptx = _loop.warmup(torch.empty(512), 8, replaced, grid=(1,), enable_fp_fusion=True).asm["ptx"]
        moved, start = re.search(r"mov\.b32 (%r\d+), (%r\d+); @p", ptx).groups()  # type: ignore[union-attr]
        result, factor, addend = re.search(r"fma\.rn\.f32 (%r\d+), s, (%r\d+), (%r\d+); }", ptx).groups()  # type: ignore[union-attr]
        line = {"replaced": replaced, "moved": moved, "start": start, "result": result, "factor": factor, "addend": addend}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
