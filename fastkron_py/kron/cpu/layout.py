"""The integers that the kernel takes, as Python and numba both count them.

`kernels.stage` takes a head and its steps:

==========  ================================================================================================
0, 1        parts claimed, threads begun: 0 at first
2 to 6      x: address, strides of groups, rows and of the elements of a row; the kind of its elements
7 to 11     what is written, y or dx: the same
12 to 15    rows, columns, elements of a row of x, and of y
16, 17      rows and columns of a unit
18 to 20    groups, units of a group, parts of a group: what a thread claims, one unit or some
21          chunks of columns
22, 23      steps, and how many of them are taken: of gradients, those before the last factor whose gradient is wanted
24 to 26    scratch: address, bytes of a buffer, buffers of a thread, and one more in which products are turned
27 to 31    dy, for gradients: as x; the address is 0 for products
32, 33      sums of the gradients of matrices: address, elements of those of a part
==========  ================================================================================================

A step is a matrix: its address, strides of groups, P and Q, sizes P and Q, and the elements before and after its mode. For gradients there
follow the matrix transposed (address, strides of groups, Q and P; an address of 0 ends the way back), and where the gradient's sum begins
among the elements of a part, or -1 if it is not wanted. Last come whether the matrix's rows are its vectors though elements follow, and
whether the gradient is ``[Q, P]``.

`kernels.form` takes the number of matrices that it writes. Each has its address, groups, the bits of its scale, the kind of the second
factor's elements, and two factors: address, strides of groups, P and Q, sizes P and Q. An address is 0 where the factor is a 1.

`kernels.split` takes the number of matrices, the bits of a scale, and the address of an element of scratch. A matrix has the address of
its sum, that of the first part, groups, parts, elements of all matrices of a part, and its own, strides of P and Q, and the number of its
factors. These follow from the last to the first: the product of those before it, as in `form`, or an address of 0; the factor; the address
of its gradient, or 0, and strides of P and Q; and the address of the gradient of the product of those before it, or 0.
"""

from __future__ import annotations

from typing import Final

HEAD: Final = 34
STEP: Final = 15
FACTOR: Final = 6
FORM: Final = 4 + 2 * FACTOR
SUM: Final = 9
SPLIT: Final = 2 * FACTOR + 4

# Kinds of elements: those that the kernel computes with, and the half types.
SAME: Final = 0
HALF: Final = 1
BFLOAT16: Final = 2
