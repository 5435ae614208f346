"""A linear layer and the rational function after it in one kernel: against the two in float64, and where it is not taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_spy import CacheSpy
from gemm_cases import gemm_columns
from rational_cases import problem
from torch import Tensor, nn
from torch.nn.functional import linear

import fastkron_py
from fastkron_py import reference
from fastkron_py.nn import GRKAN
from fastkron_py.rational import operator
from fastkron_py.rational.api import linear_rational
from fastkron_py.rational.plan import fuses, linear_tile
from fastkron_py.runtime.gpu import HOPPER
from fastkron_py.runtime.program import Program
from fastkron_py.tiling.gemm_config import GemmSizes

# The interpreter cuts bfloat16 off.
TOLERANCES = {torch.float32: (3e-6, 3e-5), torch.bfloat16: (8e-3, 3e-2), torch.float16: (1e-3, 4e-3)}


class Fused:
    """Runs of the fused kernel, and calls that the cache serves; says that it is the faster way, however small the problem."""

    def __init__(self, spy: CacheSpy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spy = spy
        self.kept: list[bool] = []
        self.z: Tensor | None = None
        run = Program.__call__

        def counted(program: Program, *given: Any) -> list[Tensor]:
            results = run(program, *given)
            if gemm_columns(program):
                self.kept.append(len(results) == 2)
                self.z = results[1] if self.kept[-1] else None
            return results

        monkeypatch.setattr(Program, "__call__", counted)
        monkeypatch.setattr(operator, "fuses", lambda *sizes: True)

    @property
    def cached(self) -> int:
        """Calls of the fused operators alone."""
        return sum(count for name, count in self.spy.served.items() if name == "linear_rational")


@pytest.fixture
def fused(spy: CacheSpy, monkeypatch: pytest.MonkeyPatch) -> Fused:
    return Fused(spy, monkeypatch)


def operands(
    rows: tuple[int, ...], depth: int, columns: int, groups: int | tuple[int, int], device: torch.device, version: str = "B", **options: Any
) -> list[Tensor]:
    """[x, weight, bias, a, b, dy], with a bias in which few terms cancel."""
    p = problem((*rows, columns), groups, version=version, device=device, **options)
    x, weight, bias = torch.randn(*rows, depth), torch.randn(columns, depth) / depth**0.5, torch.randn(columns)
    return [*(t.to(p.x) for t in (x, weight, bias)), p.a, p.b, p.dy]


def expected(tensors: list[Tensor], version: str = "B", z: Tensor | None = None) -> list[Tensor]:
    """[y, and gradients of the five operands], in float64; gradients at z, where it is given, in place of the product."""
    leaves = [t.double().detach().requires_grad_() for t in tensors[:5]]
    product = linear(*leaves[:3])
    y = reference.rational(product, *leaves[3:], version=version)
    if z is not None:
        rms, most = TOLERANCES[z.dtype]
        fastkron_py.testing.assert_close(z, product, rms_tol=rms, max_tol=most, name="z")
        product = product + (z.double() - product).detach()
    at_z = reference.rational(product, *leaves[3:], version=version)
    return [y.detach(), *torch.autograd.grad(at_z, leaves, tensors[5].double())]


def assert_right(found: list[Tensor], tensors: list[Tensor], version: str = "B", z: Tensor | None = None) -> None:
    for i, (f, e) in enumerate(zip(found, expected(tensors, version, z), strict=True)):
        rms, most = TOLERANCES[tensors[0].dtype]
        fastkron_py.testing.assert_close(f, e, rms_tol=rms, max_tol=most, name=f"result {i}")


def step(tensors: list[Tensor], version: str = "B") -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors[:5]]
    y = linear_rational(*leaves, version=version)
    return [y.detach(), *torch.autograd.grad(y, leaves, tensors[5])]


@pytest.mark.parametrize(
    ("dtype", "version", "groups", "sizes"),
    [
        (torch.float32, "B", 3, ((2, 9), 20, 96)),  # groups of 32 channels, as wide as a tile is
        (torch.bfloat16, "A", (1, 8), ((33,), 24, 192)),  # of 24, which tiles cross
        (torch.float16, "C", (4, 1), ((5, 1, 3), 16, 32)),
        (torch.float32, "N", 1, ((1,), 8, 8)),
        (torch.bfloat16, "D", 2, ((70,), 40, 64)),
        (torch.float16, "B", (1, 5), ((140,), 64, 160)),  # large enough for the tiles of KAT's layers, the last ones not full
    ],
    ids=str,
)
def test_against_float64(dtype: torch.dtype, version: str, groups: Any, sizes: Any, fused: Fused, device: torch.device) -> None:
    tensors = operands(*sizes, groups, device, version, dtype=dtype)
    assert_right(step(tensors, version), tensors, version, fused.z)
    with torch.no_grad():
        y = linear_rational(*tensors[:5], version=version)
    assert fused.kept == [True, False]
    rms, most = TOLERANCES[dtype]
    fastkron_py.testing.assert_close(y, expected(tensors, version)[0], rms_tol=rms, max_tol=most)


def test_operands_of_any_strides_and_coefficients_of_any_dtype(fused: Fused, device: torch.device) -> None:
    tensors = operands((6, 3), 20, 32, 2, device)
    x, weight, bias, a, b, dy = tensors
    turned = [
        x.transpose(0, 1).contiguous().transpose(0, 1),
        weight.mT.contiguous().mT,
        bias.repeat_interleave(2)[::2],
        a.mT.contiguous().mT,
    ]
    assert_right(step([*turned, b, dy.expand_as(dy)]), tensors)
    tensors[3] = a.bfloat16()
    found = step(tensors)
    assert found[4].dtype == torch.bfloat16
    found[4] = expected(tensors)[4]
    assert_right(found, tensors)
    assert fused.kept == [True, True]


def test_some_gradients_only(fused: Fused, device: torch.device) -> None:
    for needing in ["x", "w", "b", "n", "d"]:
        tensors = operands((6,), 20, 32, 2, device)
        leaves = [t.clone().requires_grad_(name == needing) for name, t in zip("xwbnd", tensors, strict=False)]
        linear_rational(*leaves).backward(tensors[5])
        for name, leaf, want in zip("xwbnd", leaves, expected(tensors, z=fused.z)[1:], strict=True):
            assert (leaf.grad is not None) == (name == needing)
            if leaf.grad is not None:
                fastkron_py.testing.assert_close(leaf.grad, want, rms_tol=3e-6, max_tol=3e-5)


def test_second_derivatives(fused: Fused, device: torch.device) -> None:
    """Derived through the kept product too, which the kernel made and autograd did not."""
    tensors = operands((4,), 5, 8, 2, device)
    for t in tensors[1:3]:
        t /= 2  # of large products the fifth power's derivatives magnify roundings

    def second(function: Any, given: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in given[:5]]
        first = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    want = second(lambda x, w, c, a, b: reference.rational(linear(x, w, c), a, b), [t.double() for t in tensors])
    for found, w in zip(second(linear_rational, tensors), want, strict=True):
        fastkron_py.testing.assert_close(found, w, rms_tol=2e-5, max_tol=1e-4)
    assert fused.kept == [True]


def test_where_the_two_are_composed(fused: Fused, device: torch.device) -> None:
    """Noise, float64, transforms, compilation and whatever is wrong, with the errors of the two."""
    x, weight, bias, a, b, _ = operands((6,), 20, 32, 2, device)
    want = reference.rational(linear(x, weight, bias), a, b)

    def close(y: Tensor) -> None:
        torch.testing.assert_close(y, want.to(y), rtol=1e-4, atol=1e-4)

    close(linear_rational(*(t.double() for t in (x, weight, bias, a, b))))
    close(torch.vmap(lambda t: linear_rational(t, weight, bias, a, b))(x))
    close(torch.func.jvp(lambda t: linear_rational(t, weight, bias, a, b), (x,), (x,))[0])
    close(torch.compile(linear_rational, backend="aot_eager", fullgraph=True)(x, weight, bias, a, b))
    torch._dynamo.reset()
    assert linear_rational(x[:0], weight, bias, a, b).shape == (0, 32)
    noisy = linear_rational(x, weight, bias, a, b, version="D", training=True)
    assert not torch.equal(noisy, linear_rational(x, weight, bias, a, b, version="D", training=True))
    with fastkron_py.backend("torch"):
        close(linear_rational(x, weight, bias, a, b))
    with pytest.raises(ValueError, match=r"weight: expected shape \[O, 20\]; got shape \(32, 19\)"):
        linear_rational(x, weight[:, 1:], bias, a, b)
    with pytest.raises(ValueError, match="x: expected a last dimension that the number of groups 2 divides; got 31"):
        linear_rational(x, weight[1:], bias[1:], a, b)
    with pytest.raises(ValueError, match="version: expected one of"):
        linear_rational(x, weight, bias, a, b, version="E")
    with pytest.raises(TypeError, match="x: expected a torch tensor; got list"):
        linear_rational([1.0], weight, bias, a, b)  # type: ignore[arg-type]
    assert fused.kept == []


def test_grkan(fused: Fused, device: torch.device) -> None:
    """The first linear layer and the second function are one call, unless somebody wants to see them apart."""
    layer = GRKAN(24, 32, num_groups=2).to(device)
    x = torch.randn(3, 5, 24, device=device)
    y = layer(x)
    assert fused.kept == [True]
    seen: list[Tensor] = []
    hook = layer.fc1.register_forward_hook(lambda module, given, result: seen.append(result))
    torch.testing.assert_close(layer(x), y, rtol=1e-5, atol=1e-5)
    assert (len(seen), fused.kept) == (1, [True])
    hook.remove()
    layer.fc1 = nn.Sequential(layer.fc1)  # type: ignore[assignment]
    torch.testing.assert_close(layer(x), y, rtol=1e-5, atol=1e-5)
    assert fused.kept == [True]


def test_which_linear_layers_are_fused() -> None:
    """Large products hide no more than they did, and what takes less time than the fused call's Python gains nothing."""
    kat_t, kat_b, wide = (512 * 197, 768, 192), (128 * 197, 3072, 768), (16384, 16384, 4096)
    assert not fuses(*kat_t, 2, True, HOPPER)
    assert fuses(*kat_b, 2, False, HOPPER)
    assert not fuses(*wide, 2, False, HOPPER)
    tile = linear_tile(GemmSizes(*kat_b, 2, 1, 2, False, HOPPER, True))
    assert tile.programs == 2
    assert 768 // 8 % (tile.block_n // tile.parts) == 0  # pieces of KAT-T's tiles lie within a group
    assert linear_tile(GemmSizes(64, 32, 768, 2, 1, 2, False, HOPPER, True)).block_n <= 64
    assert linear_tile(GemmSizes(*kat_b, 2, 1, 2, False, HOPPER, False)).programs == 1  # by pointers
