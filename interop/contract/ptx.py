"""Machine code that both sides' kernels share: what neither Triton nor Pallas can say itself."""

from __future__ import annotations

# Each widens one byte of both words in a register, as `widenings` says. The byte is shifted to its
# place; {high} gives the same byte in a half's high byte, where its sign is a float16's.

# A float8_e4m3fn is a sign, 4 bits of exponent and 3 of mantissa. The low 7 bits, put where a wider
# format's exponent ends and its mantissa begins, are the number times a power of two, subnormal
# numbers included. Its NaN, alone, carries into the next bit when one is added to its last: that
# bit makes the wider number a NaN.
_FLOAT8_TO_FLOAT16 = """
{shift};
and.b32 x, x, 0x3F803F80;
add.u32 y, x, 0x00800080;
lop3.b32 x, y, 0x40004000, x, 0xEA;
{high};
lop3.b32 x, y, 0x80008000, x, 0xEA;
mov.b32 y, 0x5C005C00;
mul.rn.f16x2 $0, x, y;
"""
_FLOAT8_TO_BFLOAT16 = """
{shift};
and.b32 x, x, 0x07F007F0;
add.u32 y, x, 0x00100010;
and.b32 y, y, 0x08000800;
mad.lo.u32 x, y, 15, x;
{high};
lop3.b32 x, y, 0x80008000, x, 0xEA;
mov.b32 y, 0x7B807B80;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 $0, x, y, z;
"""
# With its sign bit flipped a byte is the number plus 128: the mantissa of a float16 from 1024 on.
_INT8_TO_FLOAT16 = """
{shift};
and.b32 x, x, 0x00FF00FF;
xor.b32 x, x, 0x64806480;
mov.b32 y, 0x64806480;
sub.rn.f16x2 $0, x, y;
"""
# A bfloat16's mantissa holds the low 7 bits, from 128 on; 128 is subtracted, or 256 for the sign.
_INT8_TO_BFLOAT16 = """
{shift};
and.b32 y, x, 0x00800080;
and.b32 x, x, 0x007F007F;
or.b32 x, x, 0x43004300;
or.b32 y, y, 0xC300C300;
mov.b32 z, 0x3F803F80;
fma.rn.bf16x2 $0, x, z, y;
"""
# The code, and what brings the low and the high byte of $2's halves to their place.
_WIDEN = {
    ("float8_e4m3fn", "float16"): (_FLOAT8_TO_FLOAT16, "shl.b32 x, $1, 7", "shr.u32 x, $1, 1"),
    ("float8_e4m3fn", "bfloat16"): (_FLOAT8_TO_BFLOAT16, "shl.b32 x, $1, 4", "shr.u32 x, $1, 4"),
    ("int8", "float16"): (_INT8_TO_FLOAT16, "mov.b32 x, $1", "shr.u32 x, $1, 8"),
    ("int8", "bfloat16"): (_INT8_TO_BFLOAT16, "mov.b32 x, $1", "shr.u32 x, $1, 8"),
}

# float32 division to nearest. Triton says it, Pallas does not: its "/" is compiled to a faster one.
DIVIDE = "div.rn.f32 $0, $1, $2;"
DIVIDE_CONSTRAINTS = "=f,f,f"
WIDEN_CONSTRAINTS = "=r,r"
WIDEN_PACK = 2  # words that one run of the code takes


def widenings(cache_dtype: str, dtype: str) -> tuple[str, str]:
    """PTX that takes words of two 8-bit numbers apart: to the low ones and to the high ones.

    Register $1 holds two words, bytes b0 and b1 of the one in its low half, b2 and b3 of the other.
    $0 becomes b0 and b2 in `dtype`, or by the second code b1 and b3. Tensor cores take operands in
    such pairs; so what is loaded for them as words needs no shuffle. For SM80 and later.

    Args:
        cache_dtype: "int8" or "float8_e4m3fn".
        dtype: "float16" or "bfloat16", which hold every number of both exactly.
    """
    code, low, high = _WIDEN[cache_dtype, dtype]
    codes = (
        code.format(shift=low, high="shl.b32 y, $1, 8"),
        code.format(shift=high, high="mov.b32 y, $1"),
    )
    low_code, high_code = ("{\n.reg .b32 x, y, z;" + code + "}" for code in codes)
    return low_code, high_code
