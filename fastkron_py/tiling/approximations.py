"""Functions in one or two of PTX's instructions, where Triton's own take more. Some err by a unit or two in the last place.

A result that is written before the last operand is read has ``&``: else the compiler may give it that operand's register.
"""

from fastkron_py.runtime.optional_triton import tl, triton


@triton.jit
def quick_exp2(x):
    """2 to the power of x."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def quick_reciprocal(x):
    """``1 / x``."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def quick_float32(x):
    """bfloat16 as float32, exactly: an instruction for each of two neighbours in a register."""
    return tl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], tl.float32, True, 2)


@triton.jit
def quick_minus_signed(c, f, g, x):
    """``c - sign(x) * f * g``: a sum under a predicate, with the sign set by one instruction."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 s; setp.neu.f32 p, $4, 0f00000000; lop3.b32 s, $2, $4, 0x80000000, 0xd2; mov.b32 $0, $1;"
        " @p fma.rn.f32 $0, s, $3, $1; }",
        "=&r,r,r,r,r",
        [c, f, g, x],
        tl.float32,
        True,
        1,
    )
