from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from tests.oracle import assert_within_budget
from twin_attention.contract.reference.rotary import rotate
from twin_attention.contract.tolerances import compare_to_reference
from twin_attention.interop.parity.cases import AppendCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = AppendCase(
    "law", lengths=(7, 4, 11), new_tokens=(3, 0, 3), padding=1, heads_q=4, head_dim=16,
    dtype="float16", page_size=5, max_pages=3, rotary_dim=16, positions=11,
)  # fmt: skip
DENSE = replace(CASE, lengths=(7, 11), new_tokens=None, tokens=3, padding=0)
NEW, POOLS = ("k_new", "v_new", "q"), ("k_pages", "v_pages")


@pytest.fixture
def append(bitwise_side):
    """Compiled once for each form: (q, k_pages, v_pages), or without q."""
    call = partial(bitwise_side.call, "append_kv", implementation="triton")
    return lambda inputs, interleaved=False: call(inputs, rotary_interleaved=interleaved)


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a, b)


def test_packed_sequences_are_appended_as_one_by_one(append, torch_device):
    inputs = make_inputs(CASE, torch_device)
    one, q = {n: x for n, x in inputs.items() if n != "cu_seqlens_q"}, torch.zeros_like(inputs["q"])
    for b, (begin, end) in enumerate(pairwise(inputs["cu_seqlens_q"].tolist())):
        if begin < end:
            one |= {name: inputs[name][None, begin:end] for name in NEW}
            one |= {name: inputs[name][b : b + 1] for name in ("block_tables", "seq_lens")}
            q[begin:end], *pools = append(one)
            one |= dict(zip(POOLS, pools, strict=True))
    assert_equal(append(inputs), (q, *(one[name] for name in POOLS)))


def test_single_tokens_are_packed_as_they_are(append, torch_device):
    inputs = make_inputs(CASE, torch_device)
    inputs["cu_seqlens_q"] = torch.arange(4, dtype=torch.int32, device=torch_device)
    flat = inputs | {name: inputs[name][:3] for name in NEW}
    del flat["cu_seqlens_q"]
    q, *pools = append(inputs)
    assert_equal((q[:3], *pools), append(flat))


def test_angles_of_zero_rotate_nothing(append, torch_device):
    inputs = make_inputs(DENSE, torch_device)
    inputs["rotary_cos"].fill_(1)
    inputs["rotary_sin"].zero_()
    plain = {n: x for n, x in inputs.items() if n != "q" and not n.startswith("rotary")}
    assert_equal(append(inputs), (inputs["q"], *append(plain)))


def test_interleaved_pairs_are_halves_of_permuted_dimensions(append, torch_device):
    inputs = make_inputs(DENSE, torch_device)
    order = torch.arange(DENSE.head_dim).view(-1, 2).T.flatten()
    halves = inputs | {name: inputs[name][..., order] for name in ("k_new", "q", "k_pages")}
    q, k, v = append(inputs, interleaved=True)
    assert_equal((q[..., order], k[..., order], v), append(halves))


def test_scores_depend_on_the_difference_of_positions(append, torch_device):
    inputs = make_inputs(DENSE, torch_device)
    frequency = 100.0 ** -torch.linspace(0, 1, DENSE.rotary_dim // 2, dtype=torch.float64)
    angles = (torch.arange(DENSE.positions)[:, None] * frequency).to(torch_device)
    inputs |= {"rotary_cos": angles.cos().float(), "rotary_sin": angles.sin().float()}

    def scores(q, k):
        return q[0, :, 0].double() @ k[:, 0].double().T

    def rotated(shift, dtype):
        position = torch.arange(3, device=torch_device)[None] + shift
        cos, sin = angles.cos(), angles.sin()
        q, k = (rotate(inputs[n][:1], position, cos, sin, False, dtype) for n in ("q", "k_new"))
        return scores(q, k[0])

    ref = rotated(0, torch.float64)
    tables = torch.arange(6, dtype=torch.int32, device=torch_device).view(2, 3)
    for shift in (3, 8):
        moved = {"block_tables": tables, "seq_lens": torch.full_like(inputs["seq_lens"], 3 + shift)}
        q, k, _ = append(inputs | moved)
        k = k[tables[0].long()].flatten(0, 1)[shift : shift + 3]
        lp = rotated(shift, torch.float16)
        assert compare_to_reference(scores(q, k), ref, lp, "float16", "output").ok


def test_a_position_without_a_row_rotates_to_nan(append, torch_device):
    inputs = make_inputs(replace(DENSE, lengths=(2, 12)), torch_device)
    q, k, v = append(inputs)
    is_nan = torch.zeros_like(q, dtype=torch.bool)
    is_nan[0, 0] = is_nan[1, 2] = True
    assert torch.equal(q.isnan(), is_nan)
    is_nan = torch.zeros_like(k, dtype=torch.bool)
    is_nan[inputs["block_tables"][1, 2], 11 % DENSE.page_size] = True
    assert torch.equal(k.isnan(), is_nan)
    assert not v.isnan().any()


def test_no_offsets_write_outside_the_tables(append, torch_device):
    inputs = make_inputs(CASE, torch_device)
    own = inputs["block_tables"].unique().long()
    other = torch.ones(len(inputs["k_pages"]), dtype=torch.bool, device=torch_device)
    other[own[(own >= 0) & (own < len(other))]] = False
    for offsets in ([9, 2, 70, -8], [-(2**31), 5, 2**31 - 1, 0]):
        hostile = torch.tensor(offsets, dtype=torch.int32, device=torch_device)
        _, *pools = append(inputs | {"cu_seqlens_q": hostile})
        assert_equal([x[other] for x in pools], [inputs[name][other] for name in POOLS])


@pytest.mark.parametrize("sizes", [{"max_pages": 0}, {"lengths": (), "new_tokens": ()}])
def test_queries_are_rotated_where_nothing_is_written(append, torch_device, sizes):
    """No room in the cache; or no sequences, so that all tokens are padding."""
    case = replace(CASE, **sizes)
    inputs = make_inputs(case, torch_device)
    q, *pools = append(inputs)
    assert_equal(pools, [inputs[name] for name in POOLS])
    assert_within_budget({"q": q} | dict(zip(POOLS, pools, strict=True)), inputs, case.spec)
