"""Functions in one or two of PTX's instructions, where Triton's own take more. Some err by a unit or two in the last place."""

from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def quick_exp2(x):
    """2 to the power of x."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def quick_reciprocal(x):
    """``1 / x``."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
