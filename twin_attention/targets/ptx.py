"""PTX that both sides' kernels share, for what neither Triton nor Pallas can express."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from twin_attention.contract.paged_spec import QUANTIZED_DTYPES
from twin_attention.targets import tanh

# Independent maxima of a thread's scores, later merged: a single chain would wait for itself.
_CHAINS = 4
_LAST = f"c{len(tanh.NEAR) - 1}"  # the last coefficient of the polynomial
_SMALLEST_NORMAL, _INFINITY = "0f00800000", "0f7F800000"

# Each converts one byte of both packed pairs in a register to a float16.

# A float8_e4m3fn is a sign, 4 bits of exponent and 3 of mantissa. The low 7 bits, put where a
# float16's exponent ends and its mantissa begins, are the number times 2^-8, subnormals included.
# Only a NaN carries into the next bit when one is added to its last: that bit makes the float16 a
# NaN. {high} gives the byte in its half's high byte, where its sign is a float16's.
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

    float16 holds all of them. Register $1 of the PTX holds two pairs, bytes b0 and b1 of the pair
    in its low half, b2 and b3 of the other. $0 becomes b0 and b2 by `low`, b1 and b3 by `high`.
    Tensor cores take operands in such pairs, so no shuffle is needed. float8: the numbers are
    float8_e4m3fn; int8 otherwise. low and high are None in an interpreter, which runs no PTX.
    """

    float8: bool
    low: str | None = None
    high: str | None = None


def choose_upcast(cache_dtype: str, target: str | None) -> Upcast | None:
    """Return how a kernel converts a cache to float16; None for a cache of 16 bits."""
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


def cap_scores(count: int, *, exact: bool, close: bool = False, exponential: bool = False) -> str:
    """Return PTX that turns a thread's products q·k, s, into ``b · tanh(a · s)``.

    The operands are `count` results, and as many s, a and b; a and b are the same for all. If all s
    of a warp are near 0, the tanh is a polynomial of five instructions; else a branch leads to
    another formula.

    Args:
        exact: the other formula is the rational function of `tanh`; otherwise
            ``1 - 2 / (exp(2x) + 1)``, whose error is a few times 1e-7 of b, not of the result.
        close: the polynomial is `tanh.CLOSE`, as it is with `exact`; otherwise `tanh.NEAR`.
        exponential: the results are 2 to the power of ``b · tanh(a · s)``.
    """
    s = [f"${count + i}" for i in range(count)]
    a, b = f"${2 * count}", f"${3 * count}"
    far = _rational if exact else _from_exponential
    near, limit = tanh.NEAR, tanh.NEAR_LIMIT
    if exact or close:
        near, limit = tanh.CLOSE, tanh.CLOSE_LIMIT
    lines = [
        "{ .reg .pred near;",
        f".reg .f32 a2, x, y, z, {_names('c', len(near))}, {_names('m', _CHAINS)};",
        *_largest(s),
        *_near_coefficients(a, b, near),
        *_all_are_near(limit),
        "@near bra polynomial;",
    ]
    end = ["ex2.approx.ftz.f32 y, y;"] if exponential else []
    for i, x in enumerate(s):
        lines += [*far(x, a, b), *end, f"mov.f32 ${i}, y;"]
    lines += ["bra end;", "polynomial:"]
    for i, x in enumerate(s):
        lines += [*_near(x), *end, f"mov.f32 ${i}, y;"]
    return " ".join([*lines, "end: }"])


def cap_constraints(count: int) -> str:
    return ",".join(["=&f"] * count + ["f"] * (3 * count))


