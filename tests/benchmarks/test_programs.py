"""Programs of drawn problems on a GPU that is not there."""

from __future__ import annotations

import torch

from benchmarks.kron.programs import pretending, program_of
from fastkron_py.runtime import device as devices

PAIR = {"M": 300, "P": [64, 64], "Q": [64, 64], "dtype": "bfloat16", "kind": "forward", "left": False}
WIDE = {"M": 9, "P": [14, 212], "Q": [2, 536], "dtype": "float16", "kind": "backward", "left": True}


def names(parameters: dict[str, object], part: str) -> list[str]:
    with pretending():
        return [step[0] for step in program_of(parameters)[part]]


def test_programs_are_those_of_the_gpu() -> None:
    before = devices.gpu_of
    assert names(PAIR, "forward") == ["_row_pair_fwd_kernel"]
    assert names(WIDE, "forward")[0] == "_narrow_multiply_fwd_kernel"
    assert len(names(WIDE, "backward")) > 2
    assert devices.gpu_of is before  # and nothing stays
    assert not devices.gpu_of(torch.device("cpu")).has_wgmma
