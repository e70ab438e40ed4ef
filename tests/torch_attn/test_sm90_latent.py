"""The SM90 kernel of latent caches. Slots past a sequence's length hold NaN (`make_inputs`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.oracle import poison_before
from tests.torch_attn.explicit_kernels import check_results, gluon_backend, in_turn
from tests.torch_attn.gluon_interpreter import (
    READS_FIRST,
    WRITES_FIRST,
    DeadlockError,
    InterpreterError,
    Mode,
    edited,
    interpreted,
)
from torch_attn.kernels.merge import merge_splits
from torch_attn.kernels.sm90 import paged_decode as module
from torch_attn.kernels.sm90.halves import hand_over
from twin_attention.contract.operands import DecodeOperands, PagedOperands
from twin_attention.interop.parity.cases import DecodeCase, PagedCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import expectations, parts_of
from twin_attention.targets.family import portable_backend

BACKEND = gluon_backend("sm90")
SIZES = {"heads_q": 64, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}
ONE = DecodeCase("one token", (0, 1, 63, 64, 65, 192, 193), 1, max_pages=13, num_splits=1, **SIZES)
CASES = [
    ONE,
    replace(ONE, name="two groups", heads_q=128, heads_kv=2, lengths=(127, 129), sinks=True),
    replace(ONE, name="splits", lengths=(0, 65, 200), tokens=2, num_splits=3, sinks=True),
    replace(
        ONE, name="window", lengths=(0, 130, 300), tokens=2, page_size=64, max_pages=5,
        window_size=(100, 0), softcap=20.0, dtype="float16",
    ),
    replace(ONE, name="pages longer than tiles", page_size=128, max_pages=3, head_dim=512),
    replace(ONE, name="two pieces behind the values", lengths=(260, 9), head_dim=560),
    PagedCase(
        "packed", (150, 41, 33, 5, 0), new_tokens=(3, 1, 0, 7, 2), padding=3, max_pages=10,
        num_splits=2, **SIZES,
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _merge_in_the_interpreter(monkeypatch):
    """Triton's interpreter has no launch that depends on another."""

    def merge(*arguments):
        merge_splits(*arguments[:-1], portable_backend("torch_attn", None))

    monkeypatch.setattr(module, "merge_splits", merge)


def check(case, mode, replaced=None, before=None, change=None):
    inputs, spec = make_inputs(case, "cpu"), case.spec
    if change is not None:
        change(inputs)
    (expected,) = expectations(inputs, parts_of(spec))
    if before is not None:
        poison_before(inputs, before)
    operation, operands = "paged_decode", DecodeOperands
    if isinstance(case, PagedCase):
        operation, operands = "paged_attention", PagedOperands
    assert BACKEND.family.supports(operation, spec, "sm90") is None
    with interpreted(mode, replace=replaced) as launched:
        results = BACKEND.family.function(operation)(
            operands(v_pages=None, **inputs), spec, BACKEND
        )
    check_results(dict(zip(("out", "lse"), results, strict=True)), expected)
    return launched


@in_turn(CASES)
def test_latent_caches(case, mode):
    launched = check(case, mode)
    assert launched == ["paged_decode", *["combine"] * (case.num_splits > 1)]


def test_keys_before_the_window_are_not_read_as_values():
    case = next(x for x in CASES if x.name == "window")
    check(case, Mode(), before=[n - case.tokens - 100 for n in case.lengths])


def test_scores_that_rise_rescale_both_halves():
    """All scores of a later tile are much larger than those before."""

    def rise(inputs):
        inputs["k_pages"][inputs["block_tables"][0, 4:9]] *= 30.0

    check(replace(ONE, lengths=(150,)), READS_FIRST, change=rise)


def test_page_ids_out_of_range_are_clamped():
    def leave(inputs):
        tables = inputs["block_tables"]
        tables[tables == 0], tables[tables == len(inputs["k_pages"]) - 1] = -7, 10**6

    check(replace(ONE, lengths=(200, 300), max_pages=12), Mode(), change=leave)


MISSING = {
    "values past the end": (
        module._visit, "clear_rows(values, slot, rows.end - start, loaded, phase)",
        AssertionError,
    ),
    "the report of read keys": (
        module._consume_keys, "arrive(FIRST_READ + index % NUM_STAGES, 128 + 32)",
        DeadlockError,
    ),
    "the wait for read p": (hand_over, "wait_for_all(P_READ, 256)", InterpreterError),
    "the fence behind p": (hand_over, "fence_async_shared()", InterpreterError),
}  # fmt: skip


ONE_LONG = replace(ONE, lengths=(250,), max_pages=16)


@pytest.mark.parametrize(("function", "text", "error"), MISSING.values(), ids=MISSING)
def test_what_the_kernel_must_not_miss(function, text, error):
    with pytest.raises(error):
        check(ONE_LONG, WRITES_FIRST, {function: edited(function, text, "pass")})


@pytest.mark.parametrize("part", range(3))
def test_each_part_of_a_tile_is_read_before_the_next_load(part):
    waits = "if i >= NUM_STAGES:"
    broken = edited(module._produce, waits, f"if i >= NUM_STAGES and part != {part}:")
    with pytest.raises((AssertionError, InterpreterError)):
        check(ONE_LONG, WRITES_FIRST, {module._produce: broken})


@pytest.mark.parametrize("part", range(3))
def test_each_part_of_a_tile_is_loaded_before_it_is_read(part):
    waits = f"wait_for_step(k_full[{part}], step)"
    with pytest.raises((AssertionError, InterpreterError)):
        check(
            ONE_LONG,
            READS_FIRST,
            {module._start_scores: edited(module._start_scores, waits, "pass")},
        )
