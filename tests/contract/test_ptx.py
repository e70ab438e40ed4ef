"""The shared PTX, run by a small interpreter of the few instructions it is made of."""

import re

import numpy as np
import pytest
import torch

from interop.contract.ptx import widenings


def _halves(register, dtype):
    """The two numbers of 16 bits in a register, exactly."""
    bits = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.uint16)
    return bits.view(dtype).double()


def _of_halves(values, dtype):
    low, high = values.to(dtype).view(torch.uint16).tolist()
    return low | high << 16


def _lop3(a, b, c, table):
    result = 0
    for row in range(8):
        if table >> row & 1:
            picked = [x if row >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            result |= picked[0] & picked[1] & picked[2]
    return result


_HALF = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}
_INTEGER = {
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mov.b32": lambda a: a,
    "lop3.b32": _lop3,
}
_FLOAT = {
    "mul.rn": lambda a, b: a * b,
    "sub.rn": lambda a, b: a - b,
    "fma.rn": lambda a, b, c: a * b + c,
}


def _run(code, word):
    """What the registers hold in the end."""
    registers = {"$1": word}
    for line in re.findall(r"^([a-z][^;\n]*);", code, re.MULTILINE):
        name, rest = line.split(maxsplit=1)
        out, *operands = rest.split(", ")
        values = [registers[x] if x in registers else int(x, 0) for x in operands]
        if name in _INTEGER:
            registers[out] = _INTEGER[name](*values) & 0xFFFFFFFF
        else:
            operation, kind = name.rsplit(".", 1)
            halves = [_halves(value, _HALF[kind]) for value in values]
            registers[out] = _of_halves(_FLOAT[operation](*halves), _HALF[kind])
    return registers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_widenings_keep_every_byte_in_every_place(cache_dtype, dtype):
    codes = widenings(cache_dtype, dtype)
    for byte in range(256):
        # A different neighbour in every place, so that what leaks shows.
        for b in np.roll([byte, 0xFF, 0x80, 0x7F], byte % 4), (byte,) * 4:
            b = [int(x) for x in b]
            word = b[0] | b[1] << 8 | b[2] << 16 | b[3] << 24
            stored = torch.tensor(b, dtype=torch.uint8).view(getattr(torch, cache_dtype))
            for code, places in zip(codes, ([0, 2], [1, 3]), strict=True):
                got = _halves(_run(code, word)["$0"], getattr(torch, dtype))
                torch.testing.assert_close(
                    got, stored.double()[places], rtol=0, atol=0, equal_nan=True
                )
