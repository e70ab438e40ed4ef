"""JAX's switches for types and shapes change no result and no gradient."""

import jax
import pytest

from tests.oracle import assert_within_budget
from tests.sides import PallasSide
from twin_attention.interop.parity.cases import (
    AppendCase,
    BlockSparseCase,
    ContextCase,
    DecodeCase,
    DilatedCase,
    FlashCase,
    MergeCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import call

SHAPE = {"seq_q": 40, "seq_kv": 40, "heads_q": 4, "head_dim": 16, "dtype": "float32"}
PAGES = {"head_dim": 16, "page_size": 4, "heads_q": 4}
CASES = (
    FlashCase("sinks", **SHAPE, causal=True, sinks=True, softcap=5.0),
    FlashCase("window", **SHAPE | {"dtype": "bfloat16"}, window_size=(9, 3), row_max=True),
    FlashCase("ids", **SHAPE, segments="documents", dropout_rate=0.5),
    FlashCase("terms", **SHAPE, bias="hqk", relative=4, alibi="all", causal=True),
    FlashCase("16 bits", **SHAPE | {"dtype": "float16"}, bias="bqk", relative=4, alibi="heads"),
    FlashCase("one", **SHAPE, bias="k", terms_in_q_dtype=True, deterministic=True),
    FlashCase("tree", **SHAPE, causal=True, tree="nested", depths=True, window_size=(9, None)),
    VarlenCase("packed", head_dim=16, sinks=True, relative=4, alibi="all", dropout_rate=0.5),
    VarlenCase("packed tree", head_dim=16, tree="nested"),
    BlockSparseCase("mask", **SHAPE, own_masks="all", sinks=True),
    DilatedCase("dilated", **SHAPE, segment_lengths=(20, 40), dilation_rates=(1, 2), causal=True),
    ContextCase("ranks", **SHAPE, causal=True, sinks=True),
    ContextCase("documents", **SHAPE, causal=True, documents=(13, 20), exchange="gather"),
    ContextCase("ring", **SHAPE, causal=True, exchange="ring"),
    DecodeCase("decode", (9, 20), 2, **PAGES, kv_dtype="int8", alibi="all", num_splits=2),
    DecodeCase("drafts", (9, 20), 3, **PAGES, tree="drafts", softcap=5.0),
    DecodeCase("cascade", (20, 20), **PAGES, cascade=True, common_pages=3, latent=True),
    PagedCase("chunks", (9, 20), **PAGES, new_tokens=(2, 9), padding=2, alibi="all"),
    PagedCase("chunks in a window", (9, 20), **PAGES, new_tokens=(2, 9), window_size=(5, None)),
    AppendCase("append", (9, 20), 2, **PAGES, rotary_dim=8, kv_dtype="float8_e4m3fn"),
    MergeCase("merge", head_dim_v=16),
)  # fmt: skip


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_right_under_all_switches(implementation, torch_device, case):
    inputs = make_inputs(case, torch_device)
    strict = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with jax.enable_x64(True), strict[0], strict[1]:
        got = call(PallasSide(torch_device), case, inputs, implementation)
    assert_within_budget(got, inputs, case.spec)
