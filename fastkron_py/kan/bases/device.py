"""Parts of bases on the device: constants, three-term recurrences, functions that need no state.

They use operators and functions of tiles only, which Gluon has too.
"""

from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def constant(t, VALUE: tl.constexpr):
    """A tile like t that is VALUE everywhere. A new tile would need a layout in Gluon."""
    return tl.where(t < 0, VALUE, VALUE).to(t.dtype)


@triton.jit
def advance(state, a, c):
    """From (t, P_n, P_{n-1}) to (t, P_{n+1}, P_n): ``P_{n+1} = a t P_n - c P_{n-1}``."""
    t, current, previous = state
    return t, a * t * current - c * previous, current


@triton.jit
def current_value(state, d, table_ptr, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """P_n of a state (t, P_n, P_{n-1})."""
    return state[1]


@triton.jit
def from_one(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """P_0 = 1, P_{-1} = 0."""
    return t, constant(t, 1.0), constant(t, 0.0)


@triton.jit
def from_zero(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """P_{-1} = 0 with 1 before it. The first step (a = 0, c = -1) makes P_0 = 1 from them."""
    return t, constant(t, 0.0), constant(t, 1.0)


@triton.jit
def stateless_start(t, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """The state (t, t) of functions without a recurrence, which read t from it."""
    return t, t


@triton.jit
def stateless_step(state, d, TERMS: tl.constexpr, PARAMS: tl.constexpr):
    """The same state."""
    return state