def capped_exponentials(count: int) -> str:
    """Return PTX that turns a thread's products q·k, s, into exponentials, packed, and their sums.

    Exponentials are ``2 ** (b · tanh(a · s))``, a pair a result, as bfloat16. The operands are
    `count` results, at most 32; as many sums, each of the result's row; and as many each of the
    first and the second s of a pair, of a and of b. a and b are the same for all. Two rows take
    turns.

    Nothing delays the exponentials: they are computed as if all scores were near 0, and their sums
    show whether that was right (see `tanh.SUM_BITS`). If a warp's sums leave doubt, its largest
    score decides, as in `cap_scores`, and exponentials far from 0 are computed again.
    """
    first, second = ([f"${n * count + i}" for i in range(count)] for n in (2, 3))
    a, b = f"${4 * count}", f"${5 * count}"

    def exponentials(cap: Callable[[str], list[str]]) -> list[str]:
        """Return the PTX of the results and of sum0 and sum2; `cap` gives that of a capped y."""
        lines = []
        for i, pair in enumerate(zip(first, second, strict=True)):
            for place, s in enumerate(pair):
                row = f"sum{i % 2 * 2 + place}"
                lines += [*cap(s), f"ex2.approx.ftz.f32 e{place}, y;"]
                lines += [
                    f"add.f32 {row}, {row}, e{place};" if i > 1 else f"mov.f32 {row}, e{place};"
                ]
            lines += [f"cvt.rn.bf16x2.f32 ${i}, e1, e0;"]
        return [*lines, "add.f32 sum0, sum0, sum1;", "add.f32 sum2, sum2, sum3;"]

    largest = tanh.NEAR_LIMIT * sum(c * tanh.NEAR_LIMIT ** (2 * i) for i, c in enumerate(tanh.NEAR))
    lines = [
        "{ .reg .pred near;",
        f".reg .f32 a2, x, y, z, {_names('c', len(tanh.NEAR))}, {_names('m', _CHAINS)};",
        f".reg .f32 e0, e1, {_names('sum', 4)}, high, low;",
        *_near_coefficients(a, b),
        *exponentials(_near),
        f"mul.f32 x, {b}, {_float(largest)};",
        f"setp.ge.f32 near, x, {_float(tanh.HIGH_BITS)};",
        "ex2.approx.ftz.f32 high, x;",
        f"sub.f32 x, {_float(tanh.SUM_BITS)}, x;",
        "ex2.approx.ftz.f32 low, x;",
        # Without its last coefficient the polynomial falls far from 0.
        f"abs.f32 x, {_LAST};",
        f"setp.ge.and.f32 near, x, {_SMALLEST_NORMAL}, near;",
        f"setp.lt.and.f32 near, x, {_INFINITY}, near;",
    ]
    for row in "sum0", "sum2":
        lines += [f"setp.ge.and.f32 near, {row}, low, near;"]
        lines += [f"setp.le.and.f32 near, {row}, high, near;"]
    lines += ["vote.sync.all.pred near, near, -1;", "@near bra end;"]
    pairs = zip(first, second, strict=True)
    lines += [*_largest([s for pair in pairs for s in pair]), *_all_are_near(), "@near bra end;"]
    lines += [*exponentials(lambda s: _from_exponential(s, a, b)), "end:"]
    lines += [f"mov.f32 ${count + i}, sum{i % 2 * 2};" for i in range(count)]
    return " ".join([*lines, "}"])


def exponentials_constraints(count: int) -> str:
    return ",".join(["=&r"] * count + ["=&f"] * count + ["f"] * (4 * count))


def any_of_warp(count: int) -> str:
    """Return PTX that says, from a thread's factors, whether one of the warp's is not 1.

    Operands are `count` results, all 0 or all 1, and as many factors.
    """
    lines = ["{ .reg .pred changes;", f"setp.neu.f32 changes, ${count}, {_float(1.0)};"]
    for i in range(1, count):
        lines += [f"setp.neu.or.f32 changes, ${count + i}, {_float(1.0)}, changes;"]
    lines += ["vote.sync.any.pred changes, changes, -1;"]
    return " ".join([*lines, *(f"selp.u32 ${i}, 1, 0, changes;" for i in range(count)), "}"])


def any_of_warp_constraints(count: int) -> str:
    return ",".join(["=r"] * count + ["f"] * count)


