"""Parameters that have no memory: on device "meta", and of `FakeTensorMode`."""

from __future__ import annotations

from torch import Tensor


def has_memory(t: Tensor) -> bool:
    """Whether numbers can be written to a tensor and read again; initial values are for those alone."""
    from torch._subclasses.fake_tensor import is_fake

    return not (t.is_meta or is_fake(t))
