"""PTX, run by NumPy for the lanes of a warp."""

import operator
import re

import numpy as np

LANES = 32


def _bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def _bfloat16(x):
    bits = _bits(x)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _flushed(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0), x)


FUNCTIONS = {
    "mov": lambda a: a, "abs": np.abs, "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "fma": lambda a, b, c: np.float32(np.float64(a) * b + c), "max.NaN": np.maximum,
    "min.NaN": np.minimum, "rcp": lambda a: np.float32(1) / a,
    "ex2": lambda a: _flushed(np.exp2(_flushed(a))),
    "cvt": lambda high, low: _bfloat16(high) << 16 | _bfloat16(low),
    "setp.ge": np.greater_equal,
    "setp.le": np.less_equal,
    "setp.lt": np.less,
    "setp.ne": np.not_equal,
    "setp.neu": np.not_equal,  # also where one is NaN
    "selp": lambda a, b, p: np.where(p, a, b),
    "vote.sync.all": lambda p, _mask: np.broadcast_to(p.all(), p.shape),
    "vote.sync.any": lambda p, _mask: np.broadcast_to(p.any(), p.shape),
}  # fmt: skip
JOINED = {".and.": operator.and_, ".or.": operator.or_}  # with the last operand


def run(text, operands):
    """Return registers and the number of the last branch; lanes go one way."""
    registers = dict(operands)
    parts = [x for x in re.split(r"(?<=[;:{}])\s*", text) if x not in ("", "{", "}")]
    labels = {x[:-1]: i for i, x in enumerate(parts) if x.endswith(":")}
    branches = taken = i = 0
    while i < len(parts):
        if parts[i].startswith(".reg") or parts[i].endswith(":"):
            i += 1
            continue
        guard, name, arguments = re.fullmatch(r"(?:@(!?\w+) )?([\w.]+) (.*);", parts[i]).groups()
        i += 1
        if name == "bra":
            branches += 1
            goes = True if guard is None else registers[guard.lstrip("!")] ^ guard.startswith("!")
            if np.all(goes):
                taken = branches
                i = labels[arguments]
            else:
                assert not np.any(goes)
            continue
        target, *sources = arguments.split(", ")
        values = [_value(x, registers) for x in sources]
        join = next((join for key, join in JOINED.items() if key in name), None)
        other = values.pop() if join else None
        (function,) = (f for key, f in FUNCTIONS.items() if f"{name}.".startswith(f"{key}."))
        result = function(*values)
        registers[target] = join(result, other) if join else result
    return registers, taken


def _value(source, registers):
    if source.startswith("0f"):
        return np.full(LANES, int(source[2:], 16), np.uint32).view(np.float32)
    if source.lstrip("-").isdigit():
        return np.full(LANES, int(source), np.int32)
    return registers[source]
