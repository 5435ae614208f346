"""NumPy and CuPy arrays in, the same kind out: the right numbers, without copies, on the caller's stream."""

import fractions
import gc
import itertools
import warnings

import numpy as np
import pytest
import torch
from array_cases import draw, problem, wide

from fastkron_py import KroneckerProduct, kron_matmul, mode_matmul
from fastkron_py.runtime import arrays
from fastkron_py.testing import assert_close

DTYPES = ["float16", "float32", "float64", "complex64", "complex128"]


def check(y, x, factors, *, left=False):
    """y is a fresh NumPy array of x's dtype, with the values of numpy.kron."""
    assert type(y) is np.ndarray
    assert y.dtype == x.dtype.newbyteorder("=")
    assert y.dtype.isnative
    assert y.flags.writeable
    assert y.flags.c_contiguous
    k = np.kron(*[wide(f) for f in factors])
    assert_close(y, k @ wide(x) if left else wide(x) @ k, steps=2)


# ---- NumPy -------------------------------------------------------------------------------------------------------------


LAYOUTS = {
    "fortran": np.asfortranarray,
    "strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "rows reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "columns reversed": lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "other byte order, reversed": lambda a: a.astype(a.dtype.newbyteorder())[::-1][::-1],
    "field of records": lambda a: records(a)["value"],
    "unaligned": lambda a: unaligned(a),
    "read-only": lambda a: read_only(a),
}


def records(a):
    """Elements that stand 1 byte further apart than their size: no multiple of it."""
    r = np.zeros(a.shape, dtype=[("flag", "i1"), ("value", a.dtype)])
    r["value"] = a
    return r


def unaligned(a):
    raw = np.zeros(a.nbytes + 1, np.uint8)[1:]
    raw[:] = np.ascontiguousarray(a).view(np.uint8).ravel()
    return raw.view(a.dtype).reshape(a.shape)


def read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


