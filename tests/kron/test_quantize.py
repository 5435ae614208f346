"""`kron_quantize` against a float64 product: every value is the nearest one of its format, but for rounding of the product.

Errors are counted in steps of the format: half a step is that of rounding to it. A product of float32 adds 1e-3 of a step. In half types
intermediates are rounded to 8 or 11 bits, which is about a step of int8 where the interpreter truncates to bfloat16.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from cache_spy import CacheSpy

import fastkron_py
from fastkron_py import Hadamard, kron_matmul, kron_quantize, reference
from fastkron_py.functional import Quantized
from fastkron_py.kron import quantize, rotate
from fastkron_py.kron.problem import Problem
from fastkron_py.runtime.call_cache import CACHE

FLOAT4 = torch.float4_e2m1fn_x2
FORMATS = [torch.int8, torch.float8_e4m3fn, FLOAT4, "int4"]
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448, FLOAT4: 6, "int4": 7}
POWERS = {torch.int8: 6, torch.float8_e4m3fn: 8, FLOAT4: 2, "int4": 2}  # exponents of the largest powers of two
FLOATS = {torch.float8_e4m3fn: (3, -6), FLOAT4: (1, 0)}  # bits of a mantissa, and the exponent of the smallest normal number
# (P, Q): two steps in one launch, whole and padded, the wide first step, and what takes a pass of its own.
SHAPES = {
    "a launch": [(64, 64), (32, 32)],
    "padded": [(40, 36), (36, 34)],
    "in two parts, transposed": [(70, 86), (36, 38)],
    "in two parts": [(36, 38), (70, 86)],
    "a wide first step": [(140, 132), (70, 66)],
    "multiplied out": [(8, 8), (5, 5), (8, 8), (4, 4)],
    "small": [(3, 4), (5, 6)],
    "one factor": [(7, 10)],
    "long rows": [(3, 50), (2, 70)],
}
NOT_FINITE = ["a launch", "padded", "in two parts, transposed", "small"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
PRODUCT = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-5, torch.float64: 1e-5}  # of the row's largest value


@pytest.fixture(autouse=True)
def paired(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Half types take the kernel of two steps on any device."""
    CACHE.forget()
    halves = (torch.bfloat16, torch.float16)
    monkeypatch.setattr(Problem, "half", property(lambda self: str(self.dtype).removeprefix("torch.") if self.dtype in halves else ""))
    yield
    CACHE.forget()


def problem(shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device, rows: tuple[int, ...] = (3,)) -> Any:
    torch.manual_seed(0)
    k = int(torch.tensor([p for p, _ in shapes]).prod())
    x = torch.randn(*rows, k, dtype=torch.float64).to(device, dtype)
    factors = [(torch.randn(p, q, dtype=torch.float64) / p**0.5).to(device, dtype) for p, q in shapes]
    return x, factors, reference.kron_matmul(x.double(), [f.double() for f in factors])


def assert_nearest(found: Quantized, wanted: torch.Tensor, dtype: torch.dtype, kind: Any, clip: float = 1.0) -> None:
    """Scales, and values within half a step and the product's own error."""
    largest, most = wanted.abs().amax(-1, keepdim=True), LARGEST[kind]
    error = PRODUCT[dtype] * largest
    assert found.scales.shape == largest.shape
    assert ((found.scales * most - clip * largest).abs() <= error).all()
    step = found.scales.double()
    if kind in FLOATS:  # of 3 bits, and of 2^-9 below 2^-6
        bits, least = FLOATS[kind]
        step = step * torch.exp2((wanted / step).abs().clamp(2.0**least, most).log2().floor() - bits)
    limit = clip * largest
    got = found.dequantize().double()
    assert got.shape == wanted.shape
    assert ((got - wanted.clamp(-limit, limit)).abs() <= 0.501 * step + error).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_values(shapes: list[tuple[int, int]], dtype: torch.dtype, backend_name: str, device: torch.device) -> None:
    for kind in FORMATS:
        x, factors, wanted = problem(shapes, dtype, device)
        assert_nearest(kron_quantize(x, factors, kind), wanted, dtype, kind)


@pytest.mark.parametrize("shapes", [SHAPES["a launch"], SHAPES["small"]], ids=["a launch", "small"])
def test_clipping(shapes: list[tuple[int, int]], backend_name: str, device: torch.device) -> None:
    for kind in FORMATS:
        x, factors, wanted = problem(shapes, torch.float16, device)
        assert_nearest(kron_quantize(x, factors, kind, clip_ratio=0.6), wanted, torch.float16, kind, 0.6)
        assert_nearest(kron_quantize(x, factors, kind, clip_ratio=0.7), wanted, torch.float16, kind, 0.7)  # of the same program


def test_odd_columns_of_the_second_step(backend_name: str, device: torch.device) -> None:
    """Two of int4 are in a byte, also where one ends a row of a slice and one begins the next."""
    for shapes in [[(40, 64), (40, 65)], [(70, 66), (34, 35)], [(8, 24), (31, 17)], [(8, 8), (8, 5), (9, 9)]]:
        x, factors, wanted = problem(shapes, torch.float16, device)
        for kind in ("int4", torch.int8):
            assert_nearest(kron_quantize(x, factors, kind), wanted, torch.float16, kind)


