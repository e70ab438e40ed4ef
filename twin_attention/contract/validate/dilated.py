from __future__ import annotations

from operator import index
from typing import Any

from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.spec import WINDOW_UNLIMITED, DilatedSpec, Dilation, FlashOptions
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.operands import Operand, check_qkv
from twin_attention.contract.validate.options import check_integer


def check_dilations(segment_lengths: Any, dilation_rates: Any) -> tuple[Dilation, ...]:
    """Check the pairs of `dilated_attention`, as `check_flash_options` checks options."""
    named = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    for name, values in named.items():
        expected = "a list or tuple of integers, one or more"
        if not isinstance(values, tuple | list):
            fail(TypeError, name, expected, repr(values))
        if len(values) == 0:
            fail(ValueError, name, expected, repr(values))
    if len(dilation_rates) != len(segment_lengths):
        expected = f"segment_lengths' {len(segment_lengths)} numbers"
        fail(ValueError, "dilation_rates", expected, len(dilation_rates))
    # `index` makes constants of them for `torch.compile`, which may take integers as variables.
    lengths, rates = (
        [index(check_integer(f"{name}[{i}]", x, 1, WINDOW_UNLIMITED)) for i, x in enumerate(values)]
        for name, values in named.items()
    )
    for i, (length, rate) in enumerate(zip(lengths, rates, strict=True)):
        if length % rate:
            fail(ValueError, f"segment_lengths[{i}]", f"a multiple of its rate {rate}", length)
    return tuple(map(Dilation, lengths, rates))


def check_dilated_attention(
    operands: FlashOperands[Operand], dilations: tuple[Dilation, ...], options: FlashOptions
) -> DilatedSpec:
    check_qkv(operands, ("[B, S, Hq, D]", "[B, S, Hkv, D]", "[B, S, Hkv, Dv]"))
    q, k = operands.q, operands.k
    if k.shape[1] != q.shape[1]:
        fail(ValueError, "k", f"q's length {q.shape[1]}", k.shape[1])
    check_segments(dilations, q.shape[1])
    return DilatedSpec.of(operands, q.dtype, options, dilations=dilations)


def check_segments(dilations: tuple[Dilation, ...], length: int) -> None:
    for i, (segment_length, _) in enumerate(dilations):
        if length % segment_length:
            expected = f"a divisor of q's length {length}"
            fail(ValueError, f"segment_lengths[{i}]", expected, segment_length)
