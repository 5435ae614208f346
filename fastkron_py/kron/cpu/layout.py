"""The integers that the kernel takes, as Python and numba both count them.

`kernels.stage` takes a head and its steps:

==========  ================================================================================================
0, 1        units claimed, threads begun: 0 at first
2 to 6      x: address, strides of groups, rows and of the elements of a row; the kind of its elements
7 to 11     y: the same
12 to 15    rows, columns, elements of a row of x, and of y
16, 17      rows and columns of a unit
18 to 21    units, blocks of rows, chunks of columns, steps
22, 23      scratch: address, bytes of one of the two buffers of a thread
==========  ================================================================================================

A step is a matrix: its address, strides of groups, P and Q, sizes P and Q, and the elements before and after its mode.

`kernels.form` takes the number of matrices that it writes. Each has its address, groups, the bits of its scale, and two factors: address
(0 for none), strides of groups, P and Q, sizes P and Q, kind. An address is 0 where the factor is a 1.
"""

from __future__ import annotations

from typing import Final

HEAD: Final = 24
STEP: Final = 8
FACTOR: Final = 7
FORM: Final = 3 + 2 * FACTOR

# Kinds of elements: those that the kernel computes with, and the half types.
SAME: Final = 0
HALF: Final = 1
BFLOAT16: Final = 2
