"""The dtypes of the tests of operators."""

import pytest
import torch


@pytest.fixture(params=[torch.float64, torch.complex128], ids=["real", "complex"])
def dtype(request):
    return request.param
