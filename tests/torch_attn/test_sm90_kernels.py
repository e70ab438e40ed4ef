from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.oracle import poison_before
from tests.semantics.test_finite_scores import hide
from tests.torch_attn.explicit_kernels import (
    EDGES,
    LISTED,
    MODES,
    check_backward,
    check_forward,
    check_results,
    gluon_backend,
    in_turn,
    lower_scores,
    summing,
)
from tests.torch_attn.gluon_interpreter import (
    READS_FIRST,
    WRITES_FIRST,
    DeadlockError,
    InterpreterError,
    Mode,
    edited,
    interpreted,
)
from torch_attn import BlockMask
from torch_attn.kernels.explicit import items as items_module
from torch_attn.kernels.explicit.items import hand_over_item, item_counter
from torch_attn.kernels.explicit.sections import heads_with_sums
from torch_attn.kernels.explicit.tma import stored_maps_of
from torch_attn.kernels.sm90 import flash_bwd as flash_bwd_module
from torch_attn.kernels.sm90 import flash_fwd as flash_fwd_module
from torch_attn.kernels.sm90.flash_bwd import flash_bwd
from torch_attn.kernels.sm90.flash_bwd_dkdv_adder import add_queries
from torch_attn.kernels.sm90.flash_bwd_dkdv_passes import run_passes
from torch_attn.kernels.sm90.flash_bwd_dq_producer import produce_keys
from torch_attn.kernels.sm90.flash_fwd import flash_fwd
from torch_attn.kernels.sm90.flash_fwd_producer import produce_keys as forward_keys
from torch_attn.kernels.sm90.halves import hand_over, receive_factor
from torch_attn.kernels.sm90.paged_attention import paged_attention
from torch_attn.kernels.sm90.queries import produce_queries
from torch_attn.kernels.sm90.spans import tiles_to_span
from torch_attn.layouts import layouts_of
from twin_attention.contract.operands import (
    BlockSparseOperands,
    FlashOperands,
    PagedOperands,
    VarlenOperands,
)
from twin_attention.interop.parity.cases import BlockSparseCase, FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import evaluate, expectations, parts_of
from twin_attention.interop.parity.suites.paged import paged_cases
from twin_attention.targets.config import use_configs

BACKEND = gluon_backend("sm90")
SUMMED = ["flash_bwd_fused"]
WITH_PASSES = ["flash_bwd_preprocess", "flash_bwd_fused", "flash_bwd_postprocess"]


@pytest.fixture(autouse=True)
def _sums_of_few_keys(monkeypatch):
    """Sum dq and run the passes beside the products for any number of keys and of work items."""
    monkeypatch.setattr(flash_bwd_module, "KEYS_BESIDE_ROWS", 0)
    monkeypatch.setattr(flash_bwd_module, "ITEMS_OF_SECTIONS", 0)
    with summing(True):
        yield


CASES = [
    FlashCase("full", 1, 256, 256, 1, 1),
    FlashCase("causal", 1, 200, 300, 1, 1, 128, causal=True),
    FlashCase("window", 1, 320, 320, 1, 1, window_size=(100, 20)),
    FlashCase("softcap", 1, 130, 256, 1, 1, softcap=2.0, dtype="float16"),
    FlashCase("large softcap", 1, 130, 256, 1, 1, softcap=60.0, causal=True),
    FlashCase("ragged", 2, 100, 200, 1, 1, 80),
    FlashCase("narrow values", 1, 140, 270, 1, 1, 96, 64, causal=True),
    FlashCase("wide values", 1, 140, 270, 1, 1, 64, 128),
    FlashCase("groups", 1, 150, 390, 4, 2, 64, causal=True),
    FlashCase("hidden rows", 1, 300, 150, 1, 1, causal=True),
]
LENGTHS = ((140, 150), (0, 30), (1, 1), (50, 0))
PACKED = [
    VarlenCase("packed", LENGTHS, (9, 9), 1, 1, sinks=True),
    VarlenCase("packed, full", ((70, 150), (30, 40)), (70, 30), 2, 1, causal=False),
    VarlenCase("packed, large heads", ((140, 150), (9, 70)), (20, 9), 1, 1, 128, 96),
    VarlenCase("packed, softcap", ((70, 150),), (5, 5), 1, 1, 80, softcap=2.0),
    # One tile of queries: a consumer may be at its end before the other one has begun.
    VarlenCase("packed, short, full", ((30, 70), (9, 40)), (70, 30), 1, 1, 128, causal=False),
    VarlenCase("packed, many heads", ((140, 9), (0, 1)), (0, 0), 9, 9, 32),
]
# Several sections of heads, whose sums are cleared and converted while others are added.
SECTIONS = [
    FlashCase("sections", 3, 140, 140, 4, 4, 64, causal=True),
    FlashCase("sections of groups", 3, 140, 130, 4, 2, 40, dtype="float16"),
    FlashCase("sections, listed", 3, 70, 260, 3, 3, 64, segments="documents", causal=True),
    VarlenCase("packed sections", ((90, 50), (130, 130)), (9, 9), 6, 3, 80, causal=False),
]
# More packed heads than have sums at a time where there are two programs.
MANY = VarlenCase("packed sections, many heads", ((60, 150),), (9, 0), 12, 12, 64)
SHARED = [
    FlashCase("shared keys", 1, 150, 270, 4, 1, 128, 64, causal=True),
    FlashCase("shared keys, full", 1, 192, 256, 3, 1, 64, dtype="float16"),
]


