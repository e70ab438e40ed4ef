"""Machine code that both sides' kernels share: what neither Triton nor Pallas can say itself."""

from __future__ import annotations

# Each takes one byte of both words in a register to a float16, as `widenings` says.

# A float8_e4m3fn is a sign, 4 bits of exponent and 3 of mantissa. The low 7 bits, put where a
# float16's exponent ends and its mantissa begins, are the number times 2^-8, subnormal numbers
# included. A NaN, alone, carries into the next bit when one is added to its last: that bit makes
# the float16 a NaN. {high} gives the byte in its half's high byte, where its sign is a float16's.
_FLOAT8 = """
{shift};
and.b32 x, x, 0x3F803F80;
add.u32 y, x, 0x00800080;
lop3.b32 x, y, 0x40004000, x, 0xEA;
{high};
lop3.b32 x, y, 0x80008000, x, 0xEA;
mov.b32 y, 0x5C005C00;
mul.rn.f16x2 $0, x, y;
"""
# SM90 converts two bytes side by side, so the bytes of the two words are put in order first.
_FLOAT8_SM90 = """
prmt.b32 x, $1, 0, 0x3120;
mov.b32 {{low, high}}, x;
cvt.rn.f16x2.e4m3x2 $0, {half};
"""
# With its sign bit flipped a byte is the number plus 128: the mantissa of a float16 from 1024 on.
_INT8 = """
{shift};
and.b32 x, x, 0x00FF00FF;
xor.b32 x, x, 0x64806480;
mov.b32 y, 0x64806480;
sub.rn.f16x2 $0, x, y;
"""
_REGISTERS = "{\n.reg .b32 x, y;\n.reg .b16 low, high;"
WIDEN_CONSTRAINTS = "=r,r"
WIDEN_PACK = 2  # words that one run of the code takes

# float32 division to nearest. Triton says it, Pallas does not: its "/" is compiled to a faster one.
DIVIDE = "div.rn.f32 $0, $1, $2;"
DIVIDE_CONSTRAINTS = "=f,f,f"


def widenings(cache_dtype: str, target: str) -> tuple[str, str]:
    """PTX that takes words of two 8-bit numbers apart: to the low ones and to the high ones.

    Register $1 holds two words, bytes b0 and b1 of the one in its low half, b2 and b3 of the other.
    $0 becomes b0 and b2 as float16, which holds every number of both dtypes, or by the second code
    b1 and b3. Tensor cores take operands in such pairs, so what is loaded for them as words needs
    no shuffle.

    Args:
        cache_dtype: "int8" or "float8_e4m3fn".
        target: "sm80" or "sm90".
    """
    if cache_dtype == "int8":
        low = _INT8.format(shift="mov.b32 x, $1")
        high = _INT8.format(shift="shr.u32 x, $1, 8")
    elif target == "sm80":
        low = _FLOAT8.format(shift="shl.b32 x, $1, 7", high="shl.b32 y, $1, 8")
        high = _FLOAT8.format(shift="shr.u32 x, $1, 1", high="mov.b32 y, $1")
    else:
        low, high = _FLOAT8_SM90.format(half="low"), _FLOAT8_SM90.format(half="high")
    return _REGISTERS + low + "}", _REGISTERS + high + "}"
