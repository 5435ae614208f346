"""The GEMM main loop by itself: prologues, epilogues, pairs of rows, tiles in parts, and what must not be written."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import triton
import triton.language as tl
from gemm_cases import gemm
from torch import Tensor

from fastkron_py.gated.activations.registry import find_activation
from fastkron_py.gated.kernels import epilogue_gate
from fastkron_py.gated.launches import Params
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.builder import Builder
from fastkron_py.runtime.gpu import INTERPRETER
from fastkron_py.testing import assert_close
from fastkron_py.tiling import gemm_launch
from fastkron_py.tiling.gemm import epilogue_plain
from fastkron_py.tiling.gemm_config import GemmTile
from fastkron_py.tiling.gemm_launch import Gemm

TILES = [GemmTile(16, 32, 16, 4, 2), GemmTile(32, 64, 32, 4, 3, parts=2, group=2), GemmTile(64, 64, 16, 4, 1, parts=4, group=1)]


@pytest.fixture(params=[True, False], ids=["descriptors", "pointers"])
def has_descriptors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to reach memory, as far as the device has them."""
    if not request.param:
        monkeypatch.setattr(devices, "gpu_of", lambda device: replace(INTERPRETER, has_descriptors=False))
    return bool(request.param)


@triton.jit
def _scaled_columns(a, k, K, tensors, PARAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A column's own scale, then a power: what a prologue with parameters does."""
    c = k + tl.arange(0, a.shape[1])
    scale = tl.load(tensors[0] + c, mask=c < K, other=0.0)
    x = a * scale[None, :]
    for _ in tl.static_range(PARAMS[0] - 1):
        x = x * a
    return x


@triton.jit
def _plus_column(t, column, columns, tensors, PARAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    c = column + tl.arange(0, t.shape[1])
    return t * t + tl.load(tensors[1] + c, mask=c < columns, other=0.0)[None, :]


def inner(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A matrix in the middle of a larger one that is all NaN: (the larger one, the matrix)."""
    whole = torch.full((rows + 2, columns + 16), torch.nan, dtype=dtype, device=device)
    return whole, whole[1:-1, 8:-8]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", [(37, 72, 40), (70, 33, 19)], ids=str)
def test_linear_layer(tile: GemmTile, shape: tuple[int, int, int], has_descriptors: bool, device: torch.device) -> None:
    m, n, k = shape
    x, weight, bias = torch.randn(m, k, device=device), torch.randn(n, k, device=device), torch.randn(n, device=device)
    whole, out = inner(m, n, torch.float32, device)
    gemm(x, weight, bias, Gemm(epilogue_plain), out, tile=tile)
    expected = x.double() @ weight.double().mT + bias.double()
    assert_close(out, expected)
    assert int(whole.isnan().sum()) == whole.numel() - out.numel()


@pytest.mark.parametrize("tile", TILES[:2], ids=str)
def test_prologue_and_function_of_the_sums(tile: GemmTile, has_descriptors: bool, device: torch.device) -> None:
    """What a KAN's linear layer is made of: the left operand a function of x by column, the result one of the sums by column."""
    m, n, k = 37, 40, 43
    x, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device) / 7
    scale, shift = torch.randn(k, device=device), torch.randn(n, device=device)
    out = torch.empty(m, n, device=device)
    call = Gemm(epilogue_plain, prologue=_scaled_columns, value=_plus_column, params=(3,))
    gemm(x, weight, None, call, out, tensors=(scale, shift), tile=tile)
    sums = (x.double() ** 3 * scale.double()) @ weight.double().mT
    assert_close(out, sums**2 + shift.double(), rms_tol=2e-6, max_tol=1e-5)


def placed(where: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both matrices ``[H, K]`` of ``weight [2, H, K]``: one behind the other, or each in memory of its own, in either order."""
    if where == "stacked":
        return weight[0], weight[1]
    low, high = sorted([torch.empty_like(weight[0]) for _ in range(2)], key=Tensor.data_ptr)
    first, second = (low, high) if where == "apart" else (high, low)
    return first.copy_(weight[0]), second.copy_(weight[1])


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("where", ["stacked", "apart", "apart, gate first"])
def test_pairs(tile: GemmTile, where: str, has_descriptors: bool, device: torch.device) -> None:
    m, h, k = 37, 40, 24
    x, weight, bias = torch.randn(m, k, device=device), torch.randn(2, h, k, device=device), torch.randn(2, h, device=device)
    up, gate = (x.double() @ weight[i].double().mT + bias[i].double() for i in range(2))
    whole, out = inner(m, h, torch.float32, device)
    call = Gemm(epilogue_gate, value=find_activation("relu").value, params=Params(False, (), ()), pairs="stacked")
    b, b2 = placed(where, weight)
    build = Builder([x, b, bias, b2, out])
    meta_x, meta_b, meta_bias, meta_b2, target = build.inputs
    problem = gemm_launch.problem_of(build, gemm_launch.Operands(meta_x, meta_b, meta_b2, meta_bias, target), call, "highest")
    assert (problem.b.has_descriptor, problem.swapped) == (has_descriptors, has_descriptors and where == "apart, gate first")
    gemm(x, b, bias, call, out, tile=tile, b2=b2)
    assert_close(out, up * gate.relu())
    assert int(whole.isnan().sum()) == whole.numel() - out.numel()


@pytest.mark.parametrize("where", ["stacked", "apart, gate first"])
def test_pairs_on_amd(where: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both matrices are loaded by themselves there."""
    if device.type != "cpu":
        pytest.skip("compiled kernels are of the GPU that is there")
    on_amd = Mock(return_value=True)
    monkeypatch.setattr(devices, "gpu_of", lambda device: replace(INTERPRETER, has_descriptors=False))
    monkeypatch.setattr("fastkron_py.tiling.gemm.is_hip", on_amd)
    test_pairs(TILES[1], where, False, device)
    assert on_amd.called


def test_half_types_of_another_result(device: torch.device) -> None:
    """Sums are float32, and are stored in the result's dtype."""
    x, weight = (torch.randint(-3, 4, (20, 16), device=device).bfloat16() for _ in range(2))
    out = torch.empty(20, 20, device=device)
    gemm(x, weight, None, Gemm(epilogue_plain), out)
    assert torch.equal(out, (x.float() @ weight.float().mT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_that_end_between_two_runs_of_16_bytes(dtype: torch.dtype, device: torch.device) -> None:
    """Rows begin on boundaries of 16 bytes and do not end there: a GPU's copy engine would read, and write, the next columns too."""
    wide, result = (torch.full((20, 32), torch.nan, dtype=dtype, device=device) for _ in range(2))
    x, y = wide[:, 8:14], result[:, 16:22]
    x.copy_(torch.randn(20, 6))
    weight = torch.full((6, 16), torch.nan, dtype=dtype, device=device)[:, :6]
    weight.copy_(torch.randn(6, 6))
    gemm(x, weight, None, Gemm(epilogue_plain), y)
    # The interpreter cuts bfloat16 off.
    assert_close(y, x.double() @ weight.double().mT, **({"rms_tol": 8e-3, "max_tol": 3e-2} if dtype == torch.bfloat16 else {}))
    y.fill_(torch.nan)
    assert bool(result.isnan().all())
    build = Builder([y])
    assert not gemm_launch.takes_descriptor(build, build.inputs[0])
