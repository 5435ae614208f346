"""What every layer must do, each stated once over the table of layers."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from sampling import in_full
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fastkron_py.nn import GRKAN, KAN, GatedMLP, GroupRational, LoKrConv2d, LoKrLinear, PolyKANConv2d, PolyKANLinear, SplineKANLinear
from fastkron_py.testing import assert_close


class Layer(NamedTuple):
    """A layer: how it is made, and its input's shape."""

    make: Callable[..., nn.Module]
    shape: tuple[int, ...]


def _merged(layer: LoKrLinear) -> nn.Module:
    layer.merge()
    return layer


def _trained(module: nn.Module) -> nn.Module:
    """The layer with random parameters, as training leaves it: an adapter begins with zeros."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) / 4)
    return module


def _lokr(**options: Any) -> LoKrLinear:
    layer = LoKrLinear(12, 10, 2, factor=2, **options)
    return _trained(layer)  # type: ignore[return-value]


def _conv(**options: Any) -> LoKrConv2d:
    return _trained(LoKrConv2d(4, 6, 3, 2, factor=2, **options))  # type: ignore[return-value]


LAYERS: dict[str, Layer] = {
    "GatedMLP": Layer(lambda **o: GatedMLP(8, 6, **o), (5, 8)),
    "GatedMLP, stacked, recomputing": Layer(lambda **o: GatedMLP(8, 6, layout="stacked", backward="recompute", **o), (2, 3, 8)),
    "LoKrLinear": Layer(_lokr, (5, 12)),
    "LoKrLinear, merged": Layer(lambda **o: _merged(_lokr(**o)), (5, 12)),
    "LoKrConv2d": Layer(_conv, (2, 4, 6, 5)),
    "PolyKANLinear": Layer(lambda **o: PolyKANLinear(6, 5, 4, **o), (5, 6)),
    "PolyKANLinear in a range": Layer(lambda **o: PolyKANLinear(6, 5, 5, "bspline", bias=True, **o), (5, 6)),
    "KAN": Layer(lambda **o: KAN([6, 4, 3], 4, **o), (5, 6)),
    "PolyKANConv2d": Layer(lambda **o: PolyKANConv2d(3, 4, 3, 3, **o), (2, 3, 6, 5)),
    "SplineKANLinear": Layer(lambda **o: SplineKANLinear(6, 5, **o), (5, 6)),
    "GroupRational": Layer(lambda **o: GroupRational(8, 2, **o), (5, 8)),
    "GRKAN": Layer(lambda **o: GRKAN(8, 16, 6, num_groups=2, **o), (5, 8)),
}

WITH_RANGES = [name for name, layer in LAYERS.items() if any(True for _ in layer.make().buffers())]  # which training changes
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
every = pytest.mark.parametrize("name", list(LAYERS))


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """A layer in evaluation mode and an input."""
    layer = LAYERS[name]
    module = layer.make(dtype=dtype).to(DEVICE)
    return (module if "merged" in name else _trained(module)).eval(), torch.randn(layer.shape, dtype=dtype, device=DEVICE)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Of x and the parameters; a merged layer's adapter takes no part."""
    x = x.clone().requires_grad_()
    leaves = [x, *[p for p in module.parameters() if p.requires_grad]]
    return list(torch.autograd.grad(module(x).square().sum(), leaves, allow_unused=True, materialize_grads=True))


@every
def test_copies(name: str) -> None:
    """deepcopy and pickle give a layer of its own, with the same results and gradients."""
    module, x = made(name)
    y = module(x)  # what a call keeps must not be in the way
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_close(copied(x), y)
        for mine, theirs in zip(gradients(copied, x), gradients(module, x), strict=True):
            assert_close(mine, theirs)
        with torch.no_grad():
            for p in copied.parameters():
                p.zero_()
        assert_close(module(x), y)


@every
def test_state(name: str) -> None:
    """A state goes through a file, read with weights_only, into another layer of the same configuration."""
    module, x = made(name)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other, _ = made(name)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_close(other(x), module(x))


@every
def test_dtypes_and_devices(name: str) -> None:
    """Moved to float32 a layer computes the same; on meta it knows the shape."""
    module, x = made(name)
    y = module(x)
    assert_close(copy.deepcopy(module).float()(x.float()), y, rms_tol=1e-5, max_tol=1e-4)
    meta = copy.deepcopy(module).to("meta")(x.to("meta"))
    assert (meta.shape, meta.dtype) == (y.shape, y.dtype)


@every
def test_half_precision(name: str) -> None:
    module, x = made(name, torch.float32)
    y = module(x)
    for dtype in (torch.bfloat16, torch.float16):
        low = copy.deepcopy(module).to(dtype)(x.to(dtype))
        assert low.dtype == dtype
        assert_close(low.float(), y, rms_tol=0.1, max_tol=0.5)


@pytest.mark.parametrize(("name", "training"), [*[(name, False) for name in LAYERS], *in_full([(name, True) for name in WITH_RANGES])])
def test_compiled_once_for_all_batches(name: str, training: bool) -> None:
    module, x = made(name)
    module.train(training)(x)  # with a range, where it has one
    other = copy.deepcopy(module)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    compilations = []  # Dynamo may restart within the first one
    for rows in (2, 5, 17):
        x = torch.randn(rows, *x.shape[1:], dtype=x.dtype, device=x.device)
        for mine, theirs in zip([compiled(x), *gradients(compiled, x)], [other(x), *gradients(other, x)], strict=True):
            assert_close(mine, theirs, rms_tol=1e-12, max_tol=1e-11)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1
    for mine, theirs in zip(module.buffers(), other.buffers(), strict=True):
        assert_close(mine, theirs)