def test_the_control_fails(device: torch.device) -> None:
    x, factors, wanted = problem(SHAPES["small"], torch.float32, device)
    found = kron_quantize(x, factors, torch.int8)
    values = found.values.clone()
    values[1, 3] += 1
    with pytest.raises(AssertionError):
        assert_nearest(found._replace(values=values), wanted, torch.float32, torch.int8)


def test_formats(backend_name: str, device: torch.device) -> None:
    """Known rows: the largest number, ties to even, zeros, and the order of int4's halves."""
    for kind in FORMATS:
        x = torch.tensor([[7.0, -7.0, 0.5, 1.5, -2.5, 3.0], [0.0] * 6], device=device)
        found = kron_quantize(x, [torch.eye(6, device=device)], kind)
        most = LARGEST[kind]
        assert found.scales[:, 0].tolist() == pytest.approx([7 / most, 1.0])
        assert not found.dequantize()[1].any()
        if kind == FLOAT4:
            assert found.values.dtype == FLOAT4
            # In steps of 7 / 6: 0.43, 1.29, -2.14 and 2.57 are 0.5, 1.5, -2 and 3, of codes 1, 3, 4 and 5; -6 is 15.
            assert found.values.view(torch.uint8)[0].tolist() == [7 + 16 * 15, 1 + 16 * 3, 12 + 16 * 5]
            assert found.dequantize()[0].tolist() == pytest.approx([7.0, -7.0, 7 / 12, 7 / 4, -7 / 3, 7 / 2])
        elif kind == "int4":
            assert found.values.dtype == torch.uint8
            assert found.values[0].tolist() == [7 + 16 * 9, 0 + 16 * 2, 14 + 16 * 3]  # -7 is 9, -2 is 14
            assert found.dequantize()[0].tolist() == [7.0, -7.0, 0.0, 2.0, -2.0, 3.0]
        else:
            assert found.values.dtype == kind
            assert found.values[0, :2].float().tolist() == [most, -most]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:All-NaN")
@pytest.mark.parametrize("shapes", [SHAPES[name] for name in NOT_FINITE], ids=NOT_FINITE)
def test_rows_that_are_not_finite_have_no_scale(shapes: list[tuple[int, int]], backend_name: str, device: torch.device) -> None:
    for kind in FORMATS:
        x, factors, wanted = problem(shapes, torch.bfloat16, device, (4,))
        x[0, 1], x[2, 3] = float("nan"), float("inf")
        found = kron_quantize(x, factors, kind)
        assert found.scales[[0, 2]].isnan().all()
        assert found.dequantize()[[0, 2]].isnan().all()
        assert_nearest(Quantized(found.values[1::2], found.scales[1::2]), wanted[1::2], torch.bfloat16, kind)


def test_tiny_rows(backend_name: str, device: torch.device) -> None:
    """A scale is a normal number: half of it is the error at most, where the row's own would be smaller."""
    for dtype, kind in itertools.product([torch.bfloat16, torch.float32], FORMATS):
        shapes = SHAPES["a launch"]
        x = torch.full((2, 64 * 32), 2.0**-126, device=device, dtype=dtype)
        x[1] = 2.0**-120
        factors = [torch.eye(p, device=device, dtype=dtype) for p, _ in shapes]
        found = kron_quantize(x, factors, kind)
        assert (found.scales >= 2.0**-126).all()
        assert ((found.dequantize().double() - x.double()).abs() <= 0.501 * found.scales.double()).all()


@pytest.mark.parametrize("fused", [True, False], ids=["a launch", "two launches"])
def test_small_numbers_of_float16(fused: bool, backend_name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that float16 has few bits for is rounded once, to the values."""
    for shapes in [SHAPES["a launch"], SHAPES["small"], SHAPES["multiplied out"]]:
        if not fused:
            monkeypatch.setattr(Problem, "half", "")
        x, factors, _ = problem(shapes, torch.float16, device)
        x = x * 1e-6
        wanted = reference.kron_matmul(x.double(), [f.double() for f in factors])
        assert_nearest(kron_quantize(x, factors, torch.int8), wanted, torch.float16, torch.int8)


def test_autocast(backend_name: str, device: torch.device) -> None:
    """Operands are multiplied in autocast's dtype, as by kron_matmul; float64 stays."""
    x, factors, wanted = problem(SHAPES["small"], torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        found = kron_quantize(x, [f.bfloat16() for f in factors], torch.int8)
        doubled = kron_quantize(x.double(), [f.double() for f in factors], torch.int8)
    same = kron_quantize(x.bfloat16(), [f.bfloat16() for f in factors], torch.int8)
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))
    assert_nearest(doubled, wanted, torch.float64, torch.int8)


def test_rows_beyond_float32(backend_name: str, device: torch.device) -> None:
    """A row of float64 may be larger than float32's numbers, while its scale is not."""
    for kind in FORMATS:
        x, factors, _ = problem(SHAPES["small"], torch.float64, device)
        x *= torch.tensor([[1.0], [3e38], [1e45]], dtype=torch.float64, device=device)
        wanted = reference.kron_matmul(x, factors)
        assert wanted[1].abs().max() > torch.finfo(torch.float32).max
        found = kron_quantize(x, factors, kind)
        found = found._replace(scales=found.scales.double())  # for a product that is not in float32
        assert found.scales[:2].isfinite().all()
        assert found.scales[2].isnan()
        if kind not in ("int4", FLOAT4):
            ratio = found.values[:2].double() * found.scales[:2] / wanted[:2].abs().amax(-1, keepdim=True)
            wanted_ratio = wanted[:2] / wanted[:2].abs().amax(-1, keepdim=True)
            torch.testing.assert_close(ratio, wanted_ratio, rtol=0, atol=0.04 if kind == torch.float8_e4m3fn else 0.51 / 127)


