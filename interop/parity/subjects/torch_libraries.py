"""Attention in torch. A function takes (case, tensors), as `library.Make` does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, reduce
from operator import and_
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.backends import cuda
from torch.nn import functional

from twin_attention.interop.parity.cases import DecodeCase, FlashCase, VarlenCase
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.parity.subjects.library import load, mask_of, needs_mask
from twin_attention.interop.parity.torch_calls import Attend, compiled

FLASH, CUDNN = "FLASH_ATTENTION", "CUDNN_ATTENTION"
EFFICIENT, MATH = "EFFICIENT_ATTENTION", "MATH"
TILE = 128  # queries, and keys, of FlexAttention's tiles
Tensors = dict[str, Any]


def eager(case: FlashCase, tensors: Tensors) -> Attend:
    """``softmax(scale · q kᵀ) v`` in the inputs' dtype; the mask is premade."""
    spec, seen = case.spec, _mask(case, tensors)
    hidden = None if seen is None else ~seen

    def attend(q, k, v):
        if spec.group_size > 1:
            k, v = (x.repeat_interleave(spec.group_size, dim=1) for x in (k, v))
        s = (q @ k.transpose(2, 3)) * spec.scale
        if hidden is not None:
            s = s.masked_fill(hidden, float("-inf"))
        return s.softmax(dim=-1) @ v

    return attend


def sdpa(backend: str, case: FlashCase, tensors: Tensors, *, lse: bool = False) -> Attend:
    """The backend of this name of `torch.nn.attention.SDPBackend`; its operator, for the lse."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if lse:
        return sdpa_operator(backend, case, tensors)
    own, only = sdpa_by_default(case, tensors), getattr(SDPBackend, backend)

    def attend(*qkv, **terms):
        with sdpa_kernel(only):
            return own(*qkv, **terms)

    return attend


def ffpa_attn(case: FlashCase, tensors: Tensors) -> Attend:
    if case.head_dim < 320:
        raise Absent("its kernels are for head dimensions from 320 on")
    load("ffpa_attn.cute")  # whose absence ffpa_attn itself does not say
    return partial(
        load("ffpa_attn").ffpa_attn_func, is_causal=case.causal, scale=case.spec.scale,
        enable_gqa=case.heads_q != case.heads_kv, backend="cutedsl",
    )  # fmt: skip


def sdpa_operator(backend: str, case: FlashCase, tensors: Tensors, *, lse: bool = True) -> Attend:
    """The operator behind a backend: [B, H, Sq, D], and [B, H, Sq]."""
    name, options = backend.lower(), {"is_causal": case.causal, "scale": case.scale}
    if backend != FLASH:
        options |= {"attn_bias": None, "compute_log_sumexp": lse}
    elif tensors["q"].device.type == "cpu":
        name += "_for_cpu"
        if case.causal and case.seq_q != case.seq_kv:
            options |= {"is_causal": False, "attn_mask": _added(case, tensors, float("-inf"))}
    operator = getattr(aten(), f"_scaled_dot_product_{name}")
    is_usable = getattr(cuda, f"can_use_{name.removesuffix('_for_cpu')}")
    asked = (None, 0.0, case.causal and case.seq_q == case.seq_kv, case.heads_q != case.heads_kv)

    def attend(*qkv):
        if qkv[0].is_cuda and not is_usable(cuda.SDPAParams(*qkv, *asked)):
            raise Absent("No available kernel")
        out, found, *_ = operator(*qkv, **options)
        return out, found.flatten(2)[..., : case.seq_q]  # cuDNN's is [B, H, Sq, 1]

    return attend


def sdpa_by_default(case: FlashCase, tensors: Tensors) -> Attend:
    from torch.nn.attention.bias import causal_lower_right

    mask: Any = None
    if needs_mask(case) or (case.causal and case.bias is not None):
        mask = _mask(case, tensors)
    elif case.causal and case.seq_q != case.seq_kv:
        mask = causal_lower_right(case.seq_q, case.seq_kv)
    attend = partial(
        functional.scaled_dot_product_attention,
        is_causal=case.causal and mask is None,
        scale=case.scale,
        enable_gqa=case.heads_q != case.heads_kv,
    )

    def with_bias(*qkv, bias):
        added = bias.expand(case.batch, case.heads_q, case.seq_q, case.seq_kv)
        if mask is not None:
            added = added.masked_fill(~mask, float("-inf"))
        return attend(*qkv, attn_mask=added)

    return partial(attend, attn_mask=mask) if case.bias is None else with_bias


def multi_head(case: FlashCase, tensors: Tensors) -> Attend:
    """The attention of `nn.MultiheadAttention` that returns weights, between identities."""
    seen = _mask(case, tensors)
    width = case.heads_q * case.head_dim
    one = torch.eye(width, dtype=tensors["q"].dtype, device=tensors["q"].device)
    attend = partial(
        functional.multi_head_attention_forward,
        embed_dim_to_check=width, num_heads=case.heads_q, in_proj_weight=None, in_proj_bias=None,
        bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0, out_proj_weight=one,
        out_proj_bias=None, use_separate_proj_weight=True, q_proj_weight=one, k_proj_weight=one,
        v_proj_weight=one, attn_mask=None if seen is None else ~seen[0, 0],
    )  # fmt: skip

    def attend_heads(q, k, v):
        out, _ = attend(*(x.flatten(2).transpose(0, 1) for x in (q, k, v)))
        return out.transpose(0, 1).unflatten(2, (case.heads_q, case.head_dim))

    return attend_heads


def transformers(implementation: str, case: FlashCase, tensors: Tensors) -> Attend:
    """The "eager" or "sdpa" attention of transformers, with its models' masks."""
    group = case.heads_q // case.heads_kv
    module = SimpleNamespace(num_key_value_groups=group, training=False, is_causal=case.causal)
    options: dict[str, Any] = {"scaling": case.spec.scale, "attention_mask": None}
    if implementation == "eager":
        attend = load("transformers.models.gemma2.modeling_gemma2").eager_attention_forward
        least = torch.finfo(tensors["q"].dtype).min
        options["softcap"], options["attention_mask"] = case.softcap, _added(case, tensors, least)
    else:
        attend = load("transformers.integrations.sdpa_attention").sdpa_attention_forward
        if needs_mask(case) or (case.causal and case.seq_q != case.seq_kv):
            options["attention_mask"] = _mask(case, tensors)
    return lambda *qkv: attend(module, *qkv, **options)[0].transpose(1, 2)


