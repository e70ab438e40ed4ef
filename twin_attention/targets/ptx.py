"""PTX that both sides' kernels share, for what neither Triton nor Pallas expresses."""

from __future__ import annotations

from typing import NamedTuple

from twin_attention.contract.spec import QUANTIZED_DTYPES

# Each converts one byte of both packed pairs in a register to a float16; see `Upcast`.

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
# SM90 converts two bytes side by side, so the bytes of the two pairs are put in order first.
_FLOAT8_SM90 = """
prmt.b32 x, $1, 0, 0x3120;
mov.b32 {{low, high}}, x;
cvt.rn.f16x2.e4m3x2 $0, {half};
"""
# A byte with its sign bit flipped is the number plus 128, the mantissa of a float16 from 1024 on.
_INT8 = """
{shift};
and.b32 x, x, 0x00FF00FF;
xor.b32 x, x, 0x64806480;
mov.b32 y, 0x64806480;
sub.rn.f16x2 $0, x, y;
"""
_REGISTERS = "{\n.reg .b32 x, y;\n.reg .b16 low, high;"
UPCAST_CONSTRAINTS = "=r,r"
UPCAST_PACK = 2  # packed pairs that one run of the code converts

# float32 division, rounded to nearest. Triton has it; Pallas compiles "/" to a faster one.
DIVIDE = "div.rn.f32 $0, $1, $2;"
DIVIDE_CONSTRAINTS = "=f,f,f"


class Upcast(NamedTuple):
    """A conversion of packed pairs of 8-bit numbers, an int16 each, to float16.

    float16 holds every number of both 8-bit dtypes. Register $1 of the PTX holds two pairs, bytes
    b0 and b1 of the pair in its low half, b2 and b3 of the other. $0 becomes b0 and b2 as float16
    by `low`, b1 and b3 by `high`. Tensor cores take operands in such pairs, so that what is loaded
    for them needs no shuffle.

    Attributes:
        float8: the numbers are float8_e4m3fn; int8 otherwise.
        low, high: PTX that converts the low and the high byte of each pair. None in an
            interpreter, which runs no PTX.
    """

    float8: bool
    low: str | None = None
    high: str | None = None


def choose_upcast(cache_dtype: str, target: str | None) -> Upcast | None:
    """Return how a kernel converts a cache to float16; None for a cache of 16 bits.

    Args:
        cache_dtype: of keys and values.
        target: "sm80" or "sm90", or None for an interpreter.
    """
    if cache_dtype not in QUANTIZED_DTYPES:
        return None
    float8 = cache_dtype == "float8_e4m3fn"
    if target is None:
        return Upcast(float8)
    if not float8:
        low = _INT8.format(shift="mov.b32 x, $1")
        high = _INT8.format(shift="shr.u32 x, $1, 8")
    elif target == "sm80":
        low = _FLOAT8.format(shift="shl.b32 x, $1, 7", high="shl.b32 y, $1, 8")
        high = _FLOAT8.format(shift="shr.u32 x, $1, 1", high="mov.b32 y, $1")
    else:
        low, high = _FLOAT8_SM90.format(half="low"), _FLOAT8_SM90.format(half="high")
    return Upcast(float8, _REGISTERS + low + "}", _REGISTERS + high + "}")
