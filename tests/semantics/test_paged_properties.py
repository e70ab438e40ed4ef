from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from tests.oracle import assert_twins, poison_before
from twin_attention.interop.parity.cases import PagedCase
from twin_attention.interop.parity.inputs import make_inputs

# A chunk of a prompt, nothing new, a whole prompt, a decode; pages straddle the tiles of keys.
CASE = PagedCase(
    "law", lengths=(80, 20, 9, 40), new_tokens=(12, 0, 9, 1), padding=3, heads_q=2, heads_kv=1,
    head_dim=32, head_dim_v=16, dtype="float16", page_size=5, max_pages=17, num_splits=1,
)  # fmt: skip
HOSTILE = ([9, 2, 70, -8, 3], [-(2**31), 5, 5, 2**31 - 1, 0])


def attend(side, implementation, inputs, case=CASE, **options):
    options = case.options | {"implementation": implementation} | options
    return side.call("paged_attention", inputs, return_lse=True, **options)


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def offsets(lengths, device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def test_single_tokens_are_a_paged_decode(side, implementation, torch_device):
    """Bit for bit in the kernels, which have the same tiles."""
    lengths = {"lengths": (80, 0, 33), "new_tokens": (1, 1, 1), "padding": 0}
    case = replace(CASE, **lengths, num_splits=1, sinks=True)
    inputs = make_inputs(case, torch_device)
    got = attend(side, implementation, inputs, case)
    options = case.options | {"implementation": implementation, "return_lse": True}
    operands = {name: x for name, x in inputs.items() if name != "cu_seqlens_q"}
    out, lse = side.call("paged_decode", operands, **options)
    want = out, lse.mT
    if implementation == "reference" or (side.api.__name__, side.device) == ("pallas_attn", "cpu"):
        # Its products may choose their order; in Pallas's interpreter XLA compiles each kernel.
        assert_twins(got, want, inputs, case.spec)
    else:
        assert equal(got, want)


@pytest.mark.parametrize("page_size", [5, 64])
def test_keys_before_the_window_may_hold_anything(side, implementation, torch_device, page_size):
    """Slots that no token sees hold NaN, and pages of only such slots are given back."""
    sizes = {"page_size": page_size, "max_pages": -(-150 // page_size), "lengths": (150, 20, 9, 99)}
    case = replace(CASE, **sizes, window_size=(40, 0))
    inputs = make_inputs(case, torch_device)
    want = attend(side, implementation, inputs, case)
    lengths = zip(case.lengths, case.new_tokens, strict=True)
    poison_before(inputs, [n - new - 40 for n, new in lengths])
    assert equal(attend(side, implementation, inputs, case), want)


def test_keys_that_neither_a_window_nor_a_range_shows(side, implementation, torch_device):
    case = replace(CASE, lengths=(150, 20, 9, 99), max_pages=30, window_size=(40, 0))
    inputs = make_inputs(case, torch_device)
    without = attend(side, implementation, inputs, case)
    ranges = torch.tensor([[[30, 33]]], dtype=torch.int32, device=torch_device)
    inputs["q_ranges"] = ranges.repeat(case.spec.tokens, 1, 1)
    want = attend(side, implementation, inputs, case)
    assert not equal(want, without)
    for b, (n, new) in enumerate(zip(case.lengths, case.new_tokens, strict=True)):
        for key in (*range(30), *range(33, n - new - 40)):
            page = inputs["block_tables"][b, key // 5]
            if key < n - new - 40:
                inputs["k_pages"][page, key % 5] = inputs["v_pages"][page, key % 5] = torch.nan
    assert equal(attend(side, implementation, inputs, case), want)


@pytest.mark.parametrize(
    "case", [CASE, replace(CASE, ranges="any", window_size=(9, None))], ids=["plain", "ranges"]
)
def test_gathered_keys_give_flash_attention_varlen(side, implementation, torch_device, case):
    inputs = make_inputs(case, torch_device)
    packed = {name: inputs[name] for name in ("q", "cu_seqlens_q", "q_ranges") if name in inputs}
    packed["cu_seqlens_kv"] = offsets(CASE.lengths, torch_device)
    for name in "kv":
        keys = [
            inputs[f"{name}_pages"][table[: -(-n // CASE.page_size)].long()].flatten(0, 1)[:n]
            for table, n in zip(inputs["block_tables"], CASE.lengths, strict=True)
        ]
        packed[name] = torch.cat(keys)
    options = {"causal": True, "return_lse": True, "implementation": implementation}
    options["window_size"] = case.window_size
    other = side.call("flash_attention_varlen", packed, **options)
    assert_twins(attend(side, implementation, inputs, case), other, inputs, case.spec)


def test_sequences_do_not_meet(side, implementation, torch_device):
    """Bit for bit in the kernels: others' tokens, keys and order do not matter."""
    if implementation == "reference":
        pytest.skip("its products may choose their order")
    inputs = make_inputs(CASE, torch_device)
    cu, order = inputs["cu_seqlens_q"], [3, 2, 0, 1]
    rows = [torch.arange(cu[b], cu[b + 1], device=torch_device) for b in order]
    rows.append(torch.arange(cu[-1], len(inputs["q"]), device=torch_device))
    rows = torch.cat(rows)
    other = {name: inputs[name][order] for name in ("block_tables", "seq_lens")}
    other |= {
        "q": inputs["q"][rows],
        "cu_seqlens_q": offsets([CASE.new_tokens[b] for b in order], torch_device),
    }
    out, lse = attend(side, implementation, inputs)
    assert equal((out[rows], lse[:, rows]), attend(side, implementation, inputs | other))


def test_lengths_and_page_ids_that_are_wrong(side, implementation, torch_device):
    """The others' results keep their bits."""
    inputs = make_inputs(CASE, torch_device)
    for name in ("k_pages", "v_pages"):
        inputs[name] = inputs[name].nan_to_num(1.0)
    wrong = {name: inputs[name].clone() for name in ("seq_lens", "block_tables")}
    wrong["seq_lens"][[0, 3]] = torch.tensor([2**31 - 1, -5], dtype=torch.int32).to(torch_device)
    wrong["block_tables"][0] = -7
    wrong["block_tables"][0, 3:] = 2**31 - 1
    want, got = (attend(side, implementation, x) for x in (inputs, inputs | wrong))
    first, whole, last = slice(0, 12), slice(12, 21), slice(21, None)
    assert got[0][first].isfinite().all()
    assert got[1][:, first].isfinite().all()
    assert torch.equal(got[0][whole], want[0][whole])
    assert torch.equal(got[1][:, whole], want[1][:, whole])
    assert not got[0][last].any()
    assert (got[1][:, last] == -torch.inf).all()


@pytest.mark.parametrize("bad", HOSTILE, ids=str)
def test_offsets_that_are_wrong(side, implementation, torch_device, bad):
    """They give wrong numbers, and the next call the right ones."""
    inputs = make_inputs(CASE, torch_device)
    want = attend(side, implementation, inputs)
    wrong = torch.tensor(bad, dtype=torch.int32, device=torch_device)
    out, lse = attend(side, implementation, inputs | {"cu_seqlens_q": wrong})
    assert (out.shape, lse.shape) == (want[0].shape, want[1].shape)
    assert equal(attend(side, implementation, inputs), want)


@pytest.mark.parametrize("first", [5, 2**31 - 1, -(2**31)])
def test_the_first_offset_counts_as_0(side, implementation, torch_device, first):
    inputs = make_inputs(CASE, torch_device)
    want = attend(side, implementation, inputs)
    inputs["cu_seqlens_q"][0] = first
    assert equal(attend(side, implementation, inputs), want)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_padding_sees_its_sink_alone(side, implementation, torch_device, sinks, num_splits):
    case = replace(CASE, sinks=sinks, num_splits=num_splits)
    inputs = make_inputs(case, torch_device)
    out, lse = attend(side, implementation, inputs, case)
    padding = slice(-case.padding, None)
    assert (out[padding] == 0).all()
    alone = inputs["sinks"][:, None] if sinks else torch.tensor(-torch.inf, device=torch_device)
    torch.testing.assert_close(lse[:, padding], alone.expand(lse.shape[0], case.padding))
