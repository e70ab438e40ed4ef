from dataclasses import replace

import pytest
import torch

from tests.oracle import assert_twins, assert_within_budget
from twin_attention.contract.tree import tree_of
from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.interop.parity.inputs import make_inputs

# Three drafts that share their first token, and another root.
PARENTS = [-1, 0, 1, 1, 0, 4, -1]
# Fewer keys than new tokens, none before them, and tiles of keys that hold both kinds.
CASE = DecodeCase(
    "tree", lengths=(5, 7, 40, 130), tokens=len(PARENTS), heads_q=4, heads_kv=2, head_dim=32,
    head_dim_v=16, dtype="float16", page_size=5, max_pages=27, tree="drafts", num_splits=2,
)  # fmt: skip


def inputs_of(device, case=CASE):
    ends = torch.from_numpy(tree_of(PARENTS).ends).to(device).expand(len(case.lengths), -1)
    return make_inputs(case, device) | {"tree_ends": ends}


def decode(side, implementation, inputs, function="paged_decode", **options):
    options = CASE.options | {"implementation": implementation, "return_lse": True} | options
    if function == "paged_attention":
        del options["cascade"]
    return side.call(function, inputs, **options)


def key_slots(inputs, b, device):
    position = torch.arange(CASE.lengths[b], device=device)
    pages = inputs["block_tables"][b, position // CASE.page_size].long()
    return pages, position % CASE.page_size


def test_a_tree_is_what_its_formula_says(side, implementation, torch_device):
    inputs = inputs_of(torch_device)
    assert_within_budget(decode(side, implementation, inputs), inputs, CASE.spec)


def test_a_chain_is_causal(side, implementation, torch_device):
    """Bit for bit where nothing compiles the two to different products."""
    inputs = inputs_of(torch_device)
    ends = torch.full_like(inputs["tree_ends"], CASE.tokens)
    got = decode(side, implementation, inputs | {"tree_ends": ends})
    del inputs["tree_ends"]
    want, spec = decode(side, implementation, inputs), replace(CASE, tree="").spec
    assert_twins(got, want, inputs, spec)
    if side.api.__name__ == "torch_attn" and torch_device == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_a_token_does_not_see_does_not_matter(side, implementation, torch_device):
    """Bit for bit."""
    inputs, changed = inputs_of(torch_device), 1  # its descendants are 2 and 3
    other = {name: inputs[name].clone() for name in ("k_pages", "v_pages")}
    for b, length in enumerate(CASE.lengths):
        if length >= CASE.tokens:
            pages, slots = key_slots(inputs, b, torch_device)
            position = length - CASE.tokens + changed
            for pool in other.values():
                pool[pages[position], slots[position]] = 9.0
    results = [decode(side, implementation, x) for x in (inputs, inputs | other)]
    (out, lse), (other_out, other_lse) = results
    unseen, seen = [0, 4, 5, 6], [1, 2, 3]
    assert torch.equal(out[:, unseen], other_out[:, unseen])
    assert torch.equal(lse[..., unseen], other_lse[..., unseen])
    assert (out[1:, seen] != other_out[1:, seen]).any(dim=-1).all()


@pytest.mark.parametrize("num_splits", [1, None])
def test_packed_trees_are_those_of_a_decode(side, implementation, torch_device, num_splits):
    inputs = inputs_of(torch_device)
    want = decode(side, implementation, inputs, num_splits=num_splits)
    offsets = CASE.tokens * torch.arange(len(CASE.lengths) + 1, dtype=torch.int32)
    packed = inputs | {
        "q": inputs["q"].flatten(0, 1),
        "tree_ends": inputs["tree_ends"].flatten(),
        "cu_seqlens_q": offsets.to(torch_device),
    }
    got = decode(side, implementation, packed, "paged_attention", num_splits=num_splits)
    out, lse = got[0].view_as(want[0]), got[1].unflatten(1, (-1, CASE.tokens)).transpose(0, 1)
    assert_twins((out, lse), want, inputs, CASE.spec)


def test_a_token_may_see_nothing(side, implementation, torch_device):
    """Not even itself: it is the only one of its sequence, and its end is its own position."""
    case = replace(CASE, lengths=(1, 0, 3), tokens=1)
    inputs = make_inputs(case, torch_device)
    inputs["tree_ends"] = torch.zeros(3, 1, dtype=torch.int32, device=torch_device)
    out, lse = decode(side, implementation, inputs)
    assert not out[:2].any()
    assert (lse[:2] == -torch.inf).all()
    assert_within_budget((out, lse), inputs, case.spec)