def is_wide(case):
    return isinstance(case, VarlenCase) and case.head_dim > 64


@in_turn(CASES + PACKED)
def test_backward_that_sums_dq(case, mode):
    launched = check_backward(case, mode, BACKEND)
    assert launched == (WITH_PASSES[:2] if is_wide(case) else SUMMED)


@in_turn(SECTIONS[2:], first="reads first")
def test_backward_by_sections(case, mode):
    launched = check_backward(case, mode, BACKEND)
    assert launched[-1] == "flash_bwd_fused"


@pytest.fixture
def _few_sms(monkeypatch):
    """With two programs there are sums for some of the heads at a time."""
    for module in (items_module, flash_bwd_module):
        monkeypatch.setattr(module, "num_sms", lambda device, target: 2)


@pytest.mark.usefixtures("_few_sms")
@in_turn([*SECTIONS, MANY])
def test_sections_have_the_places_of_earlier_ones(case, mode):
    check_backward(case, mode, BACKEND)


def test_sums_of_some_heads_at_a_time():
    """Two sections being computed, one being added, two being converted, and two to spare."""
    sizes = {"items": 4, "pieces": 2, "programs": 8, "unfinished": 1}
    assert heads_with_sums(together=2, heads=100, **sizes) == 2 * 7
    assert heads_with_sums(together=2, heads=9, **sizes) == 9
    assert heads_with_sums(together=8, heads=3, **sizes) == 3


UNORDERED = {
    "read and added before it is begun": (
        produce_queries, "await_begun(sections, section, MEMBERS)", READS_FIRST,
    ),
    "converted before it is added": (
        run_passes, "await_reports(sections.added_ptr + section, items)", WRITES_FIRST,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "text", "mode"), UNORDERED.values(), ids=UNORDERED)
def test_sums_are_awaited(kernel, text, mode):
    with pytest.raises(AssertionError):
        check_backward(SECTIONS[0], mode, BACKEND, {kernel: edited(kernel, text, "pass")})


UNREPORTED = {
    "what is begun": (run_passes, "report(sections.begun_ptr + section)"),
    "what is added": (add_queries, "report_added(sections, item)"),
    "what is converted": (run_passes, "report_read(sections.converted_ptr + section)"),
}


@pytest.mark.usefixtures("_few_sms")
@pytest.mark.parametrize(("kernel", "text"), UNREPORTED.values(), ids=UNREPORTED)
def test_what_is_not_reported_is_awaited_for_ever(kernel, text):
    with pytest.raises(DeadlockError):
        check_backward(SECTIONS[0], Mode(), BACKEND, {kernel: edited(kernel, text, "pass")})


def test_sums_that_fill_the_cache_are_converted_behind_the_kernel(monkeypatch):
    monkeypatch.setattr(flash_bwd_module, "SECTION_BYTES", 0)
    launched = check_backward(SECTIONS[0], Mode(), BACKEND)
    assert launched == WITH_PASSES


def test_rows_of_few_keys_are_prepared_before_the_kernel(monkeypatch):
    monkeypatch.setattr(flash_bwd_module, "KEYS_BESIDE_ROWS", 1000)
    launched = check_backward(MANY, Mode(), BACKEND)
    assert [x for x in launched if x != "tile_lists"] == WITH_PASSES[:2]


@pytest.mark.parametrize("case", [PACKED[0], *filter(is_wide, PACKED)], ids=lambda case: case.name)
def test_few_items_of_unknown_lengths_are_not_divided_into_sections(case, monkeypatch):
    monkeypatch.setattr(flash_bwd_module, "ITEMS_OF_SECTIONS", 24)
    launched = check_backward(case, Mode(), BACKEND)
    assert launched == (WITH_PASSES if is_wide(case) else SUMMED)


# The next item's keys, queries and place wait until those of an earlier item are read.
READ = {
    "keys": (
        produce_queries,
        "mbarrier.wait(kv_read.index(2 * stage + half), (turn // KV_STAGES & 1) ^ 1)",
    ),
    "queries": (
        produce_keys, "mbarrier.wait(q_read.index(slot), (turn // Q_STAGES & 1) ^ 1)",
    ),
}  # fmt: skip
ITEMS = FlashCase("items", 2, 300, 300, 2, 2, 64, causal=True, deterministic=True)


