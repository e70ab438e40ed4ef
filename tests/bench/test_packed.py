"""The jobs of `python -m bench packed`, its calls and its peers."""

import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from bench import ours
from bench.job import Absent, Subject
from bench.peers import PACKED, packed_peers
from bench.problems import attention_check, attention_tensors
from bench.records import YARDSTICKS, Times
from bench.report.plots import of_suite
from bench.report.sections import sections
from bench.suites import packed
from bench.suites.packed import cases, columns, dense_case, jobs
from interop.parity.cases import VarlenCase
from torch_attn import flash_attention_varlen
from twin_attention.contract.cost import forward_flops

TARGETS = ["sm90", "sm80"]
LENGTHS = (5, 12, 1, 9)
CASE = VarlenCase(
    "packed", tuple((n, n) for n in LENGTHS), (0, 0), heads_q=2, heads_kv=1, head_dim=16
)


def test_the_grid():
    found = {case.name: [n for n, _ in case.lengths] for case in cases()}
    assert list(found) == [
        f"{name}-d{d}"
        for d in (64, 128)
        for name in ("lognormal-16384", "lognormal-65536", "equal-16384")
    ]
    for case in cases():
        lengths = found[case.name]
        assert sum(lengths) == int(case.name.split("-")[1])
        assert all(pair == (n, n) for pair, n in zip(case.lengths, lengths, strict=True))
        assert case.heads_q * case.head_dim == 2048
        assert case.causal
    assert set(found["equal-16384-d64"]) == {1024}
    # As drawn once, whatever the version of Python; the last is cut.
    first = [199, 2575, 529]
    assert found["lognormal-16384-d64"][:3] == found["lognormal-65536-d64"][:3] == first
    assert all(sum(x) / len(x) >= 1024 for x in found.values())


def test_every_subject_at_every_case():
    found = jobs(TARGETS)
    assert [job.operation for job in found] == ["forward", "backward"] * 6
    names = ("torch gluon", "jax mosaic", "torch triton", "jax triton", *YARDSTICKS.values())
    subjects = {Subject(name, target) for name in names for target in TARGETS}
    for job in found:
        assert set(job.factories) == subjects | {Subject(name) for name in PACKED}
    assert [job.case["name"] for job in jobs(TARGETS, "equal-16384-d128")] == [
        "equal-16384-d128"
    ] * 2


def test_the_cost_is_of_pairs_within_documents_and_the_dense_one_is_near():
    for job, case in zip(jobs(["sm90"])[::2], cases(), strict=True):
        pairs = sum(n * (n + 1) // 2 for n, _ in case.lengths)
        assert job.flops == 4 * 2048 * pairs
        dense = forward_flops(dense_case(case).spec)
        assert dense == pytest.approx(job.flops, rel=1e-3)
        assert (dense == job.flops) >= case.name.startswith("equal")
        assert job.bytes == 4 * 2 * 2048 * len_of(case) + 4 * case.heads_q * len_of(case)


def len_of(case):
    return sum(n for n, _ in case.lengths)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("name", ["torch triton", "jax triton"])
def test_our_calls_are_right_and_the_gate_sees_what_is_wrong(name, operation):
    tensors = attention_tensors(CASE, "cpu")
    check = attention_check(CASE, operation, tensors)
    call = ours.packed_factories(["sm80"])[Subject(name, "sm80")](CASE, operation, tensors)
    arrays = call.result(call.run())
    assert check(arrays) <= 1
    assert check([x + 1 for x in arrays]) > 1


def test_a_dense_yardstick_is_checked_on_its_own(monkeypatch):
    tensors = attention_tensors(CASE, "cpu")
    factory = packed._factories(["sm80"])[Subject("torch triton dense", "sm80")]
    call = factory(CASE, "forward", tensors)
    assert call.result is None
    assert call.run().shape == dense_case(CASE).shapes[0]
    monkeypatch.setattr(packed, "attention_check", lambda *_: lambda arrays: 2.0)
    with pytest.raises(ValueError, match="times the budget"):
        factory(CASE, "forward", tensors)


@pytest.fixture
def stand_ins(monkeypatch):
    """Peers that a CPU can run: our reference, or JAX's own attention."""

    def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
        assert (max_q, max_k, dropout, debug) == (max(LENGTHS), max(LENGTHS), 0.0, False)
        return (flash_attention_varlen(q, k, v, cu_q, cu_k, causal=causal, scale=scale),)

    def fa3(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
        assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
        offsets = cu_seqlens_q, cu_seqlens_k
        return flash_attention_varlen(q, k, v, *offsets, causal=causal, scale=softmax_scale)

    def fa4(q, k, v, qv=None, **options):  # qv is before the offsets, unlike in fa3
        return fa3(q, k, v, **options), None

    def tokamax(*qkv, implementation, **options):
        return jax.nn.dot_product_attention(*qkv, **options)

    aten = SimpleNamespace(_flash_attention_forward=flash_forward)
    monkeypatch.setattr(packed_peers, "_aten", lambda: aten)
    monkeypatch.setattr(packed_peers, "compiled", lambda function: function)
    for module, function in (("fa3_fwd_interface", fa3), ("flash_attn.cute", fa4)):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_varlen_func=function))
    monkeypatch.setitem(sys.modules, "tokamax", SimpleNamespace(dot_product_attention=tokamax))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("peer", [name for name in PACKED if "cuDNN" not in name])
