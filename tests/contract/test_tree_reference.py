"""Ends of keys and depths in the reference, against the formula pair by pair."""

from dataclasses import replace

import pytest
import torch

from twin_attention.contract.cost import tree_pairs, visible_pairs
from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.contract.reference.attention import attention_backward, attention_forward
from twin_attention.contract.reference.packed import varlen_backward, varlen_forward
from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = FlashCase(
    "tree", batch=2, seq_q=13, seq_kv=17, head_dim=16, dtype="float32", causal=True, sinks=True,
    segments="shuffled", tree="any", depths=True, window_size=(5, None),
)  # fmt: skip
CASES = [
    replace(CASE, name=f"{tree}-{seq_q}-{depths}-{bool(window)}-{segments}", tree=tree, seq_q=seq_q,
            depths=depths, window_size=window, segments=segments)
    for tree, seq_q, depths, window, segments in (
        ("nested", 17, False, None, ""), ("any", 13, False, (5, None), "documents"),
        ("nested", 17, True, (3, None), ""), ("any", 20, True, (5, None), "shuffled"),
        ("any", 17, True, None, ""),
    )
]  # fmt: skip


def seen(case: FlashCase, x: dict[str, torch.Tensor], b: int) -> torch.Tensor:
    found = torch.zeros(case.seq_q, case.seq_kv, dtype=torch.bool)
    left = None if case.window_size is None else case.window_size[0]
    for i in range(case.seq_q):
        p = i + case.seq_kv - case.seq_q
        for j in range(case.seq_kv):
            is_seen = j <= p < int(x["kv_ends"][b, j])
            if left is not None and case.depths:
                is_seen &= int(x["q_depths"][b, i]) - int(x["kv_depths"][b, j]) <= left
            elif left is not None:
                is_seen &= p - j <= left
            if case.segments:
                is_seen &= int(x["q_segment_ids"][b, i]) == int(x["kv_segment_ids"][b, j]) >= 0
            found[i, j] = is_seen
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward_and_backward_are_the_formula(case):
    x = make_inputs(replace(case), "cpu")
    names = FlashOperands._fields
    double = {n: v.double() if v.is_floating_point() else v for n, v in x.items()}
    operands = FlashOperands(**{n: double.get(n) for n in names})
    out, lse = attention_forward(operands, case.spec, torch.float64)
    gradients = attention_backward(
        double["dout"], double["dlse"], operands, case.spec, torch.float64
    )
    leaves = {n: double[n].nan_to_num(0).requires_grad_() for n in ("q", "k", "v", "sinks")}
    dout = double["dout"].nan_to_num(0)
    outs, lses = [], []
    for b in range(case.batch):
        s = torch.einsum("ihd,jhd->hij", leaves["q"][b], leaves["k"][b]) * case.spec.scale
        mask = seen(case, x, b)
        s = s.masked_fill(~mask, -1e30)
        s = torch.cat([s, leaves["sinks"][:, None, None].expand(-1, case.seq_q, 1)], 2)
        lses.append(s.logsumexp(2))
        outs.append(torch.einsum("hij,jhd->ihd", s.softmax(2)[..., :-1] * mask, leaves["v"][b]))
    torch.testing.assert_close(out, torch.stack(outs).detach())
    torch.testing.assert_close(lse, torch.stack(lses).detach())
    loss = (torch.stack(outs) * dout).sum() + (torch.stack(lses) * double["dlse"]).sum()
    want = torch.autograd.grad(loss, list(leaves.values()))
    for name, y in zip(leaves, want, strict=True):
        torch.testing.assert_close(getattr(gradients, name), y)


def test_packed_trees_are_each_alone():
    lengths = ((9, 14), (0, 3), (11, 11), (5, 2))
    case = VarlenCase(
        "packed-tree", lengths, head_dim=16, dtype="float32", tree="any", depths=True,
        window_size=(4, None),
    )  # fmt: skip
    x = make_inputs(case, "cpu")
    operands = VarlenOperands(**{n: x.get(n) for n in VarlenOperands._fields})
    out, _ = varlen_forward(operands, case.spec, torch.float64)
    dq, dk, *_ = varlen_backward(x["dout"], None, operands, case.spec, torch.float64)
    q0, k0 = x["cu_seqlens_q"].tolist(), x["cu_seqlens_kv"].tolist()
    for n, (seq_q, seq_kv) in enumerate(lengths):
        rows, keys = slice(q0[n], q0[n + 1]), slice(k0[n], k0[n + 1])
        one = FlashOperands(
            x["q"][None, rows], x["k"][None, keys], x["v"][None, keys],
            kv_ends=x["kv_ends"][None, keys], q_depths=x["q_depths"][None, rows],
            kv_depths=x["kv_depths"][None, keys],
        )  # fmt: skip
        spec = case.spec.sequence(seq_q, seq_kv)
        want, _ = attention_forward(one, spec, torch.float64)
        torch.testing.assert_close(out[rows], want[0])
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