@pytest.mark.parametrize(("kernel", "text"), READ.values(), ids=READ)
def test_tiles_of_an_earlier_item_are_read_first(kernel, text):
    with pytest.raises(AssertionError):
        check_backward(ITEMS, WRITES_FIRST, BACKEND, {kernel: edited(kernel, text, "pass")})


def test_an_item_is_handed_over_once_an_earlier_one_is_read():
    text = "mbarrier.wait(read.index(slot * READERS + reader), phase ^ 1)"
    broken = {hand_over_item: edited(hand_over_item, text, "pass")}
    lengths = ((70, 60), (30, 90), (200, 180), (40, 300), (9, 9))
    with pytest.raises(DeadlockError):
        check_forward(VarlenCase("", lengths, (9, 9), 2, 1), WRITES_FIRST, BACKEND, broken)


@in_turn(SHARED)
def test_backward_that_sums_all(case, mode):
    assert check_backward(case, mode, BACKEND) == [*SUMMED, *["flash_bwd_postprocess"] * 2]


@in_turn(CASES + PACKED, "reads first")
def test_deterministic_backward(case, mode):
    case = replace(case, deterministic=True)
    assert check_backward(case, mode, BACKEND) == ["flash_bwd_dq", "flash_bwd_dkdv"]


LARGE = [
    FlashCase("256", 1, 192, 256, 1, 1, 256, softcap=2.0, dtype="float16"),
    FlashCase("192, groups", 1, 150, 270, 4, 2, 192, causal=True),
    FlashCase("136, window", 1, 200, 330, 1, 1, 136, window_size=(100, 20)),
    FlashCase("narrow values", 1, 140, 200, 1, 1, 256, 64, causal=True),
    FlashCase("wide values", 2, 130, 140, 1, 1, 64, 256),
    FlashCase("hidden rows", 1, 200, 100, 1, 1, 160, causal=True),
    VarlenCase("packed", ((70, 150), (0, 30), (50, 0)), (9, 9), 1, 1, 256, sinks=True),
    VarlenCase("packed, groups", ((140, 90), (9, 70)), (20, 9), 2, 1, 192, 128),
    # With one tile of dout in shared memory, in several tiles at the edges.
    VarlenCase("packed, narrow values", ((63, 133),), (9, 9), 2, 1, 200, 16, causal=False),
    VarlenCase("packed, wide values", ((140, 90), (0, 20)), (20, 9), 1, 1, 64, 256),
]


@in_turn(LARGE)
def test_backward_of_large_heads(case, mode):
    kernels = ["flash_bwd_dq", "flash_bwd_dkdv", "flash_bwd_dkdv"]
    assert check_backward(case, mode, BACKEND) == kernels


# Another consumer has the columns of out, dq, dk and dv behind 256.
HALVES = [
    FlashCase("512", 1, 130, 200, 2, 1, 512, causal=True, dtype="float16"),
    FlashCase("264, window", 1, 100, 270, 1, 1, 264, window_size=(100, 20)),
    FlashCase("320, softcap", 1, 100, 200, 2, 1, 320, softcap=2.0, sinks=True, causal=True),
    FlashCase("384, segments", 2, 140, 150, 1, 1, 384, segments="shuffled", sinks=True),
    FlashCase("400, hidden rows", 1, 200, 150, 1, 1, 400, causal=True, dropout_rate=0.2),
    FlashCase("512, tree", 1, 140, 130, 1, 1, 512, tree="any", causal=True),
    VarlenCase("packed", LENGTHS, (9, 9), 2, 1, 512, sinks=True),
    VarlenCase(
        "packed, slopes", ((65, 70), (0, 3), (129, 129)), (5, 3), 2, 1, 264, alibi="heads",
        causal=True, sinks=True,
    ),
    FlashCase("terms", 1, 130, 140, 1, 1, 488, relative=8, alibi="heads", row_max=True),
    FlashCase("bias", 1, 70, 90, 1, 1, 512, bias="hqk", dropout_rate=0.3),
]  # fmt: skip


@in_turn(HALVES)
def test_forward_in_halves(case, mode):
    assert check_forward(case, mode, BACKEND)[-1] == "flash_fwd"


@in_turn(HALVES, "reads first")
def test_backward_in_halves(case, mode):
    launched = check_backward(case, mode, BACKEND)
    kernels = ["flash_bwd_dq", "flash_bwd_dkdv", "flash_bwd_dkdv"]
    kernels += ["flash_bwd_dq"] * bool(case.relative)
    beside = ("tile_lists", "flash_bwd_preprocess")
    assert [x for x in launched if x not in beside] == kernels


HANDED = {
    "p is read first": (hand_over, "wait_for_all(P_READ, 256)"),
    "p is written first": (receive_factor, "wait_for_all(P_WRITTEN, 256)"),
    "q is read first": (forward_keys, "mbarrier.wait(q_read.index(NUM_TILES_Q + half), phase ^ 1)"),
}


