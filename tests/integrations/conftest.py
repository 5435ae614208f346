"""What tests of adapters share: other libraries' code under the suite's poisoned memory, and a device of the operators' choice."""

from __future__ import annotations

import pytest
import torch
from torchvision_import import import_torchvision

import_torchvision()


@pytest.fixture(autouse=True)
def lenient(poison: None) -> None:
    """Poisoned memory, without torch's refusal of what has no deterministic form: linear_operator calls such functions on GPUs."""
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and a GPU where there is one."""
    return torch.device(request.param)
