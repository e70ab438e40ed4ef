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


def test_the_table_has_every_pair():
    assert set(ROWS) == {(a, a) for a in DTYPES} | {("float16", "float32"), ("bfloat16", "float32")}


@pytest.mark.parametrize("terms", DTYPES)
def test_kernels_accumulate_in_float32(side, torch_device, terms):
    """A thousand queries see one key: p is 1, and dV is the sum of the rows of dO."""
    case = FlashCase("thousand-terms", 1, TERMS, 1, 1, 1, head_dim=16, dtype=terms)
    inputs = {name: x.to(torch_device) for name, x in make_inputs(case, "cpu").items()}
    inputs["dout"].fill_(TERM)
    dv = attention(side, inputs, implementation="triton")["dv"].float()
    assert {f"{x:.4f}" for x in dv.flatten().tolist()} == {ROWS[terms, "float32"][1]}
