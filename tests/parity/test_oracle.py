"""The oracle in pieces gives what the contract's formula gives in one go."""

from dataclasses import replace

import pytest
import torch

from twin_attention.contract.operands import DecodeOperands, FlashOperands
from twin_attention.contract.reference.attention import attention_backward, attention_forward
from twin_attention.contract.reference.paged import paged_forward
from twin_attention.contract.tolerances import rounded_delta
from twin_attention.interop.parity import oracle
from twin_attention.interop.parity.cases import DecodeCase, FlashCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import evaluate, expectations, parts_of, sample_of
from twin_attention.interop.parity.suites.decode import decode_cases
from twin_attention.interop.parity.suites.flash import flash_cases

CASE = FlashCase(
    "pieces", batch=2, seq_q=70, seq_kv=53, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24,
    dtype="float32", causal=True, softcap=5.0,
)  # fmt: skip


def in_one_go(inputs, spec, dtype):
    operands = FlashOperands(*(inputs.get(name) for name in FlashOperands._fields))
    out, lse = attention_forward(operands, spec, dtype)
    gradients = attention_backward(inputs["dout"], inputs["dlse"], operands, spec, dtype)
    found = {f"d{name}": dx for name, dx in gradients._asdict().items() if dx is not None}
    return {"out": out, "lse": lse, **found}


def assert_same(got, want):
    assert list(got) == list(want)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        CASE, replace(CASE, batch=0), replace(CASE, seq_kv=0), replace(CASE, seq_q=0),
        replace(CASE, sinks=True), replace(CASE, seq_kv=0, sinks=True),
        replace(CASE, segments="shuffled", sinks=True),
    ],
)  # fmt: skip
def test_slicing_agrees_with_unsliced(case, torch_device):
    inputs = make_inputs(case, torch_device)
    got = evaluate(inputs, case.spec, torch.float64)
    assert_same(got, in_one_go(inputs, case.spec, torch.float64))


@pytest.mark.parametrize("window", [(5, 0), (0, 3), (7, 4)])
def test_a_stretch_agrees_with_the_whole_sequence(window, monkeypatch, torch_device):
    monkeypatch.setattr(oracle, "SAMPLE_ABOVE", 0)
    monkeypatch.setattr(oracle, "STRETCH", 32)
    case = FlashCase(
        "stretch", batch=2, seq_q=100, seq_kv=100, heads_q=4, heads_kv=2, head_dim=16,
        dtype="float32", window_size=window,
    )  # fmt: skip
    middle = torch.empty(case.shapes[0], device="meta")[0].numel() + (50 * 4 + 3) * 16
    blocks = [*parts_of(case.spec), oracle._around(case.spec, middle)]
    inputs = make_inputs(case, torch_device)
    whole = in_one_go(inputs, case.spec, torch.float64)
    assert [block.where["q"][1] for block in blocks] == [
        slice(0, 32),
        slice(68, 100),
        slice(34, 66),
    ]
    for expectation in expectations(inputs, blocks):
        assert expectation.ref["dk"].shape[:3:2] == (1, 1)
        assert expectation.ref["dk"].shape[1] >= 32 - 2 * sum(window)
        assert_same(expectation.ref, expectation.crop(whole))


@pytest.mark.parametrize(
    "case", [*decode_cases(), DecodeCase("no-pages", lengths=(0, 9), tokens=2, max_pages=0)],
    ids=lambda case: case.name,
)  # fmt: skip
def test_a_decode_sequence_by_sequence_agrees_with_all_at_once(case, torch_device):
    inputs = make_inputs(case, torch_device)
    (everything,) = expectations(inputs, parts_of(case.spec))
    operands = DecodeOperands(**{"v_pages": None} | inputs)
    if case.tokens is None:
        operands = operands._replace(q=operands.q[:, None])
    out, lse = paged_forward(operands, case.spec, torch.float64)
    if case.tokens is None:
        out, lse = out[:, 0], lse[:, :, 0]
    assert_same(everything.ref, {"out": out, "lse": lse})
    assert everything.crop({"out": out})["out"].shape == out.shape
    assert {x.dtype for x in everything.lp.values()} == {getattr(torch, case.dtype)}
    assert everything.lp["out"].isfinite().all()