@pytest.mark.parametrize(("kernel", "text"), HANDED.values(), ids=HANDED)
def test_what_is_handed_over_is_awaited(kernel, text):
    broken = {kernel: edited(kernel, text, "pass")}
    in_any_order = WRITES_FIRST._replace(last_first=None)
    with pytest.raises((AssertionError, InterpreterError)):
        check_forward(HALVES[0], in_any_order, BACKEND, broken)


TERMS_OF_BACKWARD = [
    FlashCase("slopes", 1, 70, 270, 2, 1, 64, alibi="heads", softcap=5.0, sinks=True),
    FlashCase("dropout", 1, 70, 140, 2, 1, 128, causal=True, alibi="heads", dropout_rate=0.3),
    VarlenCase("packed", ((70, 90), (0, 9)), (9, 9), 1, 1, alibi="heads", dropout_rate=0.5),
    FlashCase("large heads", 1, 70, 90, 1, 1, 192, causal=True, alibi="heads", dropout_rate=0.3),
    FlashCase("bias", 2, 70, 150, 2, 1, 64, causal=True, bias="bhqk", softcap=5.0),
    FlashCase("shared bias", 2, 70, 90, 2, 1, 64, bias="hqk", relative=20, dropout_rate=0.3),
]
# TMA loads the bias, and stores or adds ds as its gradient. Its readers are far apart in time.
BIASES_OF_BACKWARD = [
    FlashCase("bias", 1, 130, 264, 1, 1, 64, bias="bhqk", terms_in_q_dtype=True),
    FlashCase(
        "bias, groups", 2, 70, 152, 2, 1, 128, causal=True, bias="bhqk", softcap=5.0,
        dropout_rate=0.3, terms_in_q_dtype=True,
    ),
    FlashCase(
        "bias, shared keys", 1, 70, 272, 4, 1, 128, 64, bias="bhqk", dtype="float16",
        terms_in_q_dtype=True,
    ),
    FlashCase(
        "bias of two elements", 2, 70, 264, 2, 1, 64, bias="hqk", window_size=(100, 20),
        terms_in_q_dtype=True,
    ),
]  # fmt: skip


# A kernel of its own adds up ds, in order. Tiles that are not visible have a gradient of 0.
SHARED_BIASES = [
    FlashCase(
        "batch", 3, 140, 264, 1, 1, 64, bias="hqk", window_size=(40, 20), dropout_rate=0.3,
        terms_in_q_dtype=True,
    ),
    FlashCase("heads", 2, 70, 136, 2, 1, 128, bias="bqk", softcap=5.0, terms_in_q_dtype=True),
    FlashCase("both, float32", 2, 70, 152, 2, 2, 80, bias="qk", relative=20, alibi="heads"),
]  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", TERMS_OF_BACKWARD, ids=lambda case: case.name)
def test_backward_with_terms(case, deterministic):
    check_backward(replace(case, deterministic=deterministic), Mode(), BACKEND)


@in_turn(BIASES_OF_BACKWARD, "random")
def test_backward_that_stores_the_gradient_of_a_bias(case, mode):
    launched = check_backward(case, mode, BACKEND)
    assert {*SUMMED} <= {*launched} <= {*WITH_PASSES}


@pytest.mark.parametrize("case", [TERMS_OF_BACKWARD[4], BIASES_OF_BACKWARD[1]], ids=str)
def test_a_bias_that_is_nan_where_causal_hides_the_pair(case):
    def hide(inputs):
        bias = inputs["bias"]
        hidden = torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1 + case.seq_kv - case.seq_q)
        bias.masked_fill_(hidden, torch.nan)

    check_backward(case, Mode(), BACKEND, change=hide)


@in_turn(SHARED_BIASES)
def test_gradient_of_a_bias_that_pairs_share(case, mode):
    check_backward(case, mode, BACKEND)


@pytest.mark.parametrize(
    "case",
    [
        FlashCase("ends", 1, 130, 330, 2, 1, 64, relative=9),
        FlashCase("no ends", 1, 70, 136, 1, 1, 128, causal=True, relative=500),
        VarlenCase("packed", ((130, 70), (0, 9), (9, 140)), (9, 9), 2, 1, relative=0, causal=False),
        # Queries of the padding see only a sink, and no query sees keys of the padding.
        VarlenCase("padding", ((32, 32),), (14, 10), 2, 1, relative=2, sinks=True, causal=False),
    ],
    ids=lambda case: case.name,
)
def test_backward_that_adds_the_gradient_of_a_table(case):
    assert check_backward(case, WRITES_FIRST, BACKEND) == ["flash_bwd_preprocess", *SUMMED]


@pytest.mark.parametrize("case", EDGES, ids=lambda case: case.name)
def test_edges_of_tiles(case):
    change = None if case.spec.terms else lower_scores
    check_forward(case, MODES["random"], BACKEND, change=change)
    for deterministic in (False, True):
        case = replace(case, deterministic=deterministic)
        check_backward(case, MODES["random"], BACKEND, change=change)


