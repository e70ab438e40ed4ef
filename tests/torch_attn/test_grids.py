"""A grid's second and third axes hold 65,535 programs at most, so data lies along the first."""

import pytest

from torch_attn import interpreter
from twin_attention.interop.parity.cases import (
    AppendCase,
    BlockSparseCase,
    DecodeCase,
    FlashCase,
    MergeCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import TorchSide, call

MANY = 66_000
FEW = {"heads_q": 1, "heads_kv": 1, "head_dim": 16, "dtype": "float16"}
ONE = {"seq_q": 1, "seq_kv": 1, **FEW}
PAGES = {"heads_kv": 1, "head_dim": 16, "page_size": 1, "max_pages": 1, "dtype": "float16"}
CASES = (
    *(FlashCase(f"bias {x}", MANY, **ONE | {"seq_q": 2}, bias=x) for x in ("hqk", "hq", "k")),
    FlashCase("bias of heads", 1, **ONE | {"heads_q": MANY, "seq_kv": 2}, bias="hk"),
    FlashCase("batch", MANY, **ONE, relative=1, sinks=True),
    FlashCase("ids", MANY, **ONE, segments="documents"),
    FlashCase("tree", MANY, **ONE, tree="nested", causal=True),
    VarlenCase("sequences", ((1, 1),) * MANY, **FEW, relative=1),
    BlockSparseCase("masks", MANY, **ONE, own_masks="all"),
    DecodeCase("decode", (1,) * MANY, 1, heads_q=1, **PAGES),
    PagedCase("chunks", (1,) * MANY, heads_q=1, **PAGES, new_tokens=(1,) * MANY),
    AppendCase("append", (1,) * MANY, 1, **PAGES),
    MergeCase("merge", 2, MANY, 1, 1, 16, "float16"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_grids_of_much_data_are_long_along_the_first_axis(monkeypatch, case):
    grids = []

    class Recorded:
        def __init__(self, kernel): ...

        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_: None

    monkeypatch.setattr(interpreter, "interpreted", Recorded)
    call(TorchSide(), case, make_inputs(case, "cpu"), "triton")
    assert grids
    assert max(max(grid[1:], default=1) for grid in grids) <= 65_535