def test_samples_hold_the_elements_around_2_to_31():
    for case in flash_cases("large", "2g-elements"):
        shape = (case.batch, case.seq_q, case.heads_q, case.head_dim)
        last = torch.Size(shape).numel() - 1
        found = parts_of(case.spec)
        for element, block in zip((0, 2**31 - 1, 2**31, last), found, strict=True):
            row, head = divmod(element // case.head_dim, case.heads_q)
            batch, token = divmod(row, case.seq_q)
            sequence, queries, heads = block.where["q"]
            assert batch in range(case.batch)[sequence]
            assert head in range(case.heads_q)[heads]
            assert token in range(case.seq_q)[queries][block.inner or slice(None)]
            assert block.spec.seq_q <= oracle.STRETCH


CHUNKS = {
    "causal": FlashCase("a", 3, 40, 40, 4, 2, 16, causal=True),
    "window": FlashCase("b", 1, 24, 50, 2, 2, 16, window_size=(7, 3)),
    "left": FlashCase("c", 2, 50, 24, 3, 1, 16, head_dim_v=24, window_size=(9, None)),
    "full": FlashCase("d", 1, 33, 33, 6, 6, 16, dtype="float32", softcap=5.0),
    "sinks": FlashCase("e", 2, 33, 33, 6, 2, 16, dtype="float32", sinks=True),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_float64_in_chunks_is_float64_at_once(name, monkeypatch, torch_device):
    monkeypatch.setattr(oracle, "SCORES", 500)
    case = CHUNKS[name]
    first_head = (slice(0, 1), slice(0, 1))
    assert sum(x.where["k"][::2] == first_head for x in oracle._chunks(case.spec)) > 2
    inputs = make_inputs(case, torch_device)
    whole = in_one_go(inputs, case.spec, torch.float64)
    assert_same(evaluate(inputs, case.spec, torch.float64), whole)
    for expectation in expectations(inputs, sample_of(case.spec)):
        assert list(expectation.ref) == ["out", "lse", "dq", "dk", "dv"]  # dsinks is of all parts
        assert_same(expectation.ref, expectation.crop(whole))


def test_a_decode_reads_no_more_of_a_table_than_its_sequence_needs(monkeypatch, torch_device):
    case = DecodeCase("wide", lengths=(20, 0, 33), tokens=1, max_pages=64)
    seen = []

    def spy(operands, spec, dtype):
        seen.append((tuple(operands.block_tables.shape), spec.cache.max_pages))
        return paged_forward(operands, spec, dtype)

    monkeypatch.setattr(oracle, "paged_forward", spy)
    evaluate(make_inputs(case, torch_device), case.spec, torch.float64)
    assert seen == [((1, pages), pages) for pages in (2, 0, 3)]


def test_a_sample_has_both_ends():
    three, many = (FlashCase("", batch, heads_kv=1).spec for batch in (3, 1000))
    assert [part.where["q"][0].start for part in sample_of(three)] == [0, 1, 2]
    chosen = [part.where["q"][0].start for part in sample_of(many)]
    assert (chosen[0], chosen[-1], len(set(chosen))) == (0, 999, 4)
    assert chosen == [part.where["q"][0].start for part in sample_of(many)] == sorted(chosen)
    heads = sample_of(FlashCase("", 2, heads_q=4, heads_kv=2).spec)
    starts = [(x.where["k"][0].start, x.where["k"][2].start) for x in heads]
    assert starts == [(0, 0), (0, 1), (1, 0), (1, 1)]
    decode = sample_of(DecodeCase("", lengths=(5,) * 1000).spec)
    assert [part.where["q"].start for part in decode] == chosen


@pytest.mark.parametrize(
    ("name", "option"), [("dsinks", {"sinks": True}), ("dbias", {"bias": "h"})]
)
def test_a_sum_over_rows_is_expected_to_be_as_wrong_as_its_terms(name, option, torch_device):
    """Over many heads, lp's own errors are as large as the expected ones; none is held to less."""
    case = FlashCase("sums", 2, 150, 90, 64, 64, 32, dtype="float16", **option)
    inputs = make_inputs(case, torch_device)
    (expected,) = expectations(inputs, parts_of(case.spec))
    ref, held = expected.ref[name], expected.lp[name]
    lp = evaluate(inputs, case.spec, torch.float16)[name].double()
    own, least = (lp - ref).abs(), (held - ref).abs()
    assert (least >= own * (1 - 1e-9)).all()
    raised = least > own * (1 + 1e-9)
    assert 0.3 < raised.double().mean() < 0.9  # a normal error is below its deviation in 68 %
    deviations = own.square().mean() / least[raised].square().mean()
    assert 0.5 < deviations.sqrt() < 2


@pytest.mark.parametrize(
    ("terms", "sharing"),
    [({"relative": 0}, 150), ({"bias": "qk"}, 8), ({"bias": "bhqk"}, 1), ({"bias": "k"}, 1200)],
)
def test_rows_that_share_a_value_of_what_is_added_to_scores(terms, sharing, torch_device):
    """Errors of their ds add up; each alone is that of dq, without the scale and keys."""
    case = FlashCase("shared", 2, 150, 90, 4, 2, 64, dtype="float32", scale=2.0, **terms)
    inputs = make_inputs(case, torch_device)
    (expected,) = expectations(inputs, parts_of(case.spec))
    (name,) = expected.cancelled.keys() & {"dbias", "drelative_bias"}
    of_a_row = expected.cancelled["dq"] / 2.0 / float(inputs["k"].abs().max())
    sharing *= 2 if name == "drelative_bias" else 1  # sequences
    assert expected.cancelled[name] == pytest.approx(of_a_row * sharing**0.5)


def test_dropout_leaves_the_rounding_of_out_in_delta(torch_device):
    """lp rounds what the kernels round: out of a row with one key is a multiple of v."""
    case = FlashCase("one key", 1, 40, 40, 2, 2, 64, dtype="float16", window_size=(0, 0))
    for rate, least in ((0.0, 0.0), (0.9, 1e-3)):
        one = replace(case, dropout_rate=rate)
        inputs = make_inputs(one, torch_device)
        inputs["dlse"].zero_()
        (expected,) = expectations(inputs, parts_of(one.spec))
        error = (expected.lp["dq"].double() - expected.ref["dq"]).abs().max()
        assert least <= error <= 40 * least + 1e-6


def test_a_table_of_one_number_has_the_errors_of_delta(torch_device):
    case = FlashCase("", 1, 20, 20, 9, 1, 16, window_size=(0, 0), relative=0, sinks=True)
    inputs = make_inputs(case, torch_device)
    (expected,) = expectations(inputs, parts_of(case.spec))
    delta = rounded_delta(expected.ref["out"], inputs["dout"].double(), case.dtype)
    assert (expected.errors["drelative_bias"][:, 0] >= delta.square().sum((0, 1)).sqrt()).all()


def test_a_capped_score_has_the_error_of_its_product(torch_device):
    case = FlashCase("", seq_q=9, seq_kv=9, dtype="float32", scale=9.0)
    inputs = make_inputs(case, torch_device)
    exponents = []
    for softcap in (None, 2.0):
        spec = replace(case, softcap=softcap).spec
        (whole,) = expectations(inputs, parts_of(spec))
        exponents.append(whole.exponents)
    assert torch.equal(*exponents)


def test_where_float16_ends_other_dtypes_say_how_wrong_it_would_be(torch_device):
    case = FlashCase("", dtype="float16", alibi="heads", relative=3, dropout_rate=0.9)
    inputs = make_inputs(case, torch_device)
    inputs["relative_bias"].zero_()
    errors = []
    for slope in (30.0, 1e30):  # each row sees its nearest key only
        inputs["alibi_slopes"].fill_(slope)
        (expected,) = expectations(inputs, parts_of(case.spec))
        assert all(x.isfinite().all() for x in expected.errors.values())
        errors.append({
            x: (expected.lp[x].double() - expected.ref[x]).square().mean().sqrt()
            for x in ("out", "dq", "dk", "dv")
        })  # fmt: skip
    assert all(0.5 * errors[0][x] < errors[1][x] < 3 * errors[0][x] for x in errors[0]), errors


def test_a_row_of_one_value_past_float16_has_the_mean(torch_device):
    """A score that large keeps nothing of q·k in float32, where kernels add."""
    case = FlashCase("", 1, 8, 8, 1, 1, 16, dtype="float16", relative=9)
    inputs = make_inputs(case, torch_device)
    inputs["relative_bias"][:] = -1e10
    (expected,) = expectations(inputs, parts_of(case.spec))
    mean = inputs["v"].double().mean(1, keepdim=True)
    error = (expected.lp["out"].double() - expected.ref["out"]).abs()
    assert (error >= 0.9 * (mean - expected.ref["out"]).abs() - 1e-3).all()