@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.name)
def test_listed_tiles(case):
    assert check_forward(case, Mode(), BACKEND) == ["tile_lists", "flash_fwd"]
    launched = check_backward(case, Mode(), BACKEND)
    assert launched.count("tile_lists") == (1 if SUMMED[0] in launched else 3)


@pytest.mark.parametrize("mode", [WRITES_FIRST, MODES["reads first"]])
def test_deterministic_backward_of_listed_tiles(mode):
    case = replace(LISTED[1], deterministic=True)
    assert check_forward(case, mode, BACKEND) == ["tile_lists", "flash_fwd"]
    kernels = ["tile_lists", "flash_bwd_dq", "tile_lists", "flash_bwd_dkdv"]
    assert check_backward(case, mode, BACKEND) == kernels


FORWARD = [
    FlashCase("full", 1, 256, 256, 1, 1),
    FlashCase("causal", 1, 200, 300, 1, 1, 128, causal=True),
    FlashCase("window", 1, 320, 320, 1, 1, window_size=(100, 20)),
    FlashCase("softcap", 1, 130, 256, 1, 1, softcap=2.0, dtype="float16"),
    FlashCase("softcap, sinks", 1, 130, 256, 2, 1, softcap=2.0, sinks=True),
    FlashCase("softcap, hidden rows", 1, 300, 150, 1, 1, 256, causal=True, softcap=9.0),
    FlashCase(
        "softcap, hidden rows, sinks", 1, 130, 64, 1, 1, causal=True, softcap=9.0, sinks=True
    ),
    FlashCase("large softcap", 1, 70, 128, 1, 1, softcap=60.0),
    FlashCase("softcap, one key a row", 1, 70, 70, 1, 1, 96, window_size=(0, 0), softcap=15.0),
    FlashCase("softcap, one key", 1, 70, 1, 1, 1, 64, softcap=40.0),
    FlashCase("softcap, tiles", 1, 130, 384, 1, 1, softcap=2.0),
    FlashCase("softcap, tiles, edges", 1, 200, 400, 1, 1, 128, causal=True, softcap=20.0),
    FlashCase("softcap, tiles, 256", 1, 70, 192, 1, 1, 256, softcap=20.0),
    FlashCase("sinks", 2, 100, 200, 2, 2, 80, sinks=True),
    FlashCase("narrow values", 1, 140, 270, 2, 1, 256, 64, causal=True),
    FlashCase("hidden rows", 1, 300, 150, 1, 1, causal=True),
    VarlenCase("packed", LENGTHS, sinks=True, causal=False),
    VarlenCase("packed, causal", ((140, 150), (130, 300), (9, 9)), (20, 9), 2, 1),
    VarlenCase("packed, large heads", LENGTHS, (20, 9), 2, 1, 128),
    VarlenCase("packed, window", LENGTHS[:3], (0, 5), 2, 2, 96, 64, window_size=(70, 20)),
    VarlenCase("packed, softcap", LENGTHS[1:], head_dim=256, softcap=2.0, dtype="float16"),
    VarlenCase("padding alone", (), (70, 40)),
    VarlenCase("most without queries", ((3, 2), (0, 9), (0, 0), (0, 1), (0, 0)), (0, 0), 1, 1),
]


@in_turn(FORWARD)
def test_forward(case, mode):
    assert check_forward(case, mode, BACKEND) == ["flash_fwd"]


IN_SPANS = [
    FlashCase("full", 2, 200, 640, 2, 1, batch_invariant=True),
    FlashCase("causal", 1, 300, 700, 1, 1, 128, causal=True, sinks=True, batch_invariant=True),
    FlashCase("window", 1, 140, 900, 1, 1, 80, window_size=(400, 0), row_max=True,
              batch_invariant=True),
    FlashCase("hidden rows", 1, 300, 150, 1, 1, causal=True, sinks=True, batch_invariant=True),
    VarlenCase("packed", ((140, 650), (130, 300), (9, 9), (3, 0)), (20, 9), 2, 1,
               batch_invariant=True),
    VarlenCase("packed, window", ((140, 650), (70, 600)), (0, 5), 2, 2, 64,
               window_size=(300, 0), batch_invariant=True),
]  # fmt: skip
SHORT_SPANS = {tiles_to_span: edited(tiles_to_span, "SPAN - start % SPAN", "256 - start % 256")}


@in_turn(IN_SPANS)
def test_forward_in_spans(case, mode):
    assert check_forward(case, mode, BACKEND, SHORT_SPANS) == ["flash_fwd"]


