"""CuPy arrays in, CuPy arrays out, on the caller's stream: with CuPy on a GPU, and with NumPy playing CuPy anywhere."""

import contextlib
import sys
import types

import numpy as np
import pytest
import torch
from array_cases import problem, wide

from fastkron_py import KroneckerProduct, kron_matmul
from fastkron_py.runtime import arrays, torch_internals
from fastkron_py.testing import assert_close


def check(y, x, factors):
    """y is a NumPy array of x's dtype, with the values of numpy.kron."""
    assert y.dtype == x.dtype
    assert_close(y, wide(x) @ np.kron(*[wide(f) for f in factors]), steps=2)


# ---- CuPy, played by NumPy: which stream, which device, no waiting -------------------------------------------------------


class FakeArray:
    """A CuPy array as far as the bridge looks at one, over NumPy's memory."""

    def __init__(self, array, device=3):
        self.array, self.device = array, types.SimpleNamespace(id=device)
        self.shape, self.dtype, self.strides, self.size = array.shape, array.dtype, array.strides, array.size

    def copy(self, order):
        return FakeArray(np.array(self.array, order=order), self.device.id)

    def __dlpack__(self, *, stream):
        log.append(("export", stream))
        return torch.from_numpy(self.array).__dlpack__()


log: list[object] = []


@contextlib.contextmanager
def logged(*what):
    log.append(("enter", *what))
    yield
    log.append(("exit", *what))


@pytest.fixture(params=[0, 1, 2, 0x7F00], ids=["null", "legacy", "per thread", "own"])
def fake_cupy(request, monkeypatch):
    log.clear()
    torch_internals.obstacle()  # torch's private names are tried once, with torch as it is
    stream = types.SimpleNamespace(ptr=request.param)
    cupy = types.ModuleType("cupy")
    cupy.ndarray = FakeArray
    cupy.cuda = types.SimpleNamespace(Device=lambda i: logged("cupy device", i), get_current_stream=lambda: log.append("asked") or stream)

    def from_dlpack(producer):
        capsule = producer.__dlpack__(stream=request.param, max_version=(1, 0))
        log.append(("import", producer.__dlpack_device__()[1]))
        return FakeArray(torch.utils.dlpack.from_dlpack(capsule).numpy())

    cupy.from_dlpack = from_dlpack
    cupy.empty = lambda shape, dtype: FakeArray(np.empty(shape, dtype))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    monkeypatch.setattr(torch.cuda, "device", lambda i: logged("torch device", i))
    monkeypatch.setattr(torch.cuda, "stream", lambda s: logged("torch stream", s))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    return request.param


def test_cupy_work_runs_on_its_current_stream(fake_cupy, rng):
    x, factors = problem(rng, "float32")
    y = kron_matmul(FakeArray(x), [FakeArray(factors[0]), FakeArray(factors[1][::-1])])
    assert isinstance(y, FakeArray)
    assert_close(y.array, wide(x) @ np.kron(wide(factors[0]), wide(factors[1][::-1])))
    stream = ("default", 3) if fake_cupy in (0, 1) else (fake_cupy, 3)
    device, torch_device, torch_stream = ("cupy device", 3), ("torch device", 3), ("torch stream", stream)
    # Everything lies inside the three contexts, and no side asks the other to wait (-1).
    assert log == [
        ("enter", *device),
        "asked",
        ("enter", *torch_device),
        ("enter", *torch_stream),
        *[("export", -1)] * 3,
        ("import", 0),
        ("exit", *torch_stream),
        ("exit", *torch_device),
        ("exit", *device),
    ]


def test_cupy_refusals(fake_cupy, rng):
    x, factors = problem(rng, "float32")
    with pytest.raises(TypeError, match=r"factors\[0\]: expected a CuPy array, like x; got numpy.ndarray"):
        kron_matmul(FakeArray(x), factors)
    with pytest.raises(TypeError, match=r"factors\[1\]: expected a NumPy array, like x; got .*FakeArray"):
        kron_matmul(x, [factors[0], FakeArray(factors[1])])
    with pytest.raises(TypeError, match=r"x: expected a dtype among .*; got an array of int64"):
        kron_matmul(FakeArray(x.astype(np.int64)), [FakeArray(f) for f in factors])


def test_cupy_without_a_gpu_in_torch(fake_cupy, monkeypatch, rng):
    x, factors = problem(rng, "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CuPy arrays need a torch that can use the GPU"):
        kron_matmul(FakeArray(x), [FakeArray(f) for f in factors])


# ---- CuPy itself ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_cupy_arrays(cupy, rng, dtype):
    x, factors = problem(rng, dtype)
    device = [cupy.asarray(f) for f in factors]
    y = kron_matmul(cupy.asarray(x), device)
    assert isinstance(y, cupy.ndarray)
    check(y.get(), x, factors)
    check(kron_matmul(cupy.asarray(x)[::-1], device).get(), x[::-1], factors)
    check((cupy.asarray(x) @ KroneckerProduct(device)).get(), x, factors)
    assert kron_matmul(cupy.zeros((0, 12), dtype), device).shape == (0, 10)


@pytest.mark.gpu
def test_cupy_results_are_ordered_on_the_callers_stream(cupy, rng):
    """On a stream that is busy, inputs are written after the call was issued would read them, were it not in order."""
    n = 2**22
    for _ in range(10):
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros((n // 16, 16), "float32")
            for i in range(50):
                x += i
            y = kron_matmul(x, [cupy.eye(4, dtype="float32")] * 2)
            x.fill(cupy.nan)
            y += 1
            assert float(y.min()) == float(y.max()) == 1226


@pytest.mark.gpu
def test_cupy_memory_is_shared(cupy):
    x = cupy.arange(12, dtype="float32").reshape(3, 4)
    bridge = arrays.find_bridge([x], ["x"])
    with bridge.context():
        t = bridge.load(x, "x")
        assert t.data_ptr() == x.data.ptr
        assert torch.cuda.current_stream().cuda_stream == cupy.cuda.get_current_stream().ptr
        back = bridge.give_back(t)
    assert back.data.ptr == x.data.ptr
    assert kron_matmul(x, [cupy.eye(2, dtype="float32")] * 2).data.ptr != x.data.ptr