def gpt_oss(case: FlashCase, tensors: Tensors) -> Attend:
    """transformers' eager attention with sinks."""
    attend = load("transformers.models.gpt_oss.modeling_gpt_oss").eager_attention_forward
    group = case.heads_q // case.heads_kv
    added = _added(case, tensors, torch.finfo(tensors["q"].dtype).min)

    def with_sinks(q, k, v, sinks=None):
        sinks = q.new_full((case.heads_q,), float("-inf")) if sinks is None else sinks
        module = SimpleNamespace(num_key_value_groups=group, training=False, sinks=sinks)
        return attend(module, q, k, v, added, scaling=case.spec.scale)[0].transpose(1, 2)

    return with_sinks


def flex(
    case: Any, tensors: Tensors, *, makes_mask: bool = False, compiles_mask: bool = True,
    lse: bool = False,
) -> Attend:  # fmt: skip
    """FlexAttention, compiled on a GPU; its block mask is premade unless it `makes_mask`."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    spec, device = case.spec, tensors["q"].device
    make, attention = create_block_mask, cast(Any, flex_attention)
    if device.type == "cpu":
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    else:
        attention = compiled(flex_attention)
        make = compiled(create_block_mask) if compiles_mask else create_block_mask
    predicates = _predicates(case, tensors)
    is_own = any(x in tensors for x in ("q_segment_ids", "kv_ends", "q_ranges", "block_mask"))
    heads = case.heads_q if getattr(case, "own_masks", "") else None
    sizes = (case.batch if is_own and case.batch > 1 else None, heads, spec.seq_q, spec.seq_kv)

    def visible(b, h, i, j):
        return reduce(and_, (predicate(b, h, i, j) for predicate in predicates))

    def mask() -> Any:
        return make(visible, *sizes, device=str(device), BLOCK_SIZE=_tile(case))

    kept = mask() if predicates and not makes_mask else None

    def attend(q, k, v, **terms):
        is_packed = q.ndim == 3
        qkv: Any = (x[None] for x in (q, k, v)) if is_packed else (q, k, v)
        found = attention(
            *qkv,
            _score_mod(case, terms, tensors.get("alibi_slopes")),
            (kept or mask()) if predicates else None,
            scale=case.scale,
            enable_gqa=case.heads_q != case.heads_kv,
            **({"return_aux": AuxRequest(lse=True)} if lse else {}),
        )
        found = (found[0], found[1].lse) if lse else (found,)
        found = tuple(x[0] for x in found) if is_packed else found
        return found if lse else found[0]

    return attend


def _tile(case: Any) -> tuple[int, int]:
    return getattr(case, "tile_q", TILE), getattr(case, "tile_kv", TILE)


Predicate = Callable[[Any, Any, Any, Any], Any]


def _predicates(case: Any, tensors: Tensors) -> list[Predicate]:
    """Return what hides keys, as functions of batch, head, query and key."""
    window: Any = case.spec.window
    position, size_q, size_kv = _positions(case, tensors), *_tile(case)
    found: list[Predicate] = []
    if window.right is not None:
        found.append(lambda b, h, i, j: j <= position(i) + window.right)
    if window.left is not None:
        found.append(lambda b, h, i, j: j >= position(i) - window.left)
    if "q_ranges" in tensors:
        found = [_or_in_ranges(found, tensors["q_ranges"])]
    if isinstance(case, VarlenCase):
        queries, keys = (_documents(tensors, x) for x in ("q", "kv"))
        found.append(lambda b, h, i, j: queries[i] == keys[j])
    if "q_segment_ids" in tensors:
        ids, others = tensors["q_segment_ids"], tensors["kv_segment_ids"]
        found.append(lambda b, h, i, j: (ids[b, i] == others[b, j]) & (ids[b, i] >= 0))
    if "kv_ends" in tensors:
        ends = tensors["kv_ends"]
        found.append(lambda b, h, i, j: position(i) < ends[b, j])
    if "block_mask" in tensors:
        tiles = tensors["block_mask"]
        b, h = (n > 1 for n in tiles.shape[:2])
        found.append(lambda *x: tiles[x[0] * b, x[1] * h, x[2] // size_q, x[3] // size_kv])
    return found


def _or_in_ranges(predicates: list[Predicate], ranges: Any) -> Predicate:
    """Return a predicate of pairs that all of some show, or a range of [B, Sq, R, 2]."""

    def visible(b, h, i, j):
        seen = reduce(and_, (predicate(b, h, i, j) for predicate in predicates))
        for n in range(ranges.shape[2]):
            seen = seen | ((ranges[b, i, n, 0] <= j) & (j < ranges[b, i, n, 1]))
        return seen

    return visible


def _positions(case: Any, tensors: Tensors) -> Callable[[Any], Any]:
    if not isinstance(case, VarlenCase):
        diagonal = case.spec.diagonal
        return lambda i: i + diagonal
    if all(queries == keys for queries, keys in case.lengths):
        return lambda i: i
    ends = [functional.pad(tensors[f"cu_seqlens_{x}"][1:], (0, 1)) for x in ("q", "kv")]
    own = (ends[1] - ends[0])[_documents(tensors, "q")]
    return lambda i: i + own[i]


def _documents(tensors: Tensors, of: str) -> torch.Tensor:
    offsets, rows = tensors[f"cu_seqlens_{of}"], len(tensors[{"q": "q", "kv": "k"}[of]])
    tokens = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:], tokens, right=True)


def _score_mod(case: Any, terms: Tensors, slopes: torch.Tensor | None) -> Any:
    """Return what changes a score; None for nothing."""
    bias, table = terms.get("bias"), terms.get("relative_bias")
    diagonal = case.spec.diagonal
    if bias is None and table is None and slopes is None and case.softcap is None:
        return None

    def changed(score, b, h, i, j):
        if bias is not None:
            place = [x if n > 1 else 0 for x, n in zip((b, h, i, j), bias.shape, strict=True)]
            score = score + bias[tuple(place)]
        if table is not None:
            radius = table.shape[1] // 2
            score = score + table[h, (j - i - diagonal).clamp(-radius, radius) + radius]
        if slopes is not None:
            slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
            score = score - slope * (j - i - diagonal).abs()
        return score if case.softcap is None else torch.tanh(score / case.softcap) * case.softcap

    return changed


def flash_attn(
    module: str, case: Any, tensors: Tensors, *, dropout: float | None = None, lse: bool = False
) -> Attend:
    """A package with flash-attn's interface, which may return more than out."""
    options = {"softmax_scale": case.scale, "causal": case.causal}
    if lse:
        options["return_lse" if module == "flash_attn.cute" else "return_attn_probs"] = True
    if "alibi_slopes" in tensors:
        options["alibi_slopes"] = tensors["alibi_slopes"]
    if dropout is not None:
        options["dropout_p"] = dropout
    name = "flash_attn_func"
    if isinstance(case, VarlenCase):
        name, options = "flash_attn_varlen_func", options | _ends(case, tensors)
    attend = getattr(load(module), name, None)
    if attend is None:
        raise Absent(f"its package has no {name}")

    def forward(q, k, v):
        found = attend(q, k, v, **options)
        return found[:2] if lse else found[0] if isinstance(found, tuple) else found

    return forward


