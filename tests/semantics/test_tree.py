from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.oracle import assert_within_budget
from tests.semantics.test_segments import SMALL_TILES
from tests.sides import attention, by_reference
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.targets.config import use_configs

CASE = FlashCase(
    "tree", batch=1, seq_q=90, seq_kv=90, heads_q=2, heads_kv=1, head_dim=16, head_dim_v=24,
    dtype="float32", causal=True, sinks=True, tree="nested",
)  # fmt: skip
NO_TREE = replace(CASE, tree="")
# A prompt, two answers to it, of which the first goes on in two ways, and another prompt.
NODES = {(0, 30): 80, (30, 50): 64, (50, 60): 60, (60, 64): 64, (64, 80): 80, (80, 90): 90}
BRANCHES = (
    ((0, 30), (30, 50), (50, 60)), ((0, 30), (30, 50), (60, 64)), ((0, 30), (64, 80)), ((80, 90),),
)  # fmt: skip


def with_ends(inputs, nodes=NODES):
    ends = torch.empty(90, dtype=torch.int32)
    for (begin, last), end in nodes.items():
        ends[begin:last] = end
    return inputs | {"kv_ends": ends[None].to(inputs["q"].device)}


def test_ends_behind_all_keys_are_causal(side, implementation, torch_device):
    options = CASE.options | {"implementation": implementation}
    inputs = make_inputs(NO_TREE, torch_device)
    want = attention(side, inputs, **options)
    for end in (90, 2**31 - 1):
        got = attention(side, with_ends(inputs, {(0, 90): end}), **options)
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=1e-6, atol=1e-6)


def test_documents_are_roots(torch_device):
    """In the formula, which cases hold the kernels to."""
    options = CASE.options
    inputs = make_inputs(NO_TREE, torch_device)
    bounds = list(accumulate((31, 1, 40, 18), initial=0))
    nodes = {(begin, end): end for begin, end in pairwise(bounds)}
    ids = torch.empty(1, 90, dtype=torch.int32, device=torch_device)
    for n, (begin, end) in enumerate(pairwise(bounds)):
        ids[:, begin:end] = n
    got = by_reference(with_ends(inputs, nodes), **options)
    both = inputs | {"q_segment_ids": ids, "kv_segment_ids": ids}
    for name, x in by_reference(both, **options).items():
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-5)


def test_a_tree_is_its_branches_one_by_one(side, implementation, torch_device):
    """Gradients of the branches' new tokens add up."""
    options = CASE.options | {"implementation": implementation}
    inputs = with_ends(make_inputs(NO_TREE, torch_device))
    with use_configs(SMALL_TILES if implementation == "triton" else {}):
        got = attention(side, inputs, **options)
    summed = {name: torch.zeros_like(got[name]) for name in ("dq", "dk", "dv", "dsinks")}
    done = set()
    for branch in BRANCHES:
        rows = torch.cat([torch.arange(*node, device=torch_device) for node in branch])
        new = torch.cat(
            [torch.full((node[1] - node[0],), node not in done, device=torch_device)
             for node in branch]
        )  # fmt: skip
        one = {name: inputs[name][:, rows] for name in ("q", "k", "v", "dout")}
        one |= {"sinks": inputs["sinks"], "dlse": inputs["dlse"][..., rows] * new}
        one["dout"] = one["dout"] * new[:, None, None]
        want = by_reference(one, **options)
        torch.testing.assert_close(got["out"][:, rows], want["out"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got["lse"][..., rows], want["lse"], rtol=1e-5, atol=1e-5)
        for name in ("dq", "dk", "dv"):
            summed[name][:, rows] += want[name]
        summed["dsinks"] += want["dsinks"]
        done |= set(branch)
    for name, x in summed.items():
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-5)


