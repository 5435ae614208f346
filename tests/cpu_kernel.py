"""Importing this compiles the CPU kernel, or loads it from numba's cache; processes that are forked afterwards have it."""

from fastkron_py.kron.cpu import compiled

compiled.waits = True
for itemsize in (4, 8):
    compiled.kernel(itemsize)
