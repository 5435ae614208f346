"""Fixtures of the whole suite: where it runs, with which backend, on which random numbers, over poisoned memory."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

# cuBLAS reads this when its handle is made; deterministic algorithms need it (see `poison`).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# The closed form chooses, whatever this machine's user has tuned; tests of tuning use `tables`.
os.environ["FASTKRON_TUNING"] = "off"

import numpy as np
import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it is set before any test module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers of several test files: shapes_list

import clean_caches
from cache_spy import CacheSpy
from sampling import mark_unsampled

import fastkron_py
from fastkron_py.kron.cpu import compiled
from fastkron_py.runtime import torch_internals

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # The same examples for everyone who runs the suite, however slow the machine is.
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]
    settings.register_profile("suite", derandomize=True, database=None, deadline=None, suppress_health_check=checks)
    settings.load_profile("suite")

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU and importlib.util.find_spec("triton"):
    import fast_interpreter

    fast_interpreter.install()

if os.environ.get("PYTEST_XDIST_WORKER") and not HAS_GPU:
    torch.set_num_threads(1)  # one core for each worker; more only makes them wait for each other


def pytest_configure(config: pytest.Config) -> None:
    """Tests wait for the CPU kernel: else torch's products serve the first calls of a process, however many they are.

    What starts workers compiles it for all of them while they collect. In a new checkout that takes nine seconds, which each would need.
    """
    starts_workers = bool(config.getoption("numprocesses", None)) and not os.environ.get("PYTEST_XDIST_WORKER")
    compiled.waits = not starts_workers
    if starts_workers:
        for itemsize in (4, 8):
            compiled.kernel(itemsize)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is collected is garbage, and it is much to look at again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rest = mark_unsampled(items)
    if HAS_GPU:
        return
    config.hook.pytest_deselected(items=rest)
    left_out = set(rest)
    items[:] = [item for item in items if item not in left_out]
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Leave the modules and thousands of collected cases out of garbage collection, which else looks at them all each time."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # bindings complain of objects that are still there then; not before: pytest collects when it ends


@pytest.fixture(autouse=True)
def tried_names() -> None:
    """Torch's private names are tried before a test may replace a function of torch that the trials call; the result is kept."""
    torch_internals.failures()


@pytest.fixture(autouse=True)
def empty_caches(tried_names: None) -> None:
    """Each test begins with no kept call, program or constant: what an earlier test left there hides a fault in how it is made."""
    clean_caches.empty()


@pytest.fixture
def device() -> torch.device:
    """CUDA where there is a GPU, else the CPU (where Triton kernels are interpreted)."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once inside ``fastkron_py.backend(...)`` of each backend."""
    with fastkron_py.backend(request.param):
        yield request.param


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheSpy]:
    """Counts the calls that the call cache serves, in Triton's backend."""
    with fastkron_py.backend("triton"):
        yield CacheSpy(monkeypatch)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed torch's generators from the test's name: the same numbers alone, in order and under xdist."""
    value = zlib.crc32(request.node.nodeid.encode())
    if HAS_GPU:
        torch.manual_seed(value)
    else:  # the above writes down the stack for each kind of device that is not there, and keeps it
        torch.default_generator.manual_seed(value)
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """NumPy's, of the test's own."""
    return np.random.default_rng(seed)


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """A CPU generator of the test's own."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for the user's tuning table, which is in use during the test. The table's path."""
    from fastkron_py.kron.tune import table
    from fastkron_py.runtime.call_cache import CACHE

    def forget() -> None:
        table.forget()
        CACHE.forget()

    monkeypatch.setenv("FASTKRON_CACHE_DIR", str(tmp_path / "tables"))
    monkeypatch.delenv("FASTKRON_TUNING")
    forget()
    path = table.cache_file()
    assert path is not None
    yield path
    forget()


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill what torch.empty and its kin return with NaN, so that an element no kernel wrote shows.

    torch does this itself under deterministic algorithms: in C++, hence also for allocations that
    no Python name would catch, and without a patch in the way of torch.compile.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
