"""`gated_linear` and its gradients against the two projections and their gate in float64; two weights as one tensor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from cache_spy import CacheSpy
from gated_cases import ACTIVATIONS, LAYOUTS, expected, expected_gradients, pack, problem, relative, served
from gemm_cases import gemm_columns
from refusals import assert_refused
from torch import Tensor

import fastkron_py
from fastkron_py import gated_linear
from fastkron_py.functional import gated_mlp
from fastkron_py.runtime import device as devices
from fastkron_py.runtime.gpu import INTERPRETER
from fastkron_py.runtime.program import Program
from fastkron_py.testing import assert_close
from fastkron_py.tiling import gemm_config as tuning
from fastkron_py.tiling.gemm_config import GemmSizes, GemmSpan, GemmTile

# rows, hidden, in: ones, sizes that divide blocks, primes, and several tiles each way under `small_tiles`.
SHAPES = [(1, 1, 1), (5, 16, 8), (37, 29, 43), (70, 40, 24)]
BACKWARDS = ("save", "recompute")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 x 32 and 16 in depth, finished in two parts, so that small problems have several each way."""

    def chosen(sizes: GemmSizes) -> GemmTile:
        return GemmTile(16, 64, 16, 4, 2, parts=2, group=2)

    monkeypatch.setattr(tuning, "gemm_tile", chosen)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Every layer in two launches, its first 64 pairs and the others, in tiles of two sizes; the columns of both at each run."""
    made: list[list[int]] = []
    call = Program.__call__

    def counted(program: Program, *arguments: Any) -> Any:
        columns = gemm_columns(program)
        if columns:
            made.append(columns)
        return call(program, *arguments)

    monkeypatch.setattr(Program, "__call__", counted)
    large, small = GemmTile(32, 64, 16, 4, 2, parts=2, group=2), GemmTile(16, 32, 16, 4, 2)
    monkeypatch.setattr(tuning, "gemm_spans", lambda sizes: (GemmSpan(0, 128, large), GemmSpan(128, sizes.columns, small)))
    return made


def gradients(x: Tensor, up: Tensor, gate: Tensor, dy: Tensor, layout: str = "interleaved", **options: Any) -> list[Tensor]:
    """[y, dx, dup, dgate] by the library."""
    x, weight = x.detach().requires_grad_(), pack(up, gate, layout).requires_grad_()
    y = gated_linear(x, weight, layout=layout, **options)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    halves = dw.unbind() if layout == "stacked" else (dw[0::2], dw[1::2])
    return [y.detach(), dx, *halves]


def by_torch(x: Tensor, up: Tensor, gate: Tensor, dy: Tensor) -> list[Tensor]:
    """[y, dx, dup, dgate] of torch's own operations in x's dtype."""
    x, up, gate = (t.detach().requires_grad_() for t in (x, up, gate))
    y = torch.nn.functional.linear(x, up) * torch.nn.functional.silu(torch.nn.functional.linear(x, gate))
    return [y.detach(), *torch.autograd.grad(y, (x, up, gate), dy)]


def assert_gradients(actual: list[Tensor], reference: list[Tensor], dtype: torch.dtype) -> None:
    """Results are rounded to their dtype once, d(up) and d(gate) once before the products that dx and dW are; three steps in all.

    In float32 sums of products of sums carry their roundings on: twice the bound.
    """
    for name, a, e in zip(("y", "dx", "dup", "dgate"), actual, reference, strict=True):
        bound = {torch.float32: 2e-6, torch.float64: 2e-14}.get(dtype, 3 * torch.finfo(dtype).eps / 2)
        assert_close(a, e, rms_tol=bound, max_tol=8 * bound, name=name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int], backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for layout, backward in product(LAYOUTS, BACKWARDS):
        given = problem(*shape, torch.float32, device, generator)
        actual = gradients(*given, layout, backward=backward, precision="highest")
        assert_gradients(actual, expected_gradients(*given, "silu"), torch.float32)


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_several_tiles(
    has_descriptors: bool, small_tiles: None, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tiles than programs, a ragged last one each way, and dW over more rows than a tile has; on GPUs before Hopper by pointers."""
    if not has_descriptors:
        monkeypatch.setattr(devices, "gpu_of", lambda device: replace(INTERPRETER, has_descriptors=False))
    given = problem(70, 72, 40, torch.float32, device, generator)
    with fastkron_py.backend("triton"):
        for layout, backward in product(LAYOUTS, BACKWARDS):
            actual = gradients(*given, layout, backward=backward, precision="highest")
            assert_gradients(actual, expected_gradients(*given, "silu"), torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hidden", [72, 77])
@pytest.mark.parametrize("has_descriptors", [True, False])
def test_two_launches(
    has_descriptors: bool,
    hidden: int,
    layout: str,
    divided: list[list[int]],
    device: torch.device,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values and gradients, with a bias; 77: without descriptors of results. The third call is cached, and divided like the first."""
    if not has_descriptors:
        monkeypatch.setattr(devices, "gpu_of", lambda device: replace(INTERPRETER, has_descriptors=False))
    x, up, gate, dy = problem(37, hidden, 24, torch.float32, device, generator)
    biases = torch.randn(2, hidden, generator=generator).to(device)
    bias = pack(*biases, layout)
    wide = [t.double().requires_grad_() for t in (x, up, gate, *biases)]
    y = expected(*wide[:3], "silu", (wide[3], wide[4]))
    reference = [y.detach(), *torch.autograd.grad(y, wide, dy.double())]
    spy = CacheSpy(monkeypatch)
    for backward, is_cached in (("save", False), ("recompute", False), ("save", True)):
        given = [t.clone().requires_grad_() for t in (x, pack(up, gate, layout), bias)]
        divided.clear()
        with fastkron_py.backend("triton"):
            y = gated_linear(given[0], given[1], bias=given[2], layout=layout, backward=backward, precision="highest")
            dx, dw, db = torch.autograd.grad(y, given, dy)
        assert served(spy) == (is_cached, is_cached)
        assert divided == [[128, 2 * hidden - 128]] * (1 + (backward == "recompute"))
        parts = [t for d in (dw, db) for t in (d.unbind() if layout == "stacked" else (d[0::2], d[1::2]))]
        for a, e in zip((y.detach(), dx, *parts), reference, strict=True):
            assert_close(a, e, rms_tol=2e-6, max_tol=2e-5)


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_whole_mlp(
    has_descriptors: bool, small_tiles: None, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gated result, which the gradient of the down projection takes, is made again in backward."""
    if not has_descriptors:
        monkeypatch.setattr(devices, "gpu_of", lambda device: replace(INTERPRETER, has_descriptors=False))
    x, up, gate, _ = problem(70, 72, 40, torch.float32, device, generator)
    down, dy = torch.randn(24, 72, device=device) / 8, torch.randn(70, 24, device=device)
    wide = [t.double().requires_grad_() for t in (x, up, gate, down)]
    reference = torch.autograd.grad(expected(wide[0], wide[1], wide[2], "silu") @ wide[3].mT, wide, dy.double())
    for backward in BACKWARDS:
        given = [t.clone().requires_grad_() for t in (x, pack(up, gate, "stacked"), down)]
        with fastkron_py.backend("triton"):
            y = gated_mlp(*given, layout="stacked", backward=backward, precision="highest")
            dx, dw, ddown = torch.autograd.grad(y, given, dy)
        for a, e in zip((dx, *dw, ddown), reference, strict=True):
            assert_close(a, e, rms_tol=2e-6, max_tol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for dtype in [torch.float64, torch.float32]:
        x, up, gate, dy = problem(9, 8, 24, dtype, device, generator)
        x = 4 * x  # gates from about -8 to 8
        for backward in BACKWARDS:
            actual = gradients(x, up, gate, dy, activation=activation, backward=backward, precision="highest")
            assert_gradients(actual, expected_gradients(x, up, gate, dy, activation), dtype)


def forward_bound(dtype: torch.dtype, backend: str, device: torch.device) -> float:
    """Relative error of a forward pass. One rounding of the result makes 1.7e-3 in bfloat16; Triton's interpreter cuts off, twice that.

    Torch rounds both projections too.
    """
    if dtype == torch.float16:
        return 2.5e-4 if backend == "triton" else 5e-4
    return 2.0e-3 if backend == "triton" and device.type == "cuda" else 4.0e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(dtype: torch.dtype, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """The source's setting, gradients by the rule: below twice the error of torch's own operations, + 1e-5."""
    for layout, backward in product(LAYOUTS, BACKWARDS):
        given = problem(150, 40, 64, dtype, device, generator)
        reference = expected_gradients(*given, "silu")
        ours = [relative(a, e) for a, e in zip(gradients(*given, layout, backward=backward), reference, strict=True)]
        torchs = [relative(a, e) for a, e in zip(by_torch(*given), reference, strict=True)]
        assert ours[0] < forward_bound(dtype, backend_name, device)
        if backend_name == "triton" and (device.type == "cuda" or dtype == torch.float16):
            assert ours[0] < torchs[0]
        cut = dtype == torch.bfloat16 and backend_name == "triton" and device.type == "cpu"  # by the interpreter
        for mine, theirs in zip(ours, torchs, strict=True):
            assert mine < (4 if cut else 2) * theirs + 1e-5


def test_bias(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for layout in LAYOUTS:
        x, up, gate, dy = problem(20, 24, 16, torch.float32, device, generator)
        biases = (torch.randn(24, device=device), torch.randn(24, device=device))
        wide = [t.detach().double().requires_grad_() for t in (x, up, gate, *biases)]
        y = expected(wide[0], wide[1], wide[2], "gelu", (wide[3], wide[4]))
        reference = torch.autograd.grad(y, wide, dy.double())
        for backward in BACKWARDS:
            weight, bias = pack(up, gate, layout).requires_grad_(), pack(*biases, layout).requires_grad_()
            mine = gated_linear(x, weight, bias=bias, layout=layout, activation="gelu", backward=backward, precision="highest")
            dw, db = torch.autograd.grad(mine, (weight, bias), dy)
            assert_close(mine.detach(), y.detach())
            assert_close(dw, pack(reference[1], reference[2], layout), rms_tol=2e-6, max_tol=1e-5)
            assert_close(db, pack(reference[3], reference[4], layout), rms_tol=2e-6, max_tol=1e-5)


def test_empty(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    for shape, layout in product([(0, 4, 3), (5, 0, 3), (5, 4, 0)], LAYOUTS):
        rows, hidden, depth = shape
        x = torch.randn(2, rows, depth, device=device, requires_grad=True)
        weight = pack(torch.randn(hidden, depth), torch.randn(hidden, depth), layout).to(device).requires_grad_()
        bias = pack(torch.ones(hidden), torch.full((hidden,), 2.0), layout).to(device).requires_grad_()
        for backward in BACKWARDS:
            y = gated_linear(x, weight, bias=bias, layout=layout, activation="identity", backward=backward)
            assert y.shape == (2, rows, hidden)
            dx, dw, db = torch.autograd.grad(y.sum(), (x, weight, bias))
            assert (dx.shape, dw.shape, db.shape) == (x.shape, weight.shape, bias.shape)
            if depth == 0:
                assert bool((y == 2).all())
            assert bool((dw == 0).all()) or depth > 0


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
def test_infinities_and_nan_stay_in_their_rows(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    x, up, gate, _ = problem(20, 8, 24, torch.float32, device, generator)
    x[3, 5], x[7, 2] = torch.nan, torch.inf
    y = gated_linear(x, pack(up, gate, "interleaved"))
    assert bool(y[3].isnan().all())
    others = [i for i in range(20) if i not in (3, 7)]
    assert bool(y[others].isfinite().all())


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    """Of x, of both projections, and of y: the last rows are right."""
    rows, hidden, depth = (1 << 22) + 5, 520, 520
    x = torch.randn(rows, depth, device=device, dtype=torch.bfloat16)
    weight = torch.randn(2, hidden, depth, device=device, dtype=torch.bfloat16) / depth**0.5
    y = gated_linear(x, weight, layout="stacked")
    assert relative(y[-300:], expected(x[-300:], weight[0], weight[1], "silu")) < 2.0e-3


# ---- two weights ----------------------------------------------------------------------------------


HIDDEN, DEPTH = 24, 16
PLACES = ("together", "apart", "apart, gate first", "one tensor twice", "other strides")


def weights(place: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """up, gate ``[HIDDEN, DEPTH]``, parameters."""
    both = torch.randn(2, HIDDEN, DEPTH, device=device)
    if place == "together":
        up, gate = both
    elif place == "one tensor twice":
        up = gate = both[0]
    elif place == "other strides":
        up, gate = both[0].clone(), both[1].mT.contiguous().mT
    else:
        low, high = sorted([torch.empty_like(both[0]) for _ in range(2)], key=Tensor.data_ptr)
        up, gate = (low, high) if place == "apart" else (high, low)
        up.copy_(both[0])
        gate.copy_(both[1])
    return up.detach().requires_grad_(), gate.detach().requires_grad_()


def tensors(place: str, device: torch.device, whole: bool = True, bias: bool = True) -> list[Any]:
    """x, up, gate, bias, down, down_bias, all with a gradient."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    return [
        made(2, 3, DEPTH),
        *weights(place, device),
        made(2, HIDDEN) if bias else None,
        made(5, HIDDEN) if whole else None,
        made(5) if whole and bias else None,
    ]


def call(given: list[Any], backward: str = "save") -> Tensor:
    x, up, gate, bias, down, down_bias = given
    both = None if bias is None else (bias[0], bias[1])
    if down is None:
        return gated_linear(x, (up, gate), bias=both, backward=backward)
    return gated_mlp(x, (up, gate), down, bias=both, down_bias=down_bias, backward=backward)


def written_out(given: list[Any]) -> Tensor:
    x, up, gate, bias, down, down_bias = given
    linear = torch.nn.functional.linear
    up_bias, gate_bias = (None, None) if bias is None else bias
    y = linear(x, up, up_bias) * torch.nn.functional.silu(linear(x, gate, gate_bias))
    return y if down is None else linear(y, down, down_bias)


@pytest.mark.parametrize("place", PLACES)
def test_values_and_gradients(place: str, backend_name: str, device: torch.device) -> None:
    """Three times on other memory and numbers. The second and the third can be repetitions; nothing is copied or joined."""
    for whole, bias, backward in ((True, True, "save"), (False, False, "save"), (True, False, "recompute")):
        for _ in range(3):
            given = tensors(place, device, whole, bias)
            y = call(given, backward)
            double = [None if t is None else t.detach().double().requires_grad_() for t in given]
            expected = written_out(double)
            assert_close(y, expected, rms_tol=2e-6, max_tol=2e-5)
            dy = torch.randn_like(y)
            there = [i for i, t in enumerate(given) if t is not None]
            found = torch.autograd.grad(y, [given[i] for i in there], dy)
            for a, b in zip(found, torch.autograd.grad(expected, [double[i] for i in there], dy.double()), strict=True):
                assert_close(a, b, rms_tol=2e-6, max_tol=2e-5)
        # Gradients have memory of their own, as autograd's have.
        assert len({t.untyped_storage().data_ptr() for t in found}) == len(found)
        frozen = [given[0].detach(), given[1], given[2].detach(), *given[3:]]
        alone = torch.autograd.grad(call(frozen, backward), given[1], dy)
        assert_close(alone[0], found[1].double(), rms_tol=2e-6, max_tol=2e-5)


X, W = torch.randn(3, 4), torch.randn(5, 4)


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    ((W,), None, ValueError, "weight: expected a pair (up, gate); got 1 tensors, 0 of them None"),
    ((W, None), None, ValueError, "weight: expected a pair (up, gate); got 2 tensors, 1 of them None"),
    ((W, W[:4]), None, ValueError, "weight[1]: expected weight[0]'s shape (5, 4); got shape (4, 4)"),
    ((W, W.double()), None, TypeError, "weight[1]: expected x's dtype torch.float32; got torch.float64"),
    ((W[None], W[None]), None, ValueError, "weight[0]: expected [hidden, in]; got shape (1, 5, 4)"),
    ((W[:, :3], W[:, :3]), None, ValueError, "weight[0]: expected a last dimension of x's 4 inputs; got shape (5, 3)"),
    ((W, W), torch.ones(2, 5), TypeError, "bias: expected a pair (up, gate), since weight is one; got torch.Tensor"),
    ((W, W), (torch.ones(5), None), ValueError, "bias: expected a pair (up, gate); got 2 tensors, 1 of them None"),
    ((W, W), (torch.ones(5), torch.ones(4)), ValueError, "bias: expected a pair of shape (hidden,); got shapes (5,) and (4,)"),
    ((W, W), (torch.ones(4), torch.ones(4)), ValueError, "bias: expected shape (2, 5), that of the weight's rows; got shape (2, 4)"),
]


def test_refusals() -> None:
    for weight, bias, error, message in REFUSED:
        assert_refused(partial(gated_linear, X, weight, bias=bias), error, message)


# ---- a bias for each row ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_for_each_row(dtype: torch.dtype, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """Of a stacked weight and of a pair, contiguous and not; its gradient is that of the projections."""
    x, up, gate, dy = problem(10, 24, 8, dtype, device, generator)
    rows = torch.randn(2, 10, 24, generator=generator).to(device, dtype)
    for bias in (rows.transpose(0, 1), rows.transpose(0, 1).contiguous(), rows.mT.contiguous().mT.transpose(0, 1)):
        for weight in ((up, gate), torch.stack([up, gate])):
            for backward in ("save", "recompute"):
                leaves = [t.detach().clone().requires_grad_() for t in (x, up, gate)] + [bias.detach().requires_grad_()]
                pair = (leaves[1], leaves[2])
                given = pair if isinstance(weight, tuple) else torch.stack(pair)
                y = gated_linear(
                    leaves[0].view(2, 5, 8),
                    given,
                    bias=leaves[3].unflatten(0, (2, 5)),
                    layout="stacked",
                    backward=backward,
                    precision="highest",
                )
                wide = [t.detach().double().requires_grad_() for t in leaves]
                right = (wide[0] @ wide[1].mT + wide[3][:, 0]) * torch.nn.functional.silu(wide[0] @ wide[2].mT + wide[3][:, 1])
                found = torch.autograd.grad(y, leaves, dy.view(2, 5, 24))
                expected = torch.autograd.grad(right, wide, dy.double())
                for actual, wanted in zip((y.flatten(0, 1), *found), (right, *expected), strict=True):
                    assert relative(actual, wanted.detach()) < (1e-6 if dtype == torch.float32 else 2e-2)


def test_a_bias_for_the_one_row_of_a_vector() -> None:
    x, up, gate, bias = torch.randn(8), torch.randn(6, 8), torch.randn(6, 8), torch.randn(2, 6)
    want = (up.double() @ x.double() + bias[0]) * torch.nn.functional.silu(gate.double() @ x.double() + bias[1])
    assert_close(gated_linear(x, (up, gate), bias=bias), want)
    assert_close(gated_linear(x, torch.stack([up, gate]), bias=bias, layout="stacked"), want)
    arrays = [t.numpy() for t in (x, up, gate, bias)]
    assert_close(torch.tensor(gated_linear(arrays[0], (arrays[1], arrays[2]), bias=arrays[3])), want)


def test_a_bias_for_each_row_in_transforms() -> None:
    x, weight, bias = torch.randn(3, 5, 8), torch.randn(2, 6, 8), torch.randn(3, 5, 2, 6)

    def call(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return gated_linear(x, weight, bias=bias, layout="stacked")

    expected = torch.stack([call(a, b) for a, b in zip(x, bias, strict=True)])
    torch.testing.assert_close(torch.func.vmap(call)(x, bias), expected)
    torch.testing.assert_close(torch.func.vmap(call, (0, None))(x, bias[0]), torch.stack([call(a, bias[0]) for a in x]))
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(x, bias), call(x, bias))
    leaves = [t.double().requires_grad_() for t in (x, bias)]
    wide = weight.double()
    assert torch.autograd.gradgradcheck(lambda x, bias: gated_linear(x, wide, bias=bias, layout="stacked"), leaves, fast_mode=True)
    with pytest.raises(ValueError, match=r"bias: expected shape \(2, 6\), that of the weight's rows; got shape \(5, 2, 6\)"):
        call(x, bias[0])
    with pytest.raises(ValueError, match=r"bias: expected shape \(12,\)"):
        gated_linear(x, weight.flatten(0, 1), bias=bias)
