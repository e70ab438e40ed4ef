"""The reference, against the formula pair by pair: scores, sinks and all masks."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from twin_attention.contract.block_mask import BlockMask
from twin_attention.contract.cost import range_pairs, tree_pairs, visible_pairs
from twin_attention.contract.operands import (
    DIFFERENTIABLE,
    BlockSparseOperands,
    FlashOperands,
    VarlenOperands,
)
from twin_attention.contract.reference.attention import attention_backward, attention_forward
from twin_attention.contract.reference.block_sparse import (
    block_sparse_backward,
    block_sparse_forward,
)
from twin_attention.contract.reference.kinds import forward_of, jvp_of
from twin_attention.contract.reference.packed import varlen_backward, varlen_forward
from twin_attention.interop.parity.cases import BlockSparseCase, FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = FlashCase(
    "tree", batch=2, seq_q=13, seq_kv=17, heads_q=4, head_dim=16, head_dim_v=24, dtype="float32",
    causal=True, sinks=True, segments="shuffled", tree="any", depths=True, window_size=(5, None),
)  # fmt: skip
PLAIN = replace(CASE, sinks=False, segments="", tree="", depths=False)
RANGES = replace(PLAIN, ranges="any")
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
    replace(PLAIN, name="softcap", softcap=2.0, scale=-0.5, window_size=(4, 1), causal=False),
    replace(PLAIN, name="rows without keys", seq_q=20, scale=0.0, segments="shuffled"),
    BlockSparseCase("tiles", 2, 130, 70, 4, 2, 16, 24, "float32", causal=True, own_masks="heads"),
    BlockSparseCase("tiles of all", 2, 70, 130, dtype="float32", sinks=True, own_masks="all"),
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
    forward, backward, kind = attention_forward, attention_backward, FlashOperands
    if is_sparse := isinstance(case, BlockSparseCase):
        forward, backward, kind = block_sparse_forward, block_sparse_backward, BlockSparseOperands
        double |= BlockMask.of(x["block_mask"])._asdict()
    operands = kind(**{n: double.get(n) for n in kind._fields})
    out, lse = forward(operands, case.spec, torch.float64)
    dout, dlse = double["dout"], double["dlse"]
    gradients = backward(dout, dlse, operands, case.spec, torch.float64)
    names = ["q", "k", "v", *["sinks"] * case.sinks]
    leaves = {n: double[n].nan_to_num(0).requires_grad_() for n in names}
    sinks = leaves.get("sinks", torch.full((case.heads_q,), -torch.inf))
    k, v = (leaves[n].repeat_interleave(case.heads_q // case.heads_kv, 2) for n in "kv")
    masks = torch.stack([seen(case, x, b) for b in range(case.batch)])[:, None]
    if is_sparse:
        tiles = x["block_mask"].repeat_interleave(case.tile_q, 2).repeat_interleave(case.tile_kv, 3)
        masks = masks & tiles[:, :, : case.seq_q, : case.seq_kv]
    s = torch.einsum("bihd,bjhd->bhij", leaves["q"], k) * case.spec.scale
    s = s if case.softcap is None else case.softcap * torch.tanh(s / case.softcap)
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


LENGTHS = ((9, 14), (0, 3), (11, 11), (5, 2), (1, 0))
PACKED = VarlenCase(
    "packed", LENGTHS, (3, 2), heads_q=4, head_dim=16, dtype="float32", sinks=True, softcap=3.0
)


@pytest.mark.parametrize(
    "case",
    [PACKED, replace(PACKED, sinks=False, causal=False, window_size=(2, 1)),
     replace(PACKED, softcap=None, tree="any", depths=True, ranges="any", window_size=(4, None))],
)  # fmt: skip
def test_packed_sequences_are_each_alone(case):
    x = make_inputs(case, "cpu")
    operands = VarlenOperands(**{n: x.get(n) for n in VarlenOperands._fields})
    dout, dlse = x["dout"], x["dlse"]
    names = ("q", "k", "v", "sinks")
    gradients = varlen_backward(dout, dlse, operands, case.spec, torch.float64)
    assert gradients.cu_seqlens_q is gradients.cu_seqlens_kv is None
    found = list(varlen_forward(operands, case.spec, torch.float64))
    found += [getattr(gradients, name) for name in names if name in x]
    out, lse, *of_operands = want = [torch.zeros_like(y) for y in found]
    lse[:] = x["sinks"][:, None] if case.sinks else -torch.inf  # of padding
    bounds = zip(*(pairwise(x[f"cu_seqlens_{n}"].tolist()) for n in ("q", "kv")), strict=True)
    for of_queries, of_keys in bounds:
        rows, keys = slice(*of_queries), slice(*of_keys)
        places = dict.fromkeys(("q", "q_depths", "q_ranges"), rows) | {"sinks": slice(None)}
        own = {n: x[n][None, places.get(n, keys)] for n in FlashOperands._fields if n in x}
        one = FlashOperands(**own)._replace(sinks=x.get("sinks"))
        spec = case.spec.sequence(rows.stop - rows.start, keys.stop - keys.start)
        (out[rows],), (lse[:, rows],) = attention_forward(one, spec, torch.float64)
        of_one = dout[None, rows], dlse[None, :, rows], one, spec, torch.float64
        parts = attention_backward(*of_one)
        for name, whole in zip(names, of_operands, strict=False):
            part = getattr(parts, name)
            whole[places.get(name, keys)] += part if name == "sinks" else part[0]
    if case.sinks:
        of_operands[3] += dlse[:, rows.stop :].sum(1)
    for y, z in zip(found, want, strict=True):
        torch.testing.assert_close(y, z)


WITH_TERMS = replace(PLAIN, softcap=2.0, relative=3, bias="bk", alibi="all", dropout_rate=0.4)
OF_JVP = [
    *(case for case in CASES if not isinstance(case, BlockSparseCase)),
    replace(WITH_TERMS, name="terms", sinks=True, segments="shuffled"),
    PACKED,
    replace(PACKED, name="packed terms", relative=2, alibi="all", dropout_rate=0.4, ranges="any"),
]


@pytest.mark.parametrize("missing", [(), ("q", "sinks", "bias"), ("k", "v", "relative_bias")])
@pytest.mark.parametrize("case", OF_JVP, ids=lambda case: case.name)
def test_jvp_is_the_difference(case, missing):
    kind = VarlenOperands if isinstance(case, VarlenCase) else FlashOperands
    x = {n: v.double() if v.is_floating_point() else v for n, v in make_inputs(case, "cpu").items()}
    operands = kind(**{n: x.get(n) for n in kind._fields})
    make = torch.Generator().manual_seed(0)
    steps = {
        n: torch.randn(x[n].shape, generator=make, dtype=torch.float64) + 0 * x[n]
        for n in DIFFERENTIABLE
        if n in x and n not in missing
    }
    tangents = kind(*(None,) * len(kind._fields))._replace(**steps)
    h = 1e-5
    moved = ({n: x[n] + size * dx for n, dx in steps.items()} for size in (h, -h))
    after, before = (
        forward_of(case.spec)(operands._replace(**values), case.spec, torch.float64)
        for values in moved
    )
    found = jvp_of(case.spec)(tangents, operands, case.spec, torch.float64)
    for dy, end, begin in zip(found, after, before, strict=True):
        want = torch.where(end.isfinite(), (end - begin) / (2 * h), 0.0)  # rows without keys
        torch.testing.assert_close(dy, want, rtol=1e-6, atol=1e-7)


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
