"""What a cached rational call launches, on a machine without a GPU: the same kernels on the same arguments as the first call."""

from __future__ import annotations

import pytest
from launched_without_gpu import launched

pytestmark = pytest.mark.xdist_group("launch_without_gpu")


@pytest.mark.parametrize("version", ["3.10.0", *[pytest.param(version, marks=pytest.mark.full) for version in ("3.9.0", "4.0.0")]])
def test_the_same_launches(version: str) -> None:
    """Forward and backward: on the same operands, while results and partial sums lie elsewhere.

    Whatever version Triton says it is, cached calls launch by addresses alone while kernels are launched as this library knows it. If
    they are not, they go through Triton, and one warning says so.
    """
    found, errors = launched("launch_rational_without_gpu.py", version)
    ways = ("first", "cached", "another launcher, first", "another launcher")
    for way in ways:
        assert len(found[way]) == 3
        for launch, like in zip(found[way], found["first"], strict=True):
            assert [launch[key] for key in ("grid", "stream", "names")] == [like[key] for key in ("grid", "stream", "names")]
            for name, given, wanted in zip(like["names"], launch["arguments"], like["arguments"], strict=True):
                if name.endswith("_ptr"):
                    assert (given in found["operands"]) == (wanted in found["operands"]), name
                    assert given == wanted or given not in found["operands"], name
                else:
                    assert given == wanted, name
        _, backward, sums = found[way]
        partial = [launch["arguments"][launch["names"].index("partial_ptr")] for launch in (backward, sums)]
        assert partial[0] == partial[1]
    by_tensors = [any(launch["tensors"] for launch in found[way]) for way in ways]
    assert by_tensors == [True, False, True, True]
    assert errors.count(f"kernels are launched by the slower front door of Triton {version}") == 1, errors