@pytest.mark.parametrize("case", [x for x in FORWARD if "one key" in x.name], ids=lambda x: x.name)
def test_a_row_of_one_key_gives_its_value(case):
    """Without a maximum its p is not 1: the sum's rounding is undone."""
    inputs = make_inputs(case, "cpu")
    operands = FlashOperands(*(inputs[name] for name in "qkv"))
    with interpreted(Mode()):
        out, _ = flash_fwd(operands, case.spec, BACKEND)
    assert torch.equal(out, inputs["v"].expand_as(out))


# More items than programs; there may be no first product of the next item.
COUNTED = [
    FlashCase("64", 1, 300, 300, 4, 2, 64, causal=True),
    FlashCase("80, window", 2, 200, 330, 2, 2, 80, window_size=(100, 20)),
    FlashCase("128, sinks", 2, 300, 150, 2, 1, 128, causal=True, sinks=True),
    FlashCase("256", 1, 300, 300, 2, 2, 256, causal=True, dtype="float16"),
    FlashCase("slopes", 1, 300, 300, 2, 1, 64, causal=True, alibi="heads", dropout_rate=0.3),
    FlashCase("96, softcap", 2, 260, 260, 1, 1, 96, causal=True, softcap=20.0),
    FlashCase("192, narrow values", 1, 200, 330, 3, 1, 192, 64, causal=True, row_max=True),
    FlashCase(
        "bias", 2, 200, 264, 2, 1, 64, causal=True, bias="bhqk", softcap=5.0, terms_in_q_dtype=True
    ),
]


@pytest.fixture
def _counts_all(monkeypatch):
    monkeypatch.setattr(flash_fwd_module, "COUNTED_STEPS", {256: 1})