def jvp_flash(case: FlashCase, tensors: Tensors) -> Attend:
    """jvp-flash-attention, which asserts what lengths it takes."""
    if case.seq_q % 32 or not case.seq_q or case.head_dim not in (16, 32, 64, 128, 256):
        raise Absent("it takes multiples of 32 tokens, head dimensions 16, 32, 64, 128 and 256")
    # `attention` takes no tangents under `torch.func.jvp`.
    attend = load("jvp_flash_attention.jvp_attention").JVPAttn.fwd_dual
    return partial(attend, causal=case.causal, sm_scale=case.scale)


def fa2_varlen(case: VarlenCase, tensors: Tensors, *, lse: bool = False) -> Attend:
    """torch's FlashAttention-2, as `torch.nn.attention.varlen` calls it."""
    attend, ends = aten()._flash_attention_forward, (*_ends(case, tensors).values(),)
    options = (*ends, 0.0, case.causal, False)
    chosen = slice(2) if lse else 0
    return lambda q, k, v: attend(q, k, v, *options, scale=case.scale)[chosen]


def _ends(case: VarlenCase, tensors: Tensors) -> dict[str, Any]:
    longest = [max((pair[side] for pair in case.lengths), default=0) for side in (0, 1)]
    return {
        "cu_seqlens_q": tensors["cu_seqlens_q"], "cu_seqlens_k": tensors["cu_seqlens_kv"],
        "max_seqlen_q": longest[0], "max_seqlen_k": longest[1],
    }  # fmt: skip


