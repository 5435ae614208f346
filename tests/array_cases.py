"""Random NumPy arrays and their upcast, for the tests of arrays in and out."""

import numpy as np


def draw(rng, shape, dtype):
    a = rng.standard_normal(shape)
    return (a + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else a).astype(dtype)


def wide(a):
    return a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)


def problem(rng, dtype):
    """x [7, 12], and factors of 12 rows and 10 columns."""
    return draw(rng, (7, 12), dtype), [draw(rng, s, dtype) for s in ((3, 2), (4, 5))]