def test_shapes_and_strides(backend_name: str, device: torch.device) -> None:
    x, factors, wanted = problem(SHAPES["padded"], torch.float16, device, (2, 3))
    for given in (x, x.mT.contiguous().mT, torch.cat([x, x], -1)[..., : x.shape[-1]]):
        assert_nearest(kron_quantize(given, [f.mT.contiguous().mT for f in factors], torch.int8), wanted, torch.float16, torch.int8)
    columns, every_second = x[0].mT.contiguous().mT, torch.stack([x[0], x[0]], -1)[..., 0]
    for given in (columns, every_second):  # matrices whose rows are no runs of memory
        assert_nearest(kron_quantize(given, factors, torch.int8), wanted[0], torch.float16, torch.int8)
    one = kron_quantize(x[0, 0], factors, "int4")
    assert one.values.shape == (wanted.shape[-1] // 2,)
    assert one.scales.shape == (1,)
    assert_nearest(one, wanted[0, 0], torch.float16, "int4")
    for rows in ((0,), (2, 0, 3)):
        empty = kron_quantize(x.new_zeros(*rows, x.shape[-1]), factors, torch.float8_e4m3fn)
        assert empty.values.shape == (*rows, wanted.shape[-1])
        assert empty.values.dtype == torch.float8_e4m3fn
        assert empty.scales.shape == (*rows, 1)


# ---- groups of a row: identities and Hadamard matrices --------------------------------------------

# Matrices by their sizes. In one launch: one group a warp and several, rows that are no whole number of them, more rows than one, wide
# and narrow matrices; the rest by a product and a launch that rounds.
GROUPS: dict[str, list[Any]] = {
    "256": [15, Hadamard(256, 1 / 16)],
    "128, several rows": [3, Hadamard(128)],
    "64, one group": [Hadamard(64, 0.125)],
    "16, a negative scale": [3, Hadamard(16, -0.25)],
    "in parts": [5, Hadamard(8), Hadamard(8)],
    "512": [3, Hadamard(512)],
    "1024": [2, 1, Hadamard(1024)],
    "four factors": [5, 4, 4, 4, 4],
    "two factors": [3, 16, 16],
    "a wide factor": [2, 32, 4, 4],
    "a narrow factor": [6, 8],
}
MORE_GROUPS: dict[str, list[Any]] = {
    "odd rows": [3, Hadamard(8)],
    "of order 12": [2, Hadamard(12)],
    "of order 1": [6, Hadamard(1, 0.25)],
    "an identity behind": [2, 7, -3],
    "no matrix": [-24],
}


def dense_factors(factors: list[Any], device: torch.device) -> list[torch.Tensor]:
    """Matrices of float64 in place of identities, Hadamard matrices and factors of other dtypes."""
    like = torch.empty(0, dtype=torch.float64, device=device)

    def dense(factor: Any) -> torch.Tensor:
        if isinstance(factor, int):
            return torch.eye(factor, dtype=like.dtype, device=device)
        return factor.matrix(like) if isinstance(factor, Hadamard) else factor.double()

    return [dense(f) for f in factors]


def grouped(name: str, dtype: torch.dtype, device: torch.device, rows: int = 5) -> Any:
    """(x, factors, the float64 product); the first integer of the lists is an identity, later ones are matrices, -n is I_n."""
    torch.manual_seed(0)
    parts = {**GROUPS, **MORE_GROUPS}[name]
    first = [parts[0]] if isinstance(parts[0], int) and parts[0] > 0 else []
    factors: list[Any] = [*map(abs, first)]
    for f in parts[len(first) :]:
        random = torch.randn(abs(f), abs(f), dtype=torch.float64) if isinstance(f, int) else None
        is_plain = isinstance(f, Hadamard) or f < 0 or (name == "1024" and f == 1)
        factors.append((abs(f) if isinstance(f, int) else f) if is_plain else random.to(device, dtype))  # type: ignore[union-attr]
    dense = dense_factors(factors, device)
    x = torch.randn(rows, int(torch.tensor([f.shape[0] for f in dense]).prod()), dtype=torch.float64).to(device, dtype)
    return x, factors, reference.kron_matmul(x.double(), dense)


@pytest.mark.parametrize("name", [*GROUPS, *MORE_GROUPS])
def test_groups(name: str, backend_name: str, device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32) if name in ("256", *MORE_GROUPS) else (torch.bfloat16,):
        x, factors, wanted = grouped(name, dtype, device)
        for kind in FORMATS:
            assert_nearest(kron_quantize(x, factors, kind), wanted, dtype, kind)


def test_groups_of_float16_and_strides(backend_name: str, device: torch.device) -> None:
    for name in ("256", "16, a negative scale", "four factors", "two factors"):
        x, factors, wanted = grouped(name, torch.float16, device)
        for given in (x, x.mT.contiguous().mT, torch.cat([x, x], -1)[..., : x.shape[-1]]):
            assert_nearest(kron_quantize(given, factors, torch.int8), wanted, torch.float16, torch.int8)
        assert_nearest(kron_quantize(x, factors, torch.int8, clip_ratio=0.6), wanted, torch.float16, torch.int8, 0.6)


def test_groups_in_graphs_batches_and_autocast(backend_name: str, device: torch.device) -> None:
    for name in ("256", "four factors", "of order 12"):
        x, factors, wanted = grouped(name, torch.bfloat16, device, 6)

        def rotated(x: torch.Tensor, factors: list[Any] = factors) -> tuple[torch.Tensor, torch.Tensor]:
            return tuple(kron_quantize(x, factors, torch.int8))

        found = Quantized(*rotated(x))
        assert_nearest(found, wanted, torch.bfloat16, torch.int8)
        compiled = torch.compile(rotated, fullgraph=True, backend="aot_eager")
        batched = torch.func.vmap(rotated)(x.view(2, 3, -1))
        flat = [t.flatten(0, 1) for t in batched]
        with torch.autocast(device.type, torch.bfloat16):
            cast = rotated(x.float(), [f.float() if isinstance(f, torch.Tensor) else f for f in factors])
        for same in (compiled(x), flat, cast):
            assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True)), name
        empty = kron_quantize(x[:0], factors, "int4")
        assert empty.values.shape == (0, x.shape[1] // 2)


@pytest.mark.parametrize("scale_format", ["float32", "e8m0"])
def test_batches_without_views_as_another_dtype(scale_format: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 has no vmap rule of them."""
    view = torch.Tensor.view

    def refusing(t: torch.Tensor, *args: Any) -> torch.Tensor:
        if isinstance(args[0], torch.dtype) and torch._C._functorch.is_batchedtensor(t):
            raise RuntimeError("Batching rule not implemented for aten::view.dtype")
        return view(t, *args)

    monkeypatch.setattr(torch.Tensor, "view", refusing)
    x = problem([(128, 128)], torch.bfloat16, device, (2, 3))[0]
    for kind in FORMATS:

        def rounded(x: torch.Tensor, kind: Any = kind, generator: Any = None) -> torch.Tensor:
            options = {"group_size": 32, "scale_format": scale_format, "generator": generator}
            return kron_quantize(x, [4, Hadamard(32, 0.2)], kind, **options).dequantize()

        for function in (torch.func.vmap(rounded, in_dims=1, out_dims=1), torch.func.vmap(torch.func.vmap(rounded))):
            assert torch.equal(function(x), rounded(x))
        at_random = torch.func.vmap(rounded, randomness="different")(x, generator=torch.Generator(device))
        torch.testing.assert_close(at_random, rounded(x), rtol=0.5, atol=2.0)


def test_groups_take_one_launch(device: torch.device) -> None:
    """Half types of the first list do, and the second list does not."""
    for name in GROUPS:
        x, factors, _ = grouped(name, torch.bfloat16, device)
        sizes = [f for f in factors if isinstance(f, Hadamard)]
        order = int(torch.tensor([f.order for f in sizes] or [1]).prod())
        matrices = [f for f in factors if isinstance(f, torch.Tensor)]
        assert rotate.rotation(x.shape[1], order, [tuple(f.shape) for f in matrices]) is not None, name
    assert rotate.rotation(24, 8, []) is None  # rows that do not begin at multiples of 16 elements
    assert rotate.rotation(65536, 256, []) is None
    assert rotate.rotation(4096, 2048, []) is None
    assert rotate.rotation(4096, 1, [(8, 8), (8, 8)]) is None
    assert rotate.rotation(4096, 1, [(16, 8), (16, 16)]) is None
    assert rotate.rotation(16384, 1024, []) is not None
    assert rotate.rotation(32768, 1024, []) is None  # whose sums, beside A, are more than registers
    assert rotate.rotation(32768, 1, [(32, 32), (16, 16)]) is not None
    assert rotate.rotation(32768, 1, [(32, 32), (16, 16)], is_bfloat16=False) is None
    assert rotate.rotation(8192, 1, [(4, 4)] * 5) is not None
    assert rotate.rotation(16384, 1, [(4, 4)] * 5) is None  # A is in shared memory twice for each warp
    for width, order, segment in ((128, 128, 128), (4096, 32, 32), (4096, 1024, 16), (1 << 20, 64, 1024)):  # rows of any length
        made = rotate.rotation(width, order, [], segment=segment)
        assert made is not None
        assert made.segment == segment
        assert made.p * made.chunks == 64
    assert rotate.rotation(4096, 1024, [], segment=48) is None
    assert rotate.rotation(4096, 64, [], segment=2048) is None
    assert rotate.rotation(2048, 64, [], segment=2048) is not None  # a row


@pytest.mark.parametrize("size", [12, 32, 64, 192])
def test_a_scale_for_each_group_of_columns(size: int, backend_name: str, device: torch.device) -> None:
    """Whole groups of a rotation, parts of one, and all; each group of columns is held to its own scale."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 192, dtype=torch.float64).to(device, torch.bfloat16)
    x[..., ::50] *= 20
    factor = torch.randn(4, 4, dtype=torch.float64).to(device, torch.bfloat16)
    for factors in ([6, Hadamard(32, 0.125)], [192], [3, factor, 16], [12, factor, factor]):
        wanted = reference.kron_matmul(x.double(), dense_factors(factors, device))
        for kind in FORMATS:
            found = kron_quantize(x, factors, kind, group_size=size, clip_ratio=0.9)
            assert found.scales.shape == (2, 5, 192 // size)
            assert found.values.shape == (2, 5, 96 if kind in ("int4", FLOAT4) else 192)
            parts = Quantized(found.values.unflatten(-1, (192 // size, -1)), found.scales[..., None])
            assert torch.equal(parts.dequantize().flatten(-2), found.dequantize())
            assert_nearest(parts, wanted.unflatten(-1, (-1, size)), torch.bfloat16, kind, 0.9)
    if size < 192:
        whole = kron_quantize(x, [192], torch.int8)  # a control: a row's scale is not its groups'
        scales = whole.scales[..., None].expand(2, 5, 192 // size, 1)
        groups = Quantized(whole.values.unflatten(-1, (-1, size)), scales)
        with pytest.raises(AssertionError):
            assert_nearest(groups, x.double().unflatten(-1, (-1, size)), torch.bfloat16, torch.int8)
    empty = kron_quantize(x[:0], [6, Hadamard(32)], torch.int8, group_size=size)
    assert empty.scales.shape == (0, 5, 192 // size)
    assert empty.dequantize().shape == (0, 5, 192)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_groups_that_are_not_finite(backend_name: str, device: torch.device) -> None:
    x, factors, wanted = grouped("256", torch.bfloat16, device, 4)
    x[0, 1], x[2, 3], x[3] = float("nan"), float("inf"), 0.0
    found = kron_quantize(x, factors, torch.int8)
    assert found.scales[:, 0].isnan().tolist() == [True, False, True, False]
    assert found.scales[3, 0] == 1
    assert not found.values[3].any()
    assert_nearest(Quantized(found.values[1:2], found.scales[1:2]), wanted[1:2], torch.bfloat16, torch.int8)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_neighbours_of_segments_that_are_not_finite(backend_name: str, device: torch.device) -> None:
    """Rows that share a program's tile, and segments of a row that share no block of the matrix: each has its own numbers."""
    torch.manual_seed(0)
    of_128 = ([1, Hadamard(128)], None), ([4, Hadamard(32)], 32), ([2, Hadamard(64)], 32), ([4, Hadamard(32)], 64)
    of_512 = ([4, Hadamard(128)], 128), ([8, Hadamard(64)], 64), ([8, Hadamard(64)], 128), ([2, Hadamard(256)], 256)
    for factors, size in (*of_128, *of_512):
        width = factors[0] * factors[1].order
        x = torch.randn(9, width, dtype=torch.float64).to(device, torch.bfloat16)
        clean = kron_quantize(x, factors, torch.int8, group_size=size)
        x[0, 3], x[2, 70], x[5, 64:96] = float("nan"), float("inf"), 3e38  # sums of the last are beyond float32
        found = kron_quantize(x, factors, torch.int8, group_size=size)
        block = max(size or width, factors[1].order)
        bad = torch.zeros(9, width, dtype=torch.bool, device=device)
        for row, column in ((0, 3), (2, 70), (5, 64)):
            first = column // block * block
            bad[row, first : first + block] = True
        of_scale = bad.unflatten(-1, (-1, size or width))[..., 0]
        assert torch.equal(found.scales.isnan(), of_scale)
        assert torch.equal(found.scales[~of_scale], clean.scales[~of_scale])
        assert torch.equal(found.values[~bad], clean.values[~bad])


# ---- powers of two, prologues, rounding at random ---------------------------------------------------


def of_format(v: torch.Tensor, kind: Any) -> torch.Tensor:
    """The format's number nearest to each of v, which is within its range; of two the one with an even last bit."""
    if kind in (torch.int8, "int4"):
        return v.round()
    bits, least = FLOATS[kind]
    step = torch.exp2(v.abs().clamp(min=2.0**least).log2().floor() - bits)
    return (v / step).round() * step


def test_scales_that_are_powers_of_two(backend_name: str, device: torch.device) -> None:
    """Of exact products: 2 to (floor(log2) of the largest value, less the format's largest exponent), and the values bit for bit."""
    torch.manual_seed(0)
    x = torch.randint(-8, 9, (5, 384), device=device).to(torch.bfloat16)
    x[1] = 0.0
    for factors, size in itertools.product(([12, Hadamard(32, 0.125)], [3, Hadamard(128, 0.25)], [384], [24, 16]), (None, 32, 96, 128)):
        factors = [24, torch.eye(16, device=device, dtype=x.dtype)] if factors[-1] == 16 else factors
        wanted = reference.kron_matmul(x.double(), dense_factors(factors, device)).unflatten(-1, (-1, size or 384))
        for kind in FORMATS:
            largest = wanted.abs().amax(-1)
            exponent = torch.where(largest == 0, 0, torch.frexp(largest).exponent - 1 - POWERS[kind])  # a GPU's log2 of 8 may be below 3
            found = kron_quantize(x, factors, kind, group_size=size, scale_format="e8m0")
            assert found.scales.dtype == torch.float8_e8m0fnu
            assert torch.equal(found.scales.view(torch.uint8), (exponent + 127).to(torch.uint8))
            scales = torch.exp2(exponent)[..., None]
            limited = (wanted / scales).clamp(-LARGEST[kind], LARGEST[kind])
            assert torch.equal(found.dequantize().double(), (of_format(limited, kind) * scales).flatten(-2))
    x[0, 5], x[2, 7] = float("nan"), float("inf")
    found = kron_quantize(x, [12, Hadamard(32)], torch.int8, group_size=32, scale_format="e8m0")
    assert found.scales.view(torch.uint8)[[0, 2], 0].tolist() == [255, 255]
    assert (found.scales.view(torch.uint8) == 255).sum() == 2
    assert found.dequantize()[0, :32].isnan().all()
    halved = kron_quantize(x[3:], [384], torch.int8, scale_format="e8m0", clip_ratio=0.5)
    assert torch.equal(2 * halved.scales.float(), kron_quantize(x[3:], [384], torch.int8, scale_format="e8m0").scales.float())


@pytest.mark.parametrize("name", ["256", "four factors", "of order 12", "a launch"])
def test_prologues(name: str, backend_name: str, device: torch.device) -> None:
    """In front of a rotation in one launch and of other products, for rows and for groups of columns."""
    for dtype in (torch.bfloat16, torch.float32):
        x, factors, _ = grouped(name, dtype, device) if name != "a launch" else problem(SHAPES[name], dtype, device)
        k = x.shape[1]
        weight = (torch.rand(k, dtype=torch.float64) + 0.5).to(device, dtype)
        both = torch.cat([x, torch.randn(x.shape[0], k, dtype=torch.float64).to(device, dtype)], 1)
        gate, up = both.double().chunk(2, 1)
        normal = x.double() / (x.double().square().mean(1, keepdim=True) + 0.25).sqrt() * weight.double()
        for given, prologue, wanted in (
            (both, ("swiglu",), torch.nn.functional.silu(gate) * up),
            (x, ("rms_norm", weight, 0.25), normal),
        ):
            rotated = reference.kron_matmul(wanted.to(dtype).double(), dense_factors(factors, device))
            for kind, size in ((torch.int8, None), ("int4", None), (torch.int8, k // 2 if name == "a launch" else 12 if k % 32 else 32)):
                found = kron_quantize(given, factors, kind, prologue=prologue, group_size=size)
                parts = Quantized(found.dequantize().unflatten(-1, (found.scales.shape[1], -1)), found.scales[..., None])
                parts = parts._replace(values=parts.values / parts.scales)
                assert_nearest(parts, rotated.unflatten(-1, (found.scales.shape[1], -1)), dtype, kind)
    plain = kron_quantize(x, factors, torch.int8)  # a control: the prologue does something
    assert not torch.equal(plain.values, kron_quantize(x, factors, torch.int8, prologue=("rms_norm", weight, 0.25)).values)


def test_a_call_with_a_prologue_is_kept(device: torch.device) -> None:
    """Another weight or another eps is not the call before."""
    x, factors, _ = grouped("256", torch.bfloat16, device)
    ones = torch.ones(x.shape[1], device=device, dtype=x.dtype)
    for weight, eps in ((ones, 0.0), (2 * ones, 0.0), (ones, 3.0), (ones, 0.0)):
        found = kron_quantize(x, factors, torch.int8, prologue=("rms_norm", weight, eps))
        same = kron_quantize(
            (x.double() / (x.double().square().mean(1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight, factors, torch.int8
        )
        torch.testing.assert_close(found.scales, same.scales, rtol=2e-2, atol=0)
    spread = torch.rand(x.shape[1], 2, device=device).to(x.dtype)[:, 0]
    wanted = kron_quantize(x, factors, torch.int8, prologue=("rms_norm", spread.clone(), 0.0))
    found = kron_quantize(x, factors, torch.int8, prologue=("rms_norm", spread, 0.0))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    weight = ones.clone()
    for _ in range(2):
        weight *= 2
        found = kron_quantize(x, factors, torch.int8, prologue=("rms_norm", weight, 0.0))
    torch.testing.assert_close(found.scales, 4 * same.scales, rtol=2e-2, atol=0)


def test_rounding_at_random(backend_name: str, device: torch.device) -> None:
    """Up or down, equal for equal generators, and exact in the mean, where the nearest number is not."""
    torch.manual_seed(0)
    x = torch.randn(2, 64, dtype=torch.float64).to(device, torch.bfloat16)
    factors = [2, Hadamard(32, 0.125)]
    wanted = reference.kron_matmul(x.double(), dense_factors(factors, device))
    many = x.expand(400, 2, 64)
    for kind, scale_format in itertools.product(FORMATS, ("float32", "e8m0")):
        options: dict[str, Any] = {"group_size": 32, "scale_format": scale_format}
        nearest = kron_quantize(x, factors, kind, **options)
        first, again, other = [
            kron_quantize(many, factors, kind, generator=torch.Generator(device).manual_seed(seed), **options) for seed in (7, 7, 8)
        ]
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, again, strict=True))
        values, scales = first.dequantize().double(), first.scales[0].float().double()
        assert not torch.equal(values, other.dequantize().double())
        torch.testing.assert_close(scales, nearest.scales.float().double(), rtol=1e-4 if scale_format == "float32" else 0, atol=0)
        step = scales.repeat_interleave(32, -1)
        clipped = wanted.clamp(-LARGEST[kind] * step, LARGEST[kind] * step)
        if kind in FLOATS:
            bits, least = FLOATS[kind]
            step = step * torch.exp2((clipped / step).abs().clamp(min=2.0**least).log2().floor() - bits)
        assert ((values - clipped).abs() <= 1.01 * step).all()
        deviation = 0.5 * step / 400**0.5  # standard deviation of the mean, at most
        assert ((values.mean(0) - clipped).abs() < 4.5 * deviation).all()
        assert ((nearest.dequantize().double() - clipped).abs() > 10 * deviation).any()


def test_numbers_of_a_format_are_not_rounded_at_random(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the random numbers are: the largest one is 2^-24 below 1, and added to a number of many bits it would be 1."""
    monkeypatch.setattr(torch, "rand", lambda shape, dtype, device, generator: torch.full(shape, 1 - 2**-24, dtype=dtype, device=device))
    for kind in FORMATS:
        x = LARGEST[kind] * torch.tensor([[1.0, -1.0], [-1.0, 0.0]], device=device)
        assert torch.equal(kron_quantize(x, [2], kind, generator=torch.Generator(device)).dequantize(), x)


def test_autocast_rounds_products_once(backend_name: str, device: torch.device) -> None:
    """Each path under autocast gives what it gives for operands that were cast by hand."""
    for name, options in itertools.product(("256", "of order 12", "an identity behind", "no matrix"), ({}, {"group_size": 12})):
        x, factors, _ = grouped(name, torch.float32, device)
        if x.shape[1] % 12 and options:
            continue
        halves = [f.bfloat16() if isinstance(f, torch.Tensor) else f for f in factors]
        weight = torch.rand(x.shape[1], device=device) + 0.5
        for prologue, half in (({}, {}), ({"prologue": ("rms_norm", weight, 1e-5)}, {"prologue": ("rms_norm", weight.bfloat16(), 1e-5)})):
            with torch.autocast(device.type, torch.bfloat16):
                found = kron_quantize(x, factors, torch.int8, **options, **prologue)
            by_hand = kron_quantize(x.bfloat16(), halves, torch.int8, **options, **half)
            assert all(torch.equal(a, b) for a, b in zip(found, by_hand, strict=True)), name
        with torch.autocast(device.type, torch.bfloat16):
            seeded = kron_quantize(x, factors, torch.int8, generator=torch.Generator(device).manual_seed(0))
        same = kron_quantize(x.bfloat16(), halves, torch.int8, generator=torch.Generator(device).manual_seed(0))
        assert all(torch.equal(a, b) for a, b in zip(seeded, same, strict=True)), name


def test_a_call_with_groups_is_kept(device: torch.device) -> None:
    """And another order, or an integer of another type, is another call."""
    x, factors, wanted = grouped("256", torch.bfloat16, device)
    for given in (factors, [15, Hadamard(16), Hadamard(16, 1 / 16)], [30, Hadamard(128, 1 / 16)], factors):
        found = kron_quantize(x, given, torch.int8)
        is_same = given[0] == 15
        assert torch.equal(found.scales, kron_quantize(x, factors, torch.int8).scales) is is_same
    assert_nearest(found, wanted, torch.bfloat16, torch.int8)
    with pytest.raises(TypeError, match=re.escape("factors[0]: expected a matrix, or an integer n")):
        kron_quantize(x, [True, *factors], torch.int8)


def test_hadamard_as_a_factor(backend_name: str, device: torch.device) -> None:
    x, factors, wanted = grouped("of order 12", torch.float64, device)
    torch.testing.assert_close(kron_matmul(x, factors), wanted)
    if device.type == "cpu":  # where NumPy's arrays are multiplied
        torch.testing.assert_close(kron_matmul(x.numpy(), factors), wanted.numpy())


def test_half_types_take_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And others two; the same numbers come from both, but for the rounding of what lies between them."""
    x, factors, wanted = problem(SHAPES["a launch"], torch.bfloat16, device)
    taken: list[bool] = []
    choose = quantize.quantizing_launch

    def noted(*arguments: Any) -> Any:
        found = choose(*arguments)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(quantize, "quantizing_launch", noted)
    with fastkron_py.backend("triton"):
        assert_nearest(kron_quantize(x, factors, "int4"), wanted, torch.bfloat16, "int4")
        kron_quantize(x.float(), [f.float() for f in factors], "int4")
    assert taken == [True, False]


def test_torch_rounds_where_triton_does_not_know_the_format(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_FLOAT8", (99, 0))  # as it is in the interpreter anyway
    x, factors, wanted = problem(SHAPES["small"], torch.float32, device)
    with fastkron_py.backend("triton"):
        assert_nearest(kron_quantize(x, factors, torch.float8_e4m3fn), wanted, torch.float32, torch.float8_e4m3fn)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "format": (
        {"dtype": torch.int16},
        TypeError,
        'dtype: expected torch.int8, torch.float8_e4m3fn, torch.float4_e2m1fn_x2 or "int4"; got torch.int16',
    ),
    "int8 as text": ({"dtype": "int8"}, TypeError, "or \"int4\"; got 'int8'"),
    "float4 as text": ({"dtype": "float4_e2m1fn_x2"}, TypeError, "dtype: expected torch.int8"),
    "complex": ({"x": torch.zeros(3, 12, dtype=torch.complex64)}, TypeError, "factors"),
    "no tensor": ({"x": [1.0]}, TypeError, "x: expected a torch tensor"),
    "batches": ({"factors": [torch.zeros(2, 3, 4), torch.zeros(4, 5)]}, ValueError, "factors[0]: expected a matrix"),
    "sizes": ({"x": torch.zeros(3, 13)}, ValueError, "x"),
    "odd": ({"factors": [torch.zeros(12, 5)], "dtype": "int4"}, ValueError, "factors: expected an even number of columns"),
    "clip_ratio of 0": ({"clip_ratio": 0.0}, ValueError, "clip_ratio: expected a number above 0, at most 1"),
    "clip_ratio of 2": ({"clip_ratio": 2}, ValueError, "clip_ratio: expected a number above 0, at most 1"),
    "clip_ratio as a tensor": ({"clip_ratio": torch.tensor(0.5)}, TypeError, "clip_ratio: expected a number"),
    "integers": ({"factors": [-1, torch.zeros(12, 5)]}, ValueError, "factors[0]: expected a matrix, or an integer n of 0 or more"),
    "sizes of groups": ({"factors": [5, Hadamard(2)]}, ValueError, "x: expected dimension -1 of size 10"),
    "no Hadamard matrix": ({"factors": [Hadamard(6), 2]}, ValueError, "Hadamard: order: expected m * 2^k"),
    "precision": ({"precision": "low"}, ValueError, "precision"),
    "group_size": ({"group_size": 7}, ValueError, "group_size: expected a divisor of the product's 20 columns; got 7"),
    "group_size of 0": ({"group_size": 0}, ValueError, "group_size: expected a divisor"),
    "group_size as a float": ({"group_size": 2.0}, TypeError, "group_size: expected None or an integer"),
    "odd float4": ({"factors": [torch.zeros(12, 5)], "dtype": FLOAT4}, ValueError, "factors: expected an even number of columns"),
    "scale_format": ({"scale_format": "e5m2"}, ValueError, 'scale_format: expected "float32" or "e8m0"; got \'e5m2\''),
    "prologue": ({"prologue": ("gelu",)}, ValueError, 'prologue: expected None, ("swiglu",) or ("rms_norm", weight, eps); got (\'gelu\',)'),
    "prologue as text": ({"prologue": "swiglu"}, ValueError, "prologue: expected None"),
    "eps": ({"prologue": ("rms_norm", torch.zeros(12), -1.0)}, ValueError, "prologue: expected None"),
    "weight": ({"prologue": ("rms_norm", torch.zeros(11), 0.0)}, ValueError, "prologue[1]: expected shape (12,), one for each column of x"),
    "weight's dtype": ({"prologue": ("rms_norm", torch.zeros(12).half(), 0.0)}, TypeError, "prologue[1]"),
    "no weight": ({"prologue": ("rms_norm", None, 0.0)}, TypeError, "prologue[1]"),
    "odd x": ({"prologue": ("swiglu",), "x": torch.zeros(3, 13)}, ValueError, "x: expected an even last dimension"),
    "half an x": ({"prologue": ("swiglu",)}, ValueError, "x: expected dimension -1 of size 12"),
    "generator": ({"generator": 5}, TypeError, "generator: expected None or a torch.Generator; got int"),
    "odd group_size": ({"group_size": 5, "dtype": "int4"}, ValueError, 'group_size: expected an even number for "int4"'),
    "batches in groups": (
        {"factors": [torch.zeros(2, 3, 4), torch.zeros(4, 5)], "group_size": 2},
        ValueError,
        "factors[0]: expected a matrix",
    ),
}


def test_refusals() -> None:
    for given, error, message in REFUSED.values():
        arguments: dict[str, Any] = {"x": torch.zeros(3, 12), "factors": [torch.zeros(3, 4), torch.zeros(4, 5)], "dtype": torch.int8}
        with pytest.raises(error, match=re.escape(message)):
            kron_quantize(**arguments | given)
    kron_quantize(**arguments, group_size=2)
    with pytest.raises(TypeError, match=r"group_size: expected None or an integer; got float"):
        kron_quantize(**arguments, group_size=2.0)  # which equals that of a call that is kept


def test_numbers_of_numpy() -> None:
    x, weight = torch.randn(5, 32), torch.randn(32)
    given, same = (
        kron_quantize(x, [2, Hadamard(order, 0.25)], torch.int8, prologue=("rms_norm", weight, eps))
        for order, eps in ((np.int64(16), np.float32(0.5)), (16, 0.5))
    )
    assert torch.equal(given.dequantize(), same.dequantize())


@pytest.mark.parametrize("prologue", [None, "rms_norm"])
def test_parameters_are_found_in_the_cache(prologue: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    spy, (x, factors, _) = CacheSpy(monkeypatch), problem([(8, 8), (4, 6)], torch.float32, torch.device("cpu"))
    weight = torch.nn.Parameter(torch.randn(32))
    parameters, options = [torch.nn.Parameter(f) for f in factors], {"prologue": prologue and (prologue, weight, 1e-5)}
    found = [kron_quantize(x, parameters, torch.int8, **options) for _ in range(2)]
    assert spy.take() == {"kron_quantize": 1}
    for made in (*found, kron_quantize(x.requires_grad_(), factors, torch.int8, prologue=prologue and (prologue, weight.detach(), 1e-5))):
        assert torch.equal(made.dequantize(), found[0].dequantize())
    assert spy.take() == {"kron_quantize": 1}  # tensors that require a gradient and others
