"""Attention in PyTorch with one of the faults that libraries were reported to have."""

from functools import partial

import torch

DENSE = {"flash_attention", "float32", "scale", "causal", "Sq != Skv", "window", "softcap", "sinks",
         "segments", "GQA", "rows without a key", "gradients", "lse",
         "gradient of lse", "D not 64, 128 or 256",
         "D > 128", "NaN"}  # fmt: skip
PACKED = DENSE - {"flash_attention", "segments"} | {
    "flash_attention_varlen", "empty sequences", "padding"
}  # fmt: skip
# Where a fault is: the function, and the report it is re-created from.
FAULTS = {
    "lse without a gradient": PACKED,  # torchtitan#4796
    "grouped backward raises": DENSE,  # kernels-community#1085
    "dq five times too large": DENSE,  # TransformerEngine#3216
    "softcap ignored if packed": PACKED,  # flash-attention#2544
    "segments dropped if causal": DENSE,  # vllm#47217
    "packing ignored": PACKED,  # maxtext#4478
    "causal from the top left": DENSE,
    "mean of v for no key": DENSE,
    "last keys off a tile dropped": DENSE,
    "sinks of the first sequence only": DENSE,
    "kv heads in turn": DENSE,
}


class _Backward(torch.autograd.Function):
    """The identity; its gradient is multiplied, or it raises for a factor of None."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        if ctx.factor is None:
            raise RuntimeError("shape mismatch")
        return ctx.factor * dx, None


def dense(q, k, v, sinks=None, q_segment_ids=None, kv_segment_ids=None, *, fault="", causal=False,
          scale=None, window_size=None, softcap=None):  # fmt: skip
    seq_q, seq_kv, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    if fault == "dq five times too large":
        q = _Backward.apply(q, 5.0)
    if fault == "grouped backward raises" and group > 1:
        k = _Backward.apply(k, None)
    seen = _seen(fault, seq_q, seq_kv, causal, window_size)
    if q_segment_ids is not None and not (causal and fault == "segments dropped if causal"):
        ids, others = q_segment_ids[:, None, :, None], kv_segment_ids[:, None, None]
        seen = seen & (ids == others) & (ids >= 0)
    q, k, v = (x.nan_to_num().transpose(1, 2) for x in (q, k, v))
    if fault == "kv heads in turn":
        k, v = (x.repeat(1, group, 1, 1) for x in (k, v))
    else:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*s.shape[:3], 1)
        if fault == "sinks of the first sequence only":
            column = torch.cat([column[:1], column[1:].detach()])
        s = torch.cat([s, column], -1)
    lse = s.logsumexp(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    p = (s - lse.where(lse.isfinite(), torch.zeros_like(lse))[..., None]).exp()
    if fault == "mean of v for no key" and seq_kv:
        p = torch.where(lse.isneginf()[..., None], p + 1 / seq_kv, p)
    out = p[..., :seq_kv] @ v
    if q_segment_ids is not None:  # of padding the gradients may be NaN
        rows = (q_segment_ids >= 0)[:, None]
        out = out.where(rows[..., None], torch.zeros_like(out))
        nothing = torch.full_like(lse, -torch.inf) if sinks is None else lse
        lse = lse.where(rows, nothing)
    return out.transpose(1, 2), lse


def _seen(fault, seq_q, seq_kv, causal, window_size):
    left, right = window_size or (None, None)
    position = torch.arange(seq_q)[:, None]
    if fault != "causal from the top left":
        position = position + seq_kv - seq_q
    key = torch.arange(seq_kv)
    if causal:
        right = 0 if right is None else min(right, 0)
    seen = torch.ones(seq_q, seq_kv, dtype=torch.bool)
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right
    if fault == "last keys off a tile dropped" and seq_kv > 16:
        seen &= key < seq_kv // 16 * 16
    return seen


def packed(q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks=None, *, fault="", softcap=None, **options):
    ends = [cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()]
    if fault == "packing ignored":
        ends = [[0, x[-1]] for x in ends]
    if fault == "softcap ignored if packed" and len(ends[0]) > 2:
        softcap = None
    nothing = torch.full((q.shape[1], 1), -torch.inf) if sinks is None else sinks[:, None]
    out, lse = q.new_zeros(*q.shape[:2], v.shape[-1]), nothing.expand(-1, len(q)).clone()
    for begin_q, end_q, begin, end in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        one = (q[None, begin_q:end_q], k[None, begin:end], v[None, begin:end], sinks)
        found = dense(*one, softcap=softcap, **options)
        out[begin_q:end_q], lse[:, begin_q:end_q] = found[0][0], found[1][0]
    return out, lse.detach() if fault == "lse without a gradient" else lse


def planted(fault: str):
    """Return an attention with a fault, or "" for none, and what it claims."""
    claims = FAULTS.get(fault, DENSE)
    return partial(packed if claims is PACKED else dense, fault=fault), claims