def sdpa_decode(backend: str, case: DecodeCase, tensors: Tensors) -> Attend:
    """The backend on a premade dense copy of a cache of one length."""
    spec, length = case.spec, case.lengths[0]
    pages = tensors["block_tables"][:, : -(-length // case.page_size)].long()
    k, v = (
        tensors[x][pages].flatten(1, 2)[:, :length].contiguous().transpose(1, 2)
        for x in ("k_pages", "v_pages")
    )
    dense = FlashCase(
        case.name, spec.batch, spec.tokens, length, spec.heads_q, spec.heads_kv,
        causal=spec.tokens > 1, scale=case.scale,
    )  # fmt: skip
    own = sdpa(backend, dense, tensors)

    def attend(q, *_):
        rows = q.view(spec.batch, spec.tokens, spec.heads_q, spec.head_dim).transpose(1, 2)
        return own(rows, k, v).transpose(1, 2).reshape(*q.shape[:-1], spec.head_dim_v)

    return attend


def aten() -> Any:
    """Return torch's own operators, which a test cannot replace."""
    return torch.ops.aten


def _added(case: FlashCase, tensors: Tensors, hidden: float) -> torch.Tensor | None:
    """Return what is added to scores: 0, and `hidden` where a key is; None if all are seen."""
    seen, q = _mask(case, tensors), tensors["q"]
    return None if seen is None else q.new_zeros(seen.shape).masked_fill(~seen, hidden)


def _mask(case: FlashCase, tensors: Tensors) -> torch.Tensor | None:
    mask = mask_of(case, tensors)
    return None if mask is None else torch.from_numpy(mask).to(tensors["q"].device)