@pytest.mark.usefixtures("_counts_all")
@in_turn(COUNTED)
def test_forward_whose_tiles_come_from_a_counter(case, mode, monkeypatch):
    counters = []

    def counter(*problem):
        counters.append(item_counter(*problem))
        return counters[0]

    monkeypatch.setattr(flash_fwd_module, "item_counter", counter)
    assert check_forward(case, mode, BACKEND) == ["flash_fwd"]
    # Each of the three programs is told once that nothing is left.
    num_tiles = -(-case.seq_q // 128)
    assert counters[0].item() == num_tiles * case.heads_q * case.batch + 3


def _raise_scores(inputs):
    keys = inputs["k"]
    growth = torch.linspace(0.1, 30.0, keys.shape[-3])
    keys.mul_(growth[:, None, None].to(keys.dtype))


# So that sums are rescaled in some steps, and in others not.
@in_turn(
    [
        FlashCase("full", 1, 70, 330, 1, 1, 256),
        FlashCase("causal, sinks", 1, 150, 400, 2, 1, 192, causal=True, sinks=True),
        FlashCase("maxima", 1, 70, 200, 1, 1, 136, row_max=True),
        VarlenCase("packed", ((140, 300), (9, 100)), (20, 9), 1, 1, 256),
    ]
)
def test_forward_of_large_heads_whose_scores_rise(case, mode):
    assert check_forward(case, mode, BACKEND, change=_raise_scores) == ["flash_fwd"]


# A bias of pairs comes by TMA, or from global memory where its rows are no multiples of 16 bytes.
TERMS = [
    FlashCase("ALiBi", 1, 150, 270, 2, 1, 64, alibi="heads"),
    FlashCase("ALiBi, causal", 2, 150, 270, 2, 1, 128, alibi="all", causal=True),
    FlashCase("table", 1, 150, 400, 2, 1, 96, relative=40, terms_in_q_dtype=True),
    FlashCase("wide table", 1, 131, 37, 2, 1, relative=300, dtype="float16", window_size=(60, 9)),
    FlashCase("dropout", 2, 150, 270, 2, 1, 64, dropout_rate=0.3, sinks=True),
    FlashCase("bias", 2, 150, 264, 2, 1, 128, bias="bhqk", terms_in_q_dtype=True),
    FlashCase("bias, float32", 2, 150, 272, 2, 1, 64, bias="hqk", causal=True),
    FlashCase("bias, odd rows", 1, 150, 270, 2, 1, 64, bias="hqk", terms_in_q_dtype=True),
    FlashCase("bias of keys", 2, 70, 270, 2, 1, 64, bias="bk"),
    FlashCase("bias of queries", 2, 70, 270, 2, 1, 64, bias="hq", softcap=3.0),
    FlashCase("bias of heads", 1, 70, 140, 2, 1, 256, bias="h", dropout_rate=0.5),
    FlashCase("bias of whole tiles of keys", 1, 70, 256, 1, 1, 64, bias="bk"),
    FlashCase("bias and table", 1, 70, 330, 1, 1, 64, bias="hqk", relative=10),
    FlashCase("tiny scale", 1, 70, 140, 1, 1, 64, scale=1e-25, alibi="heads", relative=10),
    FlashCase("maxima", 1, 300, 150, 2, 1, 64, causal=True, sinks=True, softcap=5.0, row_max=True),
    FlashCase(
        "all terms", 2, 97, 200, 4, 2, 96, 64, bias="bhqk", relative=20, alibi="all",
        segments="documents", tree="nested", causal=True, window_size=(90, None), softcap=30.0,
        sinks=True, dropout_rate=0.2, row_max=True, terms_in_q_dtype=True,
    ),
    VarlenCase(
        "packed", ((140, 300), (0, 30), (70, 200)), (9, 9), 2, 1, 128, relative=30, alibi="all",
        dropout_rate=0.3, causal=False, row_max=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", TERMS, ids=lambda case: case.name)
def test_forward_with_terms(case):
    assert check_forward(case, Mode(), BACKEND)[-1] == "flash_fwd"


def _hide_by_bias(inputs):
    inputs["bias"][..., :128] = -torch.inf  # the first tile
    inputs["bias"][..., 70:75, :] = -torch.inf  # and all keys of some rows


def _negate_slopes(inputs):
    inputs["alibi_slopes"].neg_()


def _drop_as_a_part(inputs):
    first = torch.tensor([3, 5], dtype=torch.int32)
    inputs["dropout_seed"] = torch.cat([inputs["dropout_seed"], first])


@pytest.mark.parametrize(
    ("case", "change"),
    [
        (FlashCase("hidden", 1, 100, 256, 1, 1, bias="qk"), _hide_by_bias),
        (FlashCase("rising", 1, 100, 330, 2, 1, alibi="heads"), _negate_slopes),
        (FlashCase("dropout", 1, 70, 90, 2, 1, dropout_rate=0.3), _drop_as_a_part),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_forward_with_any_values_of_terms(case, change):
    check_forward(case, WRITES_FIRST, BACKEND, change=change)


@pytest.mark.parametrize("softcap", [30.0, 224.0])
def test_log_sum_exps_of_capped_scores_that_are_all_below_0(softcap):
    def lower(inputs):
        inputs["bias"].fill_(-6.0)

    case = FlashCase("", 1, 70, 300, 1, 1, 64, softcap=softcap, bias="qk", terms_in_q_dtype=True)
    check_forward(case, Mode(), BACKEND, change=lower)


NEIGHBOURS = (("q", 30, 180), ("k", 40, 210), ("v", 40, 210), ("dout", 30, 180))


def _spoilt(head_dim):
    """Return a packed case, its inputs, and the same with NaN in one sequence."""
    case = VarlenCase("", ((30, 40), (150, 170), (60, 60)), (10, 10), 1, 1, head_dim)
    inputs = make_inputs(case, "cpu")
    spoilt = {name: x.clone() for name, x in inputs.items()}
    for name, begin, end in NEIGHBOURS:
        spoilt[name][begin:end] = torch.nan
    return case, inputs, spoilt


def _operands(inputs) -> Any:
    return VarlenOperands(*map(inputs.get, VarlenOperands._fields))


def _without(x, begin, end):
    return torch.cat((x[:begin], x[end:]))


@pytest.mark.parametrize(("head_dim", "mode"), [(64, READS_FIRST), (128, WRITES_FIRST)])
def test_packed_sequences_do_not_see_their_neighbours(head_dim, mode):
    case, *both = _spoilt(head_dim)
    results = []
    for inputs in both:
        operands = _operands(inputs)
        with interpreted(mode):
            out, lse = flash_fwd(operands, case.spec, BACKEND)
        results.append((_without(out, 30, 180), _without(lse.T, 30, 180)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("head_dim", "deterministic"), [(64, False), (128, False), (64, True), (256, True)]
)
def test_gradients_of_packed_sequences_do_not_see_their_neighbours(head_dim, deterministic):
    case, *both = _spoilt(head_dim)
    exact = evaluate(both[0], case.spec, torch.float32)
    results = []
    for inputs in both:
        operands = _operands(inputs)
        out, lse = exact["out"].to(inputs["q"].dtype), exact["lse"].clone()
        if inputs is both[1]:
            out[30:180], lse[:, 30:180] = torch.nan, torch.nan
        spec = replace(case.spec, deterministic=deterministic)
        with interpreted(Mode()):
            gradients = flash_bwd(inputs["dout"], None, operands, out, lse, None, spec, BACKEND)
        dq, dk, dv = gradients[:3]
        results.append((_without(dq, 30, 180), _without(dk, 40, 210), _without(dv, 40, 210)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("offsets", [(-9, 300, 100, 500), (400, 0, 7, 2**31 - 1), (0, 20, 20, -1)])
def test_no_offsets_lead_outside_the_tensors(offsets):
    case = VarlenCase("", ((100, 90), (1, 30), (70, 0)), (10, 10), 1, 1)
    inputs = make_inputs(case, "cpu")
    inputs["cu_seqlens_q"] = torch.tensor(offsets, dtype=torch.int32)
    inputs["cu_seqlens_kv"] = inputs["cu_seqlens_q"].flip(0)
    operands = _operands(inputs)
    with interpreted(WRITES_FIRST) as launched:
        out, lse = flash_fwd(operands, case.spec, BACKEND)
        flash_bwd(inputs["dout"], None, operands, out, lse, None, case.spec, BACKEND)
    assert launched == ["flash_fwd", *SUMMED]


@pytest.mark.parametrize(
    ("counts", "mode"), [(False, WRITES_FIRST), (True, READS_FIRST), (True, Mode())]
)
def test_forward_with_a_block_mask(mode, counts, request):
    if counts:
        request.getfixturevalue("_counts_all")
    case = BlockSparseCase(
        "block mask", 2, 400, 520, 2, 1, 96, causal=True, tile_q=128, tile_kv=128, own_masks="all"
    )
    inputs, spec = make_inputs(replace(case, gradients=False), "cpu"), case.spec
    (expected,) = expectations(inputs, parts_of(spec))
    lists = BlockMask.of(inputs.pop("block_mask"))._asdict()
    operands = BlockSparseOperands(**inputs, **lists)
    with interpreted(mode) as launched:
        results = flash_fwd(operands, spec, BACKEND)
    assert launched == ["flash_fwd"]
    check_results(dict(zip(("out", "lse"), results, strict=True)), expected)


@pytest.mark.parametrize("in_spans", [False, True])
@pytest.mark.parametrize(("left", "mode"), [(None, READS_FIRST), (9, WRITES_FIRST), (None, Mode())])
def test_paged_attention(mode, left, in_spans):
    """Keys before the window hold NaN."""
    (case,) = paged_cases("small", "paged-chunks")
    case = replace(case, window_size=None if left is None else (left, 0), batch_invariant=in_spans)
    inputs, spec = make_inputs(case, "cpu"), case.spec
    (expected,) = expectations(inputs, parts_of(spec))
    if left is not None:
        lengths = zip(case.lengths, case.new_tokens, strict=True)
        poison_before(inputs, [n - new - left for n, new in lengths])
    with interpreted(mode, replace=SHORT_SPANS) as launched:
        results = paged_attention(PagedOperands(**inputs), spec, BACKEND)
    assert launched == ["paged_attention"]
    check_results(dict(zip(("out", "lse"), results, strict=True)), expected)


@pytest.mark.parametrize(
    ("head_dim", "kernel", "stages"),
    [(64, "flash_bwd_dq", 1), (192, "flash_bwd_dq", 4), (64, "flash_bwd_dkdv", 1)],
)
def test_stages_with_which_warps_would_wait_for_each_other_do_not_compile(head_dim, kernel, stages):
    case = VarlenCase("", ((70, 150),), (9, 9), 1, 1, head_dim, deterministic=True)
    with use_configs({kernel: {"num_stages": stages}}), pytest.raises(AssertionError, match=r"^$"):
        check_backward(case, WRITES_FIRST, BACKEND)


@pytest.mark.parametrize("head_dim", range(16, 264, 8))
def test_results_of_packed_sequences_have_two_addresses_at_most(head_dim):
    """JAX passes no more."""
    case = VarlenCase("", ((70, 150),), (9, 9), 1, 1, head_dim, dtype="bfloat16")
    layout = layouts_of(torch.empty(1, 79, 1, head_dim, dtype=torch.bfloat16))
    assert len(stored_maps_of(case.spec, layout, 64)) <= 2


@pytest.mark.parametrize(
    "case",
    [
        FlashCase("bias", 1, 70, 136, 2, 1, 64, bias="bhqk", terms_in_q_dtype=True),
        FlashCase("table", 1, 70, 270, 1, 1, 64, relative=20, causal=True),
        FlashCase("slopes", 1, 70, 136, 1, 1, 128, alibi="heads", dtype="float16"),
        FlashCase("bias and slopes", 1, 70, 136, 1, 1, 64, bias="hqk", alibi="heads", sinks=True),
    ],
    ids=lambda case: case.name,
)
def test_any_number_may_hide_keys(case):
    """The backward reads what the forward keeps of lse. Products are fused as on a GPU."""
    for value in (-1e6, -1e9, torch.finfo(torch.float32).min):
        inputs = make_inputs(case, "cpu")
        hide(inputs, value)
        (expected,) = expectations(inputs, parts_of(case.spec))
        dout, dlse = inputs.pop("dout"), inputs.pop("dlse")
        operands, family = FlashOperands(**inputs), BACKEND.family
        with interpreted(WRITES_FIRST):
            forward = family.function("flash_fwd")(operands, case.spec, BACKEND)
        check_results(dict(zip(("out", "lse"), forward, strict=False)), expected)
        for deterministic in (False, True):
            spec = replace(case.spec, deterministic=deterministic)
            with interpreted(WRITES_FIRST):
                backward = family.function("flash_bwd")
                gradients = backward(dout, dlse, operands, *forward, spec, BACKEND)
            named = gradients._asdict().items()
            check_results({f"d{x}": y for x, y in named if y is not None}, expected)
