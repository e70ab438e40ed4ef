"""The shared PTX, run by a small interpreter of its few instructions."""

import re

import numpy as np
import pytest
import torch

from twin_attention.targets.ptx import Upcast, choose_upcast
from twin_attention.targets.target import TARGETS


def _halves(register):
    bits = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.uint16)
    return bits.view(torch.float16).double()


def _of_halves(values):
    low, high = values.to(torch.float16).view(torch.uint16).tolist()
    return low | high << 16


def _permute(a, b, selector):
    eight = a | b << 32
    picked = [eight >> 8 * (selector >> 4 * place & 7) & 0xFF for place in range(4)]
    return sum(byte << 8 * place for place, byte in enumerate(picked))


def _convert(pair):
    bits = torch.tensor([pair & 0xFF, pair >> 8], dtype=torch.uint8)
    return _of_halves(bits.view(torch.float8_e4m3fn))


def _lop3(a, b, c, table):
    result = 0
    for row in range(8):
        if table >> row & 1:
            picked = [x if row >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            result |= picked[0] & picked[1] & picked[2]
    return result


_INTEGER = {
    "shl.b32": lambda a, b: a << b, "shr.u32": lambda a, b: a >> b, "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b, "xor.b32": lambda a, b: a ^ b, "add.u32": lambda a, b: a + b,
    "mov.b32": lambda a: a, "lop3.b32": _lop3, "prmt.b32": _permute,
    "cvt.rn.f16x2.e4m3x2": _convert,
}  # fmt: skip
_FLOAT = {"mul.rn.f16x2": lambda a, b: a * b, "sub.rn.f16x2": lambda a, b: a - b}


def _run(code, word):
    registers = {"$1": word}
    for line in re.findall(r"^([a-z][^;\n]*);", code, re.MULTILINE):
        name, rest = line.split(maxsplit=1)
        out, *operands = rest.split(", ")
        values = [registers[x] if x in registers else int(x, 0) for x in operands if x != "high}"]
        if out == "{low":
            registers |= {"low": values[-1] & 0xFFFF, "high": values[-1] >> 16}
        elif name in _INTEGER:
            registers[out] = _INTEGER[name](*values) & 0xFFFFFFFF
        else:
            registers[out] = _of_halves(_FLOAT[name](*map(_halves, values)))
    return registers


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_upcasts_keep_every_byte_in_every_place(cache_dtype, target):
    float8, *codes = choose_upcast(cache_dtype, target)
    assert float8 == (cache_dtype == "float8_e4m3fn")
    for byte in range(256):
        # A different neighbour in every place, so that what leaks shows.
        for b in np.roll([byte, 0xFF, 0x80, 0x7F], byte % 4), (byte,) * 4:
            b = [int(x) for x in b]
            word = b[0] | b[1] << 8 | b[2] << 16 | b[3] << 24
            stored = torch.tensor(b, dtype=torch.uint8).view(getattr(torch, cache_dtype))
            for code, places in zip(codes, ([0, 2], [1, 3]), strict=True):
                got = _halves(_run(code, word)["$0"])
                torch.testing.assert_close(
                    got, stored.double()[places], rtol=0, atol=0, equal_nan=True
                )


def test_a_cache_of_16_bits_needs_no_upcast_and_an_interpreter_no_ptx():
    assert choose_upcast("bfloat16", "sm80") is None
    assert choose_upcast("int8", None) == Upcast(False, None, None)
    assert choose_upcast("float8_e4m3fn", None) == Upcast(True, None, None)
