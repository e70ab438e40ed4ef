"""Laws of paged decoding. They mostly share one problem: JAX compiles each distinct one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.conftest import ON_GPU
from tests.oracle import assert_within_budget, poison_before
from tests.sides import takes
from twin_attention.interop.parity.cases import DecodeCase, absent_operands
from twin_attention.interop.parity.inputs import make_inputs

# Pages that fill no tile and straddle two, and a sequence that every split has a part of.
CASE = DecodeCase(
    "law", lengths=(70, 0, 33, 150), tokens=2, heads_q=2, heads_kv=1, head_dim=32, head_dim_v=16,
    dtype="float16", page_size=5, max_pages=30, num_splits=3,
)  # fmt: skip

any_case = st.builds(
    DecodeCase,
    name=st.just("any"),
    lengths=st.lists(
        st.integers(0, 250)
        | st.sampled_from([n + i for n in (16, 64, 68, 96, 100, 128, 192) for i in (-1, 0, 1)]),
        min_size=1,
        max_size=3,
    ).map(tuple),
    tokens=st.sampled_from([None, 1, 2, 7, 16]),
    heads_q=st.sampled_from([2, 6]),
    heads_kv=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([16, 40, 64, 72]),
    head_dim_v=st.sampled_from([16, 24, 64]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    page_size=st.sampled_from([1, 4, 17, 32, 100]),
    kv_dtype=st.sampled_from([None, "int8", "float8_e4m3fn"]),
    scale_shape=st.just(()),
    sinks=st.booleans(),
    scale=st.sampled_from([None, 0.0, -0.2, 0.7]),
    window_size=st.none()
    | st.tuples(st.sampled_from([None, 0, 5, 40]), st.sampled_from([None, 2])),
    softcap=st.sampled_from([None, 2.0, 25.0]),
    num_splits=st.sampled_from([None, 1, 2, 5]),
    latent=st.booleans(),
    alibi=st.sampled_from(["", "heads", "all"]),
).map(lambda case: replace(case, max_pages=-(-120 // case.page_size)))


def decode(side, implementation, inputs, case=CASE, **options):
    options = case.options | absent_operands(case) | {"implementation": implementation} | options
    return side.call("paged_decode", inputs, return_lse=True, **options)


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def used_slots(inputs):
    """[P, page_size]: True where a sequence has a key."""
    pages, size = inputs["k_pages"].shape[:2]
    used = torch.zeros(pages, size, dtype=torch.bool, device=inputs["q"].device)
    for table, length in zip(inputs["block_tables"], inputs["seq_lens"].tolist(), strict=True):
        position = torch.arange(length, device=table.device)
        used[table[position // size].long(), position % size] = True
    return used


@pytest.mark.parametrize("page_size", [5, 64])
def test_keys_before_the_window_may_hold_anything(side, implementation, torch_device, page_size):
    """Slots that no token sees hold NaN, and pages of only such slots are given back."""
    sizes = {"page_size": page_size, "max_pages": -(-150 // page_size)}
    case = replace(CASE, **sizes, window_size=(40, 0))
    inputs = make_inputs(case, torch_device)
    want = decode(side, implementation, inputs, case)
    poison_before(inputs, [n - 2 - 40 for n in case.lengths])
    assert equal(decode(side, implementation, inputs, case), want)


@settings(max_examples=settings.default.max_examples // 5)
@given(case=any_case)
def test_any_problem_is_within_budget(side, implementation, torch_device, case):
    assume(takes(side, implementation, case))
    inputs = make_inputs(case, torch_device)
    got = decode(side, implementation, inputs, case)
    assert_within_budget(got, inputs, case.spec)


def test_where_pages_lie_does_not_matter(side, implementation, torch_device):
    """Bit for bit: a page may be anywhere in the pool."""
    inputs = make_inputs(CASE, torch_device)
    tables, num_pages = inputs["block_tables"], CASE.spec.cache.num_pages
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).to(torch_device)
    used = (tables >= 0) & (tables < num_pages)
    moved = torch.where(used, order[tables.clamp(0, num_pages - 1).long()].int(), tables)
    pools = {}
    for name in ("k_pages", "v_pages"):
        pools[name] = torch.empty_like(inputs[name])
        pools[name][order] = inputs[name]
    other = inputs | pools | {"block_tables": moved}
    assert not torch.equal(tables, moved)
    assert equal(decode(side, implementation, inputs), decode(side, implementation, other))


def test_two_sequences_may_share_pages(side, implementation, torch_device):
    """The pages of a common beginning are in both tables."""
    case = replace(CASE, lengths=(70, 0, 50, 150))
    inputs = make_inputs(case, torch_device)
    inputs["block_tables"][0, :10] = inputs["block_tables"][2, :10]
    got = decode(side, implementation, inputs)
    assert_within_budget(got, inputs, case.spec)


@pytest.mark.parametrize("garbage", [0.0, 1e4, -torch.inf])
def test_what_no_sequence_uses_does_not_matter(side, implementation, torch_device, garbage):
    inputs = make_inputs(CASE, torch_device)
    tables, unused = inputs["block_tables"], ~used_slots(inputs)
    other = {name: inputs[name].clone() for name in ("k_pages", "v_pages")}
    for pool in other.values():
        assert pool[unused].isnan().all()
        pool[unused] = garbage
    past = (tables < 0) | (tables >= CASE.spec.cache.num_pages)
    assert past.any()
    other["block_tables"] = torch.where(past, 3, tables)
    got = decode(side, implementation, inputs)
    assert equal(got, decode(side, implementation, inputs | other))


def test_sequences_of_a_batch_do_not_meet(side, implementation, torch_device):
    """Bit for bit in the kernels, with a fixed number of splits and tables of any width."""
    if implementation == "reference":
        pytest.skip("its products may choose their order")
    inputs = make_inputs(CASE, torch_device)
    out, lse = decode(side, implementation, inputs)
    order = [2, 3, 0, 1]
    rows = {name: inputs[name][order] for name in ("q", "block_tables", "seq_lens")}
    assert equal((out[order], lse[order]), decode(side, implementation, inputs | rows))

    alone = {name: inputs[name][:1] for name in ("q", "block_tables", "seq_lens")}
    wide = torch.full((1, 1000), -1, dtype=torch.int32, device=torch_device)
    wide[:, : CASE.max_pages] = alone["block_tables"]
    alone["block_tables"] = wide
    assert equal((out[:1], lse[:1]), decode(side, implementation, inputs | alone))


def test_new_tokens_are_causal_among_themselves(side, implementation, torch_device):
    inputs = make_inputs(CASE, torch_device)
    size, other = CASE.page_size, {}
    for name in ("k_pages", "v_pages"):
        other[name] = pool = inputs[name].clone()
        for table, length in zip(inputs["block_tables"], CASE.lengths, strict=True):
            if length:
                pool[int(table[(length - 1) // size]), (length - 1) % size] = 4.0
    out, lse = decode(side, implementation, inputs)
    other_out, other_lse = decode(side, implementation, inputs | other)
    assert equal((out[:, 0], lse[..., 0]), (other_out[:, 0], other_lse[..., 0]))
    longer = [length > 0 for length in CASE.lengths]
    assert (out[:, 1] != other_out[:, 1]).any(dim=-1)[longer].all()


def test_sinks_of_any_size(side, implementation, torch_device):
    case = replace(CASE, heads_q=4, heads_kv=2, sinks=True)
    inputs = make_inputs(case, torch_device)
    sinks = torch.tensor([-torch.inf, -800.0, 0.5, 700.0], device=torch_device)
    out, lse = got = decode(side, implementation, inputs | {"sinks": sinks}, case)
    assert_within_budget(got, inputs | {"sinks": sinks}, case.spec)
    without_keys = CASE.lengths.index(0)
    assert (out[without_keys] == 0).all()
    assert torch.equal(lse[without_keys], sinks[:, None].expand_as(lse[without_keys]))


def test_large_scores_do_not_overflow(side, implementation, torch_device):
    """The exponential of a score is infinite, that of their distances is not."""
    case = replace(CASE, scale=100.0)
    inputs = make_inputs(case, torch_device)
    got = decode(side, implementation, inputs, case)
    assert float(got[1].max()) > 1000
    assert_within_budget(got, inputs, case.spec)


@pytest.mark.skipif(not ON_GPU, reason="interpreters run a kernel's programs in order")
def test_a_decode_is_deterministic(side, torch_device):
    case = replace(CASE, lengths=(8192,) * 4, max_pages=1700, num_splits=64)
    inputs = make_inputs(case, torch_device)
    assert equal(decode(side, "triton", inputs, case), decode(side, "triton", inputs, case))
