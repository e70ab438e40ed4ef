"""Laws of packed and rotated appends: between forms of one call, and of the rotation itself."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from interop.parity.cases import AppendCase
from interop.parity.inputs import make_inputs
from twin_attention.contract.reference import rotate
from twin_attention.contract.tolerances import compare_to_reference

# Sequences of three new tokens and of none; their keys go past a page's end.
CASE = AppendCase(
    "law", lengths=(7, 4, 12), new_tokens=(3, 0, 3), padding=2, heads_q=4, head_dim=16,
    head_dim_v=16, dtype="float16", page_size=5, max_pages=3, rotary_dim=16, positions=16,
)  # fmt: skip
DENSE = replace(CASE, lengths=(7, 12), new_tokens=None, tokens=3, padding=0)
NEW = ("k_new", "v_new", "q")


def append(side, implementation, inputs, **options):
    return side.call("append_kv", inputs, implementation=implementation, **options)


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a.float(), b.float())


def test_packed_sequences_are_appended_as_one_by_one(bitwise_side, implementation, torch_device):
    inputs = make_inputs(replace(CASE, kv_dtype="int8"), torch_device)
    got = append(bitwise_side, implementation, inputs)
    one, q = {n: x for n, x in inputs.items() if n != "cu_seqlens_q"}, torch.zeros_like(got[0])
    for b, (begin, end) in enumerate(pairwise(inputs["cu_seqlens_q"].tolist())):
        if begin < end:
            one |= {name: inputs[name][None, begin:end] for name in NEW}
            one |= {name: inputs[name][b : b + 1] for name in ("block_tables", "seq_lens")}
            q[begin:end], *pools = append(bitwise_side, implementation, one)
            one |= dict(zip(("k_pages", "v_pages"), pools, strict=True))
    assert_equal(got, (q, one["k_pages"], one["v_pages"]))


def test_single_tokens_are_packed_as_they_are(bitwise_side, implementation, torch_device):
    """Without the dimension T, and with offsets."""
    inputs = make_inputs(replace(DENSE, tokens=1), torch_device)
    flat = inputs | {name: inputs[name][:, 0] for name in NEW}
    offsets = {"cu_seqlens_q": torch.arange(3, dtype=torch.int32, device=torch_device)}
    want = append(bitwise_side, implementation, flat)
    assert_equal(append(bitwise_side, implementation, flat | offsets), want)


def test_angles_of_zero_rotate_nothing(side, implementation, torch_device):
    inputs = make_inputs(DENSE, torch_device)
    inputs["rotary_cos"].fill_(1)
    inputs["rotary_sin"].zero_()
    got = append(side, implementation, inputs)
    plain = {n: x for n, x in inputs.items() if n != "q" and not n.startswith("rotary")}
    assert_equal(got, (inputs["q"], *append(side, implementation, plain)))


def test_interleaved_pairs_are_halves_of_permuted_dimensions(
    bitwise_side, implementation, torch_device
):
    inputs = make_inputs(DENSE, torch_device)
    order = torch.arange(DENSE.head_dim)
    order[: DENSE.rotary_dim] = order[: DENSE.rotary_dim].view(-1, 2).T.flatten()
    halves = inputs | {name: inputs[name][..., order] for name in ("k_new", "q", "k_pages")}
    want = append(bitwise_side, implementation, halves)
    q, k, v = append(bitwise_side, implementation, inputs, rotary_interleaved=True)
    assert_equal((q[..., order], k[..., order], v), want)


def test_scores_depend_on_the_difference_of_positions(side, implementation, torch_device):
    """The same tokens, three and eight positions further on."""
    inputs = make_inputs(replace(DENSE, lengths=(3, 3), positions=20), torch_device)
    frequency = 100.0 ** -torch.linspace(0, 1, DENSE.rotary_dim // 2, dtype=torch.float64)
    angles = (torch.arange(20)[:, None] * frequency).to(torch_device)
    inputs |= {"rotary_cos": angles.cos().float(), "rotary_sin": angles.sin().float()}

    def scores(q, k):
        """Scores of the first sequence's tokens by its first kv head, [T, T]."""
        return q[0, :, 0].double() @ k[:, 0].double().T

    def rotated(shift, dtype):
        position = torch.arange(3, device=torch_device)[None] + shift
        cos, sin = angles.cos(), angles.sin()
        q, k = (rotate(inputs[n][:1], position, cos, sin, False, dtype) for n in ("q", "k_new"))
        return scores(q, k[0])

    ref = rotated(0, torch.float64)
    tables = torch.arange(6, dtype=torch.int32, device=torch_device).view(2, 3)
    for shift in (3, 8):
        moved = {"block_tables": tables, "seq_lens": inputs["seq_lens"] + shift}
        q, k, _ = append(side, implementation, inputs | moved)
        k = k[tables[0].long()].flatten(0, 1)[shift : shift + 3]
        lp = rotated(shift, torch.float16)
        assert compare_to_reference(scores(q, k), ref, lp, "float16", "output").ok


def test_a_position_without_a_row_rotates_to_nan(side, implementation, torch_device):
    """Tokens before the first position, and past the last row of the tables."""
    inputs = make_inputs(replace(DENSE, lengths=(2, 12), positions=11, rotary_dim=12), torch_device)
    q, k, v = append(side, implementation, inputs)
    is_nan = torch.zeros_like(q, dtype=torch.bool)
    is_nan[0, 0, :, :12] = is_nan[1, 2, :, :12] = True
    assert torch.equal(q.isnan(), is_nan)
    assert torch.equal(q[..., 12:], inputs["q"][..., 12:])
    page, slot = inputs["block_tables"][1, 2], 11 % DENSE.page_size
    is_nan = torch.zeros_like(k, dtype=torch.bool)
    is_nan[page, slot, :, :12] = True
    assert torch.equal(k.isnan(), is_nan)
    assert not v.isnan().any()


def test_no_offsets_write_outside_the_tables(side, implementation, torch_device):
    inputs = make_inputs(CASE, torch_device)
    del inputs["q"]
    own = inputs["block_tables"].unique().long()
    other = torch.ones(len(inputs["k_pages"]), dtype=torch.bool, device=torch_device)
    other[own[(own >= 0) & (own < len(other))]] = False
    for offsets in ([9, 2, 70, -8], [-(2**31), 5, 2**31 - 1, 0]):
        hostile = torch.tensor(offsets, dtype=torch.int32, device=torch_device)
        pools = append(side, implementation, inputs | {"cu_seqlens_q": hostile})
        for name, pool in zip(("k_pages", "v_pages"), pools, strict=True):
            assert torch.equal(pool[other], inputs[name][other])


@pytest.mark.parametrize("sizes", [{"max_pages": 0}, {"lengths": (), "new_tokens": ()}])
def test_queries_are_rotated_where_nothing_is_written(side, implementation, torch_device, sizes):
    """A cache without room: its queries are rotated; without sequences, all of them are padding."""
    case = replace(CASE, **sizes)
    inputs = make_inputs(case, torch_device)
    q, *pools = append(side, implementation, inputs)
    assert_equal(pools, (inputs["k_pages"], inputs["v_pages"]))
    roomy = make_inputs(CASE, torch_device) | {
        n: inputs[n] for n in ("q", "rotary_cos", "rotary_sin")
    }
    want = append(side, "reference", roomy)[0] if case.lengths else torch.zeros_like(q)
    assert_equal([q], [want])
