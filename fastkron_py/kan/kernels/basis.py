"""A basis as kernels take it, in Triton and in Gluon: one constant, BASIS, and what is done with it.

BASIS is a `DeviceBasis`. To Triton up to 3.7 an element of it is a number, which is handed on as a constant only by a name.
"""

import triton
import triton.language as tl

TERMS_AT = tl.constexpr(0)  # places in BASIS
FIRST_AT = tl.constexpr(1)


@triton.jit
def begin_basis(x, BASIS: tl.constexpr):
    """The state at degree 0."""
    TERMS: tl.constexpr = BASIS[0]
    PARAMS: tl.constexpr = BASIS[2]
    return BASIS[3](BASIS[6](x), TERMS, PARAMS)


@triton.jit
def next_degree(state, d, BASIS: tl.constexpr):
    """The state at degree d + 1, of that at degree d."""
    TERMS: tl.constexpr = BASIS[0]
    PARAMS: tl.constexpr = BASIS[2]
    return BASIS[4](state, d, TERMS, PARAMS)


@triton.jit
def basis_value(state, d, table_ptr, BASIS: tl.constexpr):
    """The value of degree d, of the state there."""
    TERMS: tl.constexpr = BASIS[0]
    PARAMS: tl.constexpr = BASIS[2]
    return BASIS[5](state, d, table_ptr, TERMS, PARAMS)


@triton.jit
def skip_first(state, zero, BASIS: tl.constexpr):
    """The state at the first degree in the product, of that at degree 0."""
    FIRST: tl.constexpr = BASIS[1]
    for skipped in tl.static_range(FIRST):
        state = next_degree(state, zero + skipped, BASIS)
    return state


@triton.jit
def skip_groups(state, group, DEGREES: tl.constexpr, BASIS: tl.constexpr):
    """The state at the first degree of a group of DEGREES, of that at the first degree in the product."""
    if BASIS[0] - BASIS[1] > DEGREES:
        for skipped in range(0, group * DEGREES):
            state = next_degree(state, BASIS[1] + skipped, BASIS)
    return state
