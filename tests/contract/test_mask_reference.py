"""Ends of keys, depths, ids and ranges in the reference, against the formula pair by pair."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from twin_attention.contract.cost import range_pairs, tree_pairs, visible_pairs
from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.contract.reference.attention import attention_backward, attention_forward
from twin_attention.contract.reference.packed import varlen_backward, varlen_forward
from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = FlashCase(
    "tree", batch=2, seq_q=13, seq_kv=17, head_dim=16, dtype="float32", causal=True, sinks=True,
    segments="shuffled", tree="any", depths=True, window_size=(5, None),
)  # fmt: skip
RANGES = replace(CASE, sinks=False, segments="", tree="", depths=False, ranges="any")
CASES = [
    replace(CASE, name="nested", tree="nested", seq_q=17, depths=False, window_size=None,
            segments=""),
    replace(CASE, name="documents", depths=False, segments="documents"),
    replace(CASE, name="depths", tree="nested", seq_q=17, window_size=(3, None), segments=""),
    replace(CASE, name="more queries", seq_q=20),
    replace(CASE, name="no window", seq_q=17, window_size=None, segments=""),
    replace(RANGES, name="ranges", causal=False, window_size=None),
    replace(RANGES, name="prefixes", seq_kv=13, window_size=None, ranges="prefix"),
    replace(RANGES, name="ranges and a window", seq_q=20, causal=False, window_size=(3, 1)),
    replace(CASE, name="all", ranges="both"),
]  # fmt: skip


def seen(case: FlashCase, x: dict[str, torch.Tensor], b: int) -> torch.Tensor:
    found = torch.zeros(case.seq_q, case.seq_kv, dtype=torch.bool)
    left, right = case.window_size or (None, None)
    right = 0 if case.causal else right
    for i, j in np.ndindex(case.seq_q, case.seq_kv):
        p = i + case.seq_kv - case.seq_q
        distance = p - j
        is_seen = right is None or j - p <= right
        if case.tree:
            is_seen &= p < int(x["kv_ends"][b, j])
        if case.depths:
            distance = int(x["q_depths"][b, i]) - int(x["kv_depths"][b, j])
        is_seen &= left is None or distance <= left
        if case.ranges:
            is_seen |= any(begin <= j < end for begin, end in x["q_ranges"][b, i].tolist())
        if case.segments:
            is_seen &= int(x["q_segment_ids"][b, i]) == int(x["kv_segment_ids"][b, j]) >= 0
        found[i, j] = is_seen
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward_and_backward_are_the_formula(case):
    x = make_inputs(case, "cpu")
    double = {n: v.double() if v.is_floating_point() else v for n, v in x.items()}
    operands = FlashOperands(**{n: double.get(n) for n in FlashOperands._fields})
    out, lse = attention_forward(operands, case.spec, torch.float64)
    dout, dlse = double["dout"], double["dlse"]
    gradients = attention_backward(dout, dlse, operands, case.spec, torch.float64)
    names = ["q", "k", "v", *["sinks"] * case.sinks]
    leaves = {n: double[n].nan_to_num(0).requires_grad_() for n in names}
    sinks = leaves.get("sinks", torch.full((case.heads_q,), -torch.inf))
    k, v = (leaves[n].repeat_interleave(case.heads_q // case.heads_kv, 2) for n in "kv")
    masks = torch.stack([seen(case, x, b) for b in range(case.batch)])[:, None]
    s = torch.einsum("bihd,bjhd->bhij", leaves["q"], k) * case.spec.scale
    s = s.masked_fill(~masks, -1e30)
    s = torch.cat([s, sinks[:, None, None].expand(case.batch, -1, case.seq_q, 1)], 3)
    want_out = torch.einsum("bhij,bjhd->bihd", s.softmax(3)[..., :-1] * masks, v)
    has_any = masks.any(3).expand(lse.shape) | case.sinks
    want_lse = s.logsumexp(3).masked_fill(~has_any, -torch.inf)
    torch.testing.assert_close(out, want_out.detach())
    torch.testing.assert_close(lse, want_lse.detach())
    loss = (want_out * dout.nan_to_num(0)).sum() + (want_lse * dlse)[has_any].sum()
    for name, y in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        torch.testing.assert_close(getattr(gradients, name), y)


def test_packed_masks_are_each_alone():
    lengths = ((9, 14), (0, 3), (11, 11), (5, 2))
    case = VarlenCase(
        "packed", lengths, head_dim=16, dtype="float32", tree="any", depths=True, ranges="any",
        window_size=(4, None),
    )  # fmt: skip
    x = make_inputs(case, "cpu")
    operands = VarlenOperands(**{n: x.get(n) for n in VarlenOperands._fields})
    out, lse = varlen_forward(operands, case.spec, torch.float64)
    dq, dk, *_ = varlen_backward(x["dout"], None, operands, case.spec, torch.float64)
    bounds = zip(*(pairwise(x[f"cu_seqlens_{n}"].tolist()) for n in ("q", "kv")), strict=True)
    for of_queries, of_keys in bounds:
        rows, keys = slice(*of_queries), slice(*of_keys)
        one = FlashOperands(
            x["q"][None, rows], x["k"][None, keys], x["v"][None, keys],
            kv_ends=x["kv_ends"][None, keys], q_depths=x["q_depths"][None, rows],
            kv_depths=x["kv_depths"][None, keys], q_ranges=x["q_ranges"][None, rows],
        )  # fmt: skip
        spec = case.spec.sequence(rows.stop - rows.start, keys.stop - keys.start)
        want, want_lse = attention_forward(one, spec, torch.float64)
        torch.testing.assert_close(out[rows], want[0])
        torch.testing.assert_close(lse[:, rows], want_lse[0])
        gradients = attention_backward(x["dout"][None, rows], None, one, spec, torch.float64)
        torch.testing.assert_close(dq[rows], gradients.q[0])
        torch.testing.assert_close(dk[keys], gradients.k[0])


@pytest.mark.parametrize("seq_q", [13, 17, 20])
@pytest.mark.parametrize("window", [None, (5, None)])
def test_pairs_are_counted(seq_q, window):
    case = replace(CASE, seq_q=seq_q, window_size=window, depths=False, segments="")
    x = make_inputs(case, "cpu")
    want = sum(int(seen(case, x, b).sum()) for b in range(case.batch))
    assert tree_pairs(case.spec, x["kv_ends"].numpy()) == case.heads_q * want
    everything = torch.full_like(x["kv_ends"], case.seq_kv).numpy()
    pairs = case.batch * case.heads_q * visible_pairs(case.spec)
    assert tree_pairs(case.spec, everything) == pairs
    case = replace(RANGES, seq_q=seq_q, window_size=window)
    x = make_inputs(case, "cpu")
    want = sum(int(seen(case, x, b).sum()) for b in range(case.batch))
    assert range_pairs(case.spec, x["q_ranges"].numpy()) == case.heads_q * want