def test_a_peer_is_right(stand_ins, peer):
    tensors = attention_tensors(CASE, "cpu")
    # FlexAttention has no backward on a CPU, and FA3's package none at all.
    operation = "forward" if peer in ("FlexAttention", "FA3 varlen") else "backward"
    call = PACKED[peer](CASE, operation, tensors)
    assert attention_check(CASE, operation, tensors)(call.result(call.run())) <= 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(300, 5, 1, 414), (640,), (128, 256, 128), (100, 0, 29)])
def test_the_mask_of_documents_is_that_of_its_pairs(lengths, causal):
    case = replace(CASE, lengths=tuple((n, n) for n in lengths), causal=causal)
    mask = packed_peers.document_mask(case, "cpu")
    size = (sum(lengths), sum(lengths))
    want = create_block_mask(mask.mask_mod, None, None, *size, device="cpu")
    assert torch.equal(mask.to_dense()[0, 0], want.to_dense()[0, 0])
    assert torch.equal(mask.full_kv_num_blocks, want.full_kv_num_blocks)
    assert mask.seq_lengths == want.seq_lengths


@pytest.mark.parametrize("peer", PACKED)
@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"padding": (0, 3)}, {"lengths": ((3, 4),)}, {"sinks": True}]
)
def test_a_peer_is_absent_where_its_adapter_would_drop_something(stand_ins, peer, options):
    case = replace(CASE, **options)
    with pytest.raises(Absent):
        PACKED[peer](case, "forward", attention_tensors(case, "cpu"))


def test_a_peer_that_would_see_padding_or_needs_too_much_is_absent(stand_ins, monkeypatch):
    tensors = attention_tensors(CASE, "cpu")
    with pytest.raises(Absent, match="it would see padding"):
        PACKED["FA2 padded"](replace(CASE, causal=False), "forward", tensors)
    scores = 4 * 2 * 27**2
    for operation, limit in (("forward", scores - 1), ("backward", 4 * scores - 1)):
        monkeypatch.setattr(packed_peers, "SCORES_MAX", limit)
        with pytest.raises(Absent, match="its scores would take"):
            PACKED["jax.nn XLA"](CASE, operation, tensors)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace())
    with pytest.raises(Absent, match="has no flash_attn_varlen_func"):
        PACKED["FA3 varlen"](CASE, "forward", tensors)


def test_fa4_is_absent_at_a_head_size_that_it_does_not_take(stand_ins):
    case = replace(CASE, head_dim=20)
    with pytest.raises(Absent, match="takes head sizes up to 256 that 8 divides, not 20"):
        PACKED["FA4 varlen"](case, "forward", attention_tensors(case, "cpu"))


def test_columns_tables_and_plots_of_its_records(record):
    found = jobs(TARGETS)
    times = Times(2.0, 1.9, 2.1)
    subjects = [("torch triton", "sm90"), ("torch triton dense", "sm90"), ("FA2 varlen", None)]
    records = [
        replace(
            record(), suite="packed", case=job.case, operation=job.operation,
            implementation=name, target=target, times=times, tflops=100.0,
        )
        for job in found
        for name, target in subjects
    ]  # fmt: skip
    assert columns(records[0]) == {
        "documents": 15, "tokens": 16384, "longest": 3209, "H": 32, "D": 64, "pass": "forward",
        "TFLOP/s": 100.0, "host, us": None,
    }  # fmt: skip
    (section,) = sections(records)
    rates = section.tables["Forward, TFLOP/s"]
    assert rates[0][1:] == ["torch triton sm90", "torch triton dense sm90", "FA2 varlen"]
    assert len({row[0] for row in rates}) == 7
    speeds = next(grid for title, grid in section.tables.items() if title.startswith("Speed-up"))
    assert not any("dense" in row[1] for row in speeds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        titles = [picture.title for picture in of_suite(records, section.peaks)]
    assert any(title.startswith("Forward: TFLOP/s by case") for title in titles)
