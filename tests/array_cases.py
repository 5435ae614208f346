"""Random NumPy arrays and their upcast, for the tests of arrays in and out."""

import numpy as np


def draw(rng, shape, dtype):
    a = rng.standard_normal(shape)
    return (a + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else a).astype(dtype)


def wide(a):
    return a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)