def test_layouts(rng):
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        x, factors = problem(rng, dtype)
        odd_x, odd_factors = LAYOUTS[layout](x), [LAYOUTS[layout](f) for f in factors]
        assert np.array_equal(odd_x, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(kron_matmul(odd_x, odd_factors), x, factors)
            check(kron_matmul(x, odd_factors), x, factors)
        assert np.array_equal(odd_x, x)


def test_inputs_are_viewed_not_copied(rng):
    for dtype, layout in itertools.product(DTYPES, ["fortran", "strided", "transposed", "read-only"]):
        a = LAYOUTS[layout](draw(rng, (6, 4), dtype))
        bridge = arrays.find_bridge([a], ["x"])
        t = bridge.load(a, "x")
        assert t.data_ptr() == a.__array_interface__["data"][0]
        assert t.shape == a.shape
        assert [s * t.element_size() for s in t.stride()] == list(a.strides)


def test_broadcast_input_is_viewed(rng):
    row = draw(rng, (1, 12), "float64")
    x = np.broadcast_to(row, (100, 12))  # read-only, with a stride of 0
    assert arrays.find_bridge([x], ["x"]).load(x, "x").data_ptr() == row.__array_interface__["data"][0]
    factors = problem(rng, "float64")[1]
    check(kron_matmul(x, factors), x, factors)


def test_results_share_the_tensors_memory_and_outlive_it():
    t = torch.arange(6.0).reshape(2, 3)
    pointer = t.data_ptr()
    a = arrays.find_bridge([np.zeros(1)], ["x"]).give_back(t)
    assert a.__array_interface__["data"][0] == pointer
    del t
    gc.collect()
    assert a.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_view_keeps_a_read_only_array_alive():
    t = arrays.find_bridge([np.zeros(1)], ["x"]).load(read_only(np.arange(1000.0)), "x")
    gc.collect()
    assert t.sum() == 499500


def test_subclasses_mean_something_and_are_refused(recwarn):
    for a in (np.matrix(np.eye(4)), np.ma.masked_array(np.eye(4), mask=np.eye(4) > 0), np.eye(4).view(np.recarray)):
        with pytest.raises(TypeError, match=r"factors\[0\]: expected a plain numpy.ndarray; got numpy\."):
            kron_matmul(np.ones((2, 4)), [a])


def test_numpy_scalars_are_numbers(rng):
    x, factors = problem(rng, "float32")
    k, z = np.kron(*[wide(f) for f in factors]), draw(rng, (7, 10), "float32")
    expected = 2 * wide(x) @ k + 0.5 * wide(z)
    for two, half in [
        (np.float32(2), np.float16(0.5)),
        (np.int8(2), np.float64(0.5)),
        (2, fractions.Fraction(1, 2)),
        (np.longdouble(2), 0.5),
    ]:
        y = kron_matmul(x, factors, alpha=two, beta=half, z=z)
        assert y.dtype == np.float32
        assert_close(y, expected)
        tensors = [torch.from_numpy(f) for f in factors]
        assert_close(kron_matmul(torch.from_numpy(x), tensors, alpha=two, beta=half, z=torch.from_numpy(z)), expected)
    c, factors = problem(rng, "complex64")
    assert_close(kron_matmul(c, factors, alpha=np.complex64(1 + 2j)), (1 + 2j) * wide(c) @ np.kron(*[wide(f) for f in factors]))


def test_operator_on_numpy(rng):
    for dtype in DTYPES:
        x, factors = problem(rng, dtype)
        k = KroneckerProduct(factors)
        assert k.dtype == dtype
        assert k.device == "cpu"
        check(x @ k, x, factors)
        left = draw(rng, (10, 3), dtype)
        check(k @ left, left, factors, left=True)
        check(k.mT.mT @ left, left, factors, left=True)
        check(left.conj().T @ k.mH, left.conj().T, [f.conj().T for f in factors])
        assert_close(k.to_dense(), np.kron(*[wide(f) for f in factors]))
        scaled = np.float32(2) * k
        assert scaled.dtype == dtype
        assert type(scaled.factors[0]) is np.ndarray
        assert_close((scaled / 4).to_dense(), np.kron(*[wide(f) for f in factors]) / 2)
        assert not k.requires_grad


def test_algebra_on_numpy(rng):
    factors = [rng.standard_normal((n, n)) + 4 * np.eye(n) for n in (2, 3)]
    k, dense = KroneckerProduct([read_only(f) for f in factors]), np.kron(*factors)
    b = rng.standard_normal((6, 2))
    close = {"rtol": 1e-12, "atol": 1e-12}
    for got, expected in [
        (k.solve(b), np.linalg.solve(dense, b)),
        (k.diagonal(), np.diagonal(dense)),
        (k.inverse().to_dense(), np.linalg.inv(dense)),
    ]:
        assert type(got) is np.ndarray
        np.testing.assert_allclose(got, expected, **close)
    for got, expected in [(k.trace(), np.trace(dense)), (k.logdet(), np.linalg.slogdet(dense)[1]), (k.norm(), np.linalg.norm(dense))]:
        assert type(got) is np.float64
        np.testing.assert_allclose(got, expected, **close)
    values, vectors = KroneckerProduct([f @ f.T for f in factors]).eigh()
    assert type(values) is np.ndarray
    assert type(vectors.factors[0]) is np.ndarray
    np.testing.assert_allclose(np.sort(values), np.linalg.eigvalsh(dense @ dense.T), rtol=1e-10)
    assert not k.mT.factors[0].flags.writeable  # a view of a read-only array stays read-only
    assert k.clone().factors[0].flags.writeable


def test_other_libraries_are_refused():
    for name in ["jax", "dask"]:
        array = type(
            "Array", (), {"__module__": f"{name}.array", "shape": (2, 2), "dtype": np.dtype("float32"), "__array__": lambda self: np.eye(2)}
        )()
        with pytest.raises(TypeError, match=rf"x: expected a torch tensor, a NumPy array or a CuPy array; got {name}\.array\.Array"):
            kron_matmul(array, [array])
        with pytest.raises(TypeError, match=rf"factors\[0\]: expected a NumPy array, like x; got {name}\.array\.Array"):
            kron_matmul(np.eye(2), [array])


# ---- read-only memory --------------------------------------------------------------------------------------------------------------------


def test_memory_that_may_not_be_written_to_is_not_given_back_as_writable(rng, tmp_path):
    """Verbs that return their input or a view of it; a write to a mapped file's memory would end the process."""
    np.arange(12.0).tofile(tmp_path / "file")
    m = np.memmap(tmp_path / "file", dtype=np.float64, mode="r", shape=(3, 4))
    f, s = read_only(rng.standard_normal((4, 4))), read_only(rng.random(4))
    product = KroneckerProduct([3, f]) @ KroneckerProduct([read_only(np.eye(3)), 4])
    shifted = KroneckerProduct([f]).add_diagonal(KroneckerProduct([read_only(np.diag(s))]))
    for y in (mode_matmul(m, {}), *product.factors, *shifted._diagonals, *shifted.mT._arrays, KroneckerProduct([m]).mT.factors[0]):
        with pytest.raises(ValueError, match="read-only"):
            y[...] = 5
    own = rng.standard_normal((3, 4))
    y = mode_matmul(own, {})
    y[0, 0] = 5
    assert own[0, 0] == 5
    for y in (mode_matmul(m, {1: f}), KroneckerProduct([f]).diagonal(), KroneckerProduct([f]).to_dense()):
        y[...] = 5


def test_errors_name_dtypes_as_numpy_does(rng):
    x, factors = problem(rng, "float64")
    for call in (
        lambda: kron_matmul(x, [f.astype("float32") for f in factors]),
        lambda: mode_matmul(x, {1: factors[0].astype("float32")}),
        lambda: KroneckerProduct([factors[0], factors[1].astype("float32")]),
        lambda: KroneckerProduct([np.eye(3)]).add_diagonal(np.ones(3, "float32")),
    ):
        with pytest.raises(TypeError, match="float64; got float32") as caught:
            call()
        assert "torch" not in str(caught.value)
    with pytest.raises(TypeError, match=r"torch\.float64; got torch\.float32"):
        kron_matmul(torch.from_numpy(x), [torch.from_numpy(f).float() for f in factors])