def rescale(count: int) -> str:
    """Return PTX that multiplies a thread's numbers, or branches past it where the flags are 0.

    Operands are `count` results, and as many numbers, factors and flags, from `any_of_warp`.
    """
    lines = ["{ .reg .pred changes;", f"setp.ne.u32 changes, ${3 * count}, 0;"]
    lines += [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    lines += ["@!changes bra end;"]
    lines += [f"mul.f32 ${i}, ${count + i}, ${2 * count + i};" for i in range(count)]
    return " ".join([*lines, "end: }"])


def rescale_constraints(count: int) -> str:
    return ",".join(["=&f"] * count + ["f"] * (2 * count) + ["r"] * count)


def _near_coefficients(a: str, b: str, near: tuple[float, float, float] = tanh.NEAR) -> list[str]:
    """Return the PTX of a2, a², and of what `_near` multiplies, `near` times powers of a."""
    lines = [f"mul.f32 a2, {a}, {a};", f"mul.f32 x, {a}, {b};"]
    for i, value in enumerate(near):
        lines += [f"mul.f32 c{i}, x, {_float(value)};", "mul.f32 x, x, a2;"]
    return lines


def _near(s: str) -> list[str]:
    """Return the PTX of ``y = b · tanh(a · s)`` where a · s is near 0."""
    coefficients = [f"c{i}" for i in range(len(tanh.NEAR))]
    lines = [f"mul.f32 z, {s}, {s};", *_polynomial("y", "z", coefficients)]
    return [*lines, f"mul.f32 y, y, {s};"]


def _all_are_near(limit: float = tanh.NEAR_LIMIT) -> list[str]:
    """Return the PTX of the predicate `near`: all scores of a warp are, by m0 of `_largest`."""
    return [
        "mul.f32 y, m0, m0;",
        "mul.f32 y, y, a2;",
        f"setp.le.f32 near, y, {_float(limit**2)};",
        # Not with a coefficient that float32 does not hold, or that has fewer bits there.
        f"abs.f32 x, {_LAST};",
        f"setp.ge.and.f32 near, x, {_SMALLEST_NORMAL}, near;",
        f"setp.lt.and.f32 near, x, {_INFINITY}, near;",
        "vote.sync.all.pred near, near, -1;",
    ]


def _largest(s: list[str]) -> list[str]:
    """Return the PTX that finds the largest magnitude, or a NaN, in several chains at a time."""
    chains = [s[i::_CHAINS] for i in range(_CHAINS)]
    lines = [f"abs.f32 m{i}, {first};" for i, (first, *_) in enumerate(chains)]
    for others in zip(*(chain[1:] for chain in chains), strict=True):
        for i, x in enumerate(others):
            lines += [f"abs.f32 x, {x};", f"max.NaN.f32 m{i}, m{i}, x;"]
    return lines + [f"max.NaN.f32 m0, m0, m{i};" for i in range(1, _CHAINS)]


def _rational(s: str, a: str, b: str) -> list[str]:
    """Return the PTX of ``y = b · tanh(a · s)`` by `tanh.P` and `tanh.Q`."""
    return [
        f"mul.f32 x, {s}, {a};",
        f"min.NaN.f32 x, x, {_float(tanh.LIMIT)};",
        f"max.NaN.f32 x, x, {_float(-tanh.LIMIT)};",
        "mul.f32 a2, x, x;",
        *_polynomial("y", "a2", map(_float, tanh.P)),
        *_polynomial("z", "a2", map(_float, tanh.Q)),
        "rcp.approx.ftz.f32 z, z;",
        f"mul.f32 x, x, {b};",
        "mul.f32 y, y, z;",
        "mul.f32 y, y, x;",
    ]


def _from_exponential(s: str, a: str, b: str) -> list[str]:
    """Return the PTX of ``y = b - 2b / (exp(2 · a · s) + 1)``."""
    return [
        f"mul.f32 z, {a}, {_float(2 * math.log2(math.e))};",
        f"mul.f32 x, {s}, z;",
        "ex2.approx.ftz.f32 x, x;",
        "add.f32 x, x, 0f3F800000;",
        "rcp.approx.ftz.f32 x, x;",
        f"mul.f32 z, {b}, {_float(-2.0)};",
        f"fma.rn.f32 y, x, z, {b};",
    ]


def _polynomial(result: str, x: str, coefficients: Iterable[str]) -> list[str]:
    """Return the PTX of a polynomial by Horner's rule, from the constant on."""
    *others, last = coefficients
    lines = [f"fma.rn.f32 {result}, {last}, {x}, {others.pop()};"]
    return lines + [f"fma.rn.f32 {result}, {result}, {x}, {c};" for c in reversed(others)]


def _names(letter: str, count: int) -> str:
    return ", ".join(f"{letter}{i}" for i in range(count))


def _float(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex().upper()
