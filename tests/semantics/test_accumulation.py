"""The accumulators of docs/numerics.md: 0.01 added a thousand times."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.sides import attention
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs

TERM, TERMS = 0.01, 1000
PAGE = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# terms: accumulator, sum, dV
ROWS = {
    (terms, accumulator): (by_hand, by_kernel)
    for terms, accumulator, by_hand, by_kernel in re.findall(
        r"^\| (\w*float\d+) \| (\w*float\d+) \| ([\d.]+) \| ([\d.]*) *\|$", PAGE, re.MULTILINE
    )
}


def added_one_by_one(terms: str, accumulator: str) -> float:
    to = DTYPES[accumulator]
    total, term = to(0), DTYPES[terms](TERM).astype(to)
    for _ in range(TERMS):
        total = to(total + term)
    return float(total)


def test_the_table_has_every_pair():
    assert set(ROWS) == {(a, a) for a in DTYPES} | {("float16", "float32"), ("bfloat16", "float32")}


@pytest.mark.parametrize(("terms", "accumulator"), ROWS)
def test_sums_by_hand_are_those_of_the_page(terms, accumulator):
    assert f"{added_one_by_one(terms, accumulator):.4f}" == ROWS[terms, accumulator][0]


def test_the_numbers_below_the_table():
    fp16, bf16 = (DTYPES[name] for name in ("float16", "bfloat16"))
    assert fp16(5) + fp16(TERM) - fp16(5) == 3 / 256
    assert fp16(9) + fp16(TERM) - fp16(9) == 1 / 128
    assert np.spacing(bf16(4)) / 2 == 1 / 64
    for dtype, percent in ((fp16, "0.02"), (bf16, "0.1")):
        assert f"{100 * (float(dtype(TERM)) / TERM - 1):.1g}" == percent
        assert float(dtype(TERM)) / TERM - 1 < ml_dtypes.finfo(dtype).eps / 2


@pytest.mark.parametrize("terms", DTYPES)
def test_kernels_accumulate_in_float32(side, torch_device, terms):
    """A thousand queries see one key: p is 1, and dV is the sum of the rows of dO."""
    case = FlashCase("thousand-terms", 1, TERMS, 1, 1, 1, head_dim=16, dtype=terms)
    inputs = {name: x.to(torch_device) for name, x in make_inputs(case, "cpu").items()}
    inputs["dout"].fill_(TERM)
    dv = attention(side, inputs, implementation="triton")["dv"].float()
    assert {f"{x:.4f}" for x in dv.flatten().tolist()} == {ROWS[terms, "float32"][1]}