def test_a_window_counts_depths(side, implementation, torch_device):
    """A branch has the window that it has alone."""
    options = CASE.options | {"implementation": implementation, "window_size": (7, None)}
    inputs = with_ends(make_inputs(NO_TREE, torch_device))
    depths = torch.empty(1, 90, dtype=torch.int32, device=torch_device)
    for branch in BRANCHES:
        rows = torch.cat([torch.arange(*node, device=torch_device) for node in branch])
        depths[:, rows] = torch.arange(len(rows), dtype=torch.int32, device=torch_device)
    inputs |= {"q_depths": depths, "kv_depths": depths}
    case = replace(CASE, depths=True, window_size=(7, None))
    with use_configs(SMALL_TILES if implementation == "triton" else {}):
        got = attention(side, inputs, **options)
    assert_within_budget(got, inputs, case.spec)
    for branch in BRANCHES:
        rows = torch.cat([torch.arange(*node, device=torch_device) for node in branch])
        one = {name: inputs[name][:, rows] for name in ("q", "k", "v")} | {"sinks": inputs["sinks"]}
        want = by_reference(one, **options)
        torch.testing.assert_close(got["out"][:, rows], want["out"], rtol=1e-5, atol=1e-5)


WILD = st.sampled_from([-(2**31), -1, 2**31 - 1]) | st.integers(0, 25)
DEEP = st.sampled_from([0, 2**30 - 1]) | st.integers(0, 25)


@settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(*(st.lists(x, min_size=20, max_size=20) for x in (WILD, DEEP, DEEP)))
def test_numbers_that_are_no_tree_mean_what_the_formula_says(
    side, torch_device, ends, q_depths, kv_depths
):
    """Ends before their key, intervals that cross, and depths that contradict them."""
    case = replace(
        CASE, seq_q=20, seq_kv=20, tree="any", depths=True, window_size=(7, None), sinks=False
    )
    inputs = make_inputs(case, torch_device)
    numbers = {"kv_ends": ends, "q_depths": q_depths, "kv_depths": kv_depths}
    inputs |= {
        name: torch.tensor([x], dtype=torch.int32, device=torch_device)
        for name, x in numbers.items()
    }
    got = attention(side, inputs, implementation="triton", **case.options)
    assert_within_budget(got, inputs, case.spec)


def test_ends_about_the_edges_of_tiles(side, implementation, torch_device):
    """All keys of a tile end at its last query, before it or behind it."""
    case = replace(CASE, dtype="bfloat16", seq_q=256, seq_kv=256, heads_q=1)
    for edge in (63, 128, 255):
        inputs = make_inputs(replace(case, name=f"ends-{edge}"), torch_device)
        for begin, end in ((0, edge), (edge // 2, edge + 1)):
            inputs["kv_ends"][:, begin:edge] = end
        got = attention(side, inputs, implementation=implementation, **case.options)
        assert_within_budget(got, inputs, case.spec)


def test_packed_trees_count_from_their_first_key(torch_device):
    """In the formula, which cases hold the kernels to."""
    options = CASE.options
    inputs = with_ends(make_inputs(NO_TREE, torch_device))
    names = ("q", "k", "v", "sinks", "dout", "dlse", "kv_ends")
    packed = {name: inputs[name] if name == "sinks" else inputs[name][0] for name in names}
    offsets = torch.tensor([0, 80, 90], dtype=torch.int32, device=torch_device)
    packed |= {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    packed["kv_ends"] = packed["kv_ends"] - packed["kv_ends"].new_tensor([0] * 80 + [80] * 10)
    want = by_reference(inputs, **options)
    for name, x in by_reference(packed, "flash_attention_varlen", **options).items():
        y = want[name] if name == "dsinks" else want[name][0]
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_tiles_of_other_branches_are_not_visited(side, torch_device):
    """A NaN in a tile that is visited would reach all of its rows."""
    case = replace(NO_TREE, seq_q=256, seq_kv=256, sinks=False)
    inputs = make_inputs(case, torch_device)
    ends = torch.empty(1, 256, dtype=torch.int32, device=torch_device)
    ends[:, :64], ends[:, 64:128], ends[:, 128:192], ends[:, 192:] = 256, 128, 192, 256
    inputs["kv_ends"] = ends
    for name in ("q", "k", "v", "dout"):
        inputs[name][:, 128:192] = torch.nan
    with use_configs(SMALL_TILES):
        got = attention(side, inputs, implementation="triton", **case.options)
    of_others = torch.ones(256, dtype=torch.bool, device=torch_device)
    of_others[128:192] = False
    for name in ("out", "dq"):
        assert got[name][:, of_others].isfinite().all()
        assert got[name][:, ~of_others].isnan().all()
    for name in ("dk", "dv"):
        assert got[name][:, 64:128].isfinite().all()
        assert got[name][:, 192:].isfinite().all()