def empty(module: nn.Module) -> nn.Module:
    """Full of NaN."""
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            t.fill_(math.nan)
    return module


@pytest.mark.parametrize("name", [name for name in LAYERS if "merged" not in name])
def test_made_without_memory(name: str) -> None:
    """On the device meta, by argument or context, or of fake tensors; then given memory, and initialised or loaded."""
    real, x = made(name)
    make = LAYERS[name].make
    with torch.device("meta"):
        by_context = make(dtype=torch.float64)
    with FakeTensorMode():
        fake = make(dtype=torch.float64)
        shape = fake(torch.empty(x.shape, dtype=x.dtype)).shape
    assert shape == real(x).shape
    for made_so in (make(dtype=torch.float64, device="meta"), by_context):
        assert made_so(x.to("meta")).is_meta
        loaded = empty(made_so.to_empty(device=DEVICE))
        loaded.load_state_dict(real.state_dict())
        assert torch.equal(loaded.eval()(x), real(x))
        for module in empty(loaded).modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert bool(loaded(x).isfinite().all())
    fake.load_state_dict(real.state_dict(), assign=True)
    assert torch.equal(fake.eval()(x), real(x))
    assert bool(make(dtype=torch.float64).to(DEVICE)(x).isfinite().all())  # nothing fake was kept for later


@every
@pytest.mark.parametrize("strict", [False, True])
def test_exported(name: str, strict: bool) -> None:
    module, x = made(name)
    for training in (False, True):
        module.train(training)(x)
        program = torch.export.export(module, (torch.randn_like(x),), strict=strict)
        # Which torch.export.save refuses, depending on what the process has traced before.
        regions = [node for node in program.graph.nodes if "set_grad_enabled" in str(node.target)]
        assert all(node.users for node in regions)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        assert_close(torch.export.load(file).module()(x), module(x))


@every
def test_traced(name: str) -> None:
    module, x = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of jit
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of checks on sizes, which are constants of a trace
        for trains in (True, False):
            with torch.set_grad_enabled(trains):  # torch traces again without gradients, and compares the graphs
                traced = torch.jit.trace(module, (torch.randn_like(x),))
            assert_close(traced(x), module(x))
            for mine, theirs in zip(gradients(traced, x), gradients(module, x), strict=True):
                assert_close(mine, theirs, rms_tol=1e-12, max_tol=1e-11)


@every
def test_functional_call_and_vmap_over_models(name: str) -> None:
    """Ensembles by torch.func: one call over stacked parameters."""
    module, x = made(name)
    models = [module, *[_perturbed(module) for _ in range(2)]]
    parameters, buffers = torch.func.stack_module_state(models)

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(module, (parameters, buffers), (x,))
        return y

    y = torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    for i, model in enumerate(models):
        assert_close(y[i], model(x), rms_tol=1e-12, max_tol=1e-11)


@every
def test_scripted(name: str) -> None:
    """TorchScript has no types for the operators, and the error says what has; in a model too."""
    for module in (made(name)[0], nn.Sequential(made(name)[0])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of jit
            with pytest.raises(TypeError, match=r"torch.jit.script: expected a module for torch.jit.trace, .*; got \w+$"):
                torch.jit.script(module)


@every
def test_functional_call_in_a_graph(name: str) -> None:
    """Of a layer inside a model, with other parameters: Dynamo sees dictionaries of modules change."""
    module, x = made(name)
    model, other = nn.Sequential(module), _perturbed(module)
    torch._dynamo.reset()  # its limit of recompilations is for all layers together

    @torch.compile(backend="eager", fullgraph=True)
    def call(parameters: Any, x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, parameters, (x,))
        return y

    for each in (module, other):
        parameters = {f"0.{n}": p for n, p in each.named_parameters()}
        assert_close(call(parameters, x), each(x), rms_tol=1e-12, max_tol=1e-11)


def _perturbed(module: nn.Module) -> nn.Module:
    """Another model of the same configuration; a merged layer's base stays merged with its adapter."""
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(1.125)
    return copied


@every
def test_default_device_and_inference_mode(name: str) -> None:
    """A layer called first under a mode computes and trains as usual afterwards."""
    module, x = made(name)
    expected = copy.deepcopy(module)(x)
    with torch.inference_mode():
        assert_close(module(x), expected)
    with torch.device("meta"):
        y = module(x)
    assert_close(y, expected)
    assert all(g.device == x.device for g in gradients(module, x))


@every
def test_no_rows(name: str) -> None:
    module, x = made(name)
    y = module(x[:0])
    assert y.shape == (0, *module(x).shape[1:])
    assert not any(g.any() for g in gradients(module, x[:0]))


@every
def test_autocast(name: str) -> None:
    module, x = made(name, torch.float32)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = module(x)
        assert_close(y.float(), module(x).float())
    assert_close(y.float(), module(x), rms_tol=0.1, max_tol=0.5)
