"""In every row of docs/coming-from.md the other library's call and ours give the same.

SDPA, jax.nn, nn.MultiheadAttention and transformers are real; flash-attn, ffpa-attn, xformers,
FlashInfer, FlashMLA and vLLM need a GPU, so plain definitions stand in for them, and for
FlexAttention's backward.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from twin_attention.contract.tolerances import compare_to_reference

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
CELL = re.compile(r"`([^`]+)`")
SQ, SKV, W = 4, 7, 3
S, LONG = 24, 128
MATH = {x: getattr(torch, x) for x in ("where", "inf")}
SINKS = torch.tensor([-0.5, 0.0, 0.75, 1.5])


def rows() -> list[tuple[str, str, str]]:
    found, heading = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| `"):
            cells = [CELL.fullmatch(cell.strip()) for cell in line.split("|")[1:3]]
            found.append((heading, *(cell[1] if cell else line for cell in cells)))
    return found


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale=None,
    causal=False,
    left=-1,
    right=-1,
    softcap=0.0,
    sinks=None,
    slopes=None,
) -> tuple[Tensor, Tensor]:
    """Attend over [S, H, D] by flash-attn's rules; -1 and 0.0 are off. Return out and lse."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap > 0 else s
    i, j = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0], torch.arange(k.shape[0])
    if slopes is not None:
        s = s - slopes.to(s.dtype)[:, None, None] * (i - j).abs()
    hidden = (j > i) if causal else torch.zeros_like(j > i)
    hidden |= (j < i - left) if left >= 0 else hidden
    hidden |= (j > i + right) if right >= 0 else hidden
    s = s.masked_fill(hidden, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hij,jhd->ihd", s.softmax(-1)[..., : len(k)], v), s.logsumexp(-1)


def rotate(x: Tensor, turns: Tensor, lengths: Tensor) -> Tensor:
    """Rotate interleaved pairs of [B, T, H, D] as complex numbers."""
    position = lengths[:, None] + torch.arange(x.shape[1])
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[position][:, :, None]).flatten(-2).to(x.dtype)


def gather(pages: Tensor, table: Tensor, length: Tensor) -> Tensor:
    return pages[table.long()].flatten(0, 1)[: int(length)]


def flash_attn(dtype: torch.dtype) -> dict[str, Any]:
    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None,
    ):  # fmt: skip
        options = (softmax_scale, causal, *window_size, softcap, None, alibi_slopes)
        return torch.stack([plain(*qkv, *options)[0] for qkv in zip(q, k, v, strict=True)])

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, *, rotary_cos=None, rotary_sin=None, cache_seqlens,
        cache_batch_idx=None, block_table=None, causal=False, window_size=(-1, -1),
        alibi_slopes=None,
    ):  # fmt: skip
        options = None, causal, *window_size, 0.0, None, alibi_slopes
        if cache_batch_idx is not None:
            block_table = cache_batch_idx[:, None]
        if rotary_cos is not None:
            turns = torch.complex(rotary_cos.float(), rotary_sin.float())
            q, k = (rotate(x, turns, cache_seqlens) for x in (q, k))
        outs = []
        for b, (table, n) in enumerate(zip(block_table, cache_seqlens, strict=True)):
            keys, values = gather(k_cache, table, n), gather(v_cache, table, n)
            if k is not None:
                keys, values = torch.cat([keys, k[b]]), torch.cat([values, v[b]])
            outs.append(plain(q[b], keys, values, *options)[0])
        return torch.stack(outs)

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=False):
        bounds = zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
        outs = [plain(q[a:b], k[c:d], v[c:d], None, causal)[0] for a, b, c, d in bounds]
        return torch.cat(outs)

    new = {
        f"{x}{t}": draw(2, t, h, dtype=dtype)
        for x, h in (("q", 4), ("k", 2), ("v", 2))
        for t in (1, 3)
    }
    angles = draw(12, dtype=torch.float32)[:, :8]
    mask = torch.arange(SQ) < torch.tensor([[3], [SQ]])
    return {
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "flash_attn_func": flash_attn_func,
        "flash_attn_qkvpacked_func": lambda x, **more: flash_attn_func(*x.unbind(2), **more),
        "flash_attn_kvpacked_func": lambda q, x, **more: flash_attn_func(q, *x.unbind(2), **more),
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_varlen_qkvpacked_func": lambda x, cu, n, **more: flash_attn_varlen_func(
            *x.unbind(1), cu, cu, n, n, **more
        ),
        "flash_attn_varlen_kvpacked_func": lambda q, x, *more: flash_attn_varlen_func(
            q, *x.unbind(1), *more
        ),
        "unpad_input": lambda x, mask: (x[mask],),
        "pad_input": lambda x, places, b, s: (
            x.new_zeros(b * s, *x.shape[1:]).index_copy(0, places, x).view(b, s, *x.shape[1:])
        ),
        "mask": mask,
        "places": mask.flatten().nonzero()[:, 0],
        "cu_mask": torch.tensor([0, 3, 3 + SQ], dtype=torch.int32),
        "where": lambda *x: torch.where(*x).int(), "qkv": draw(2, SQ, 3, 4, dtype=dtype),
        "kv": draw(2, SKV, 2, 2, dtype=dtype), "qkvp": draw(2 * SQ, 3, 4, dtype=dtype),
        "kvp": draw(2 * SKV, 2, 2, dtype=dtype), "Sq": SQ, "k_dense": draw(7, 9, 2, dtype=dtype),
        "v_dense": draw(7, 9, 2, dtype=dtype) * 0.5 + 1,
        "m": torch.tensor([3, 8], dtype=torch.int32),
        "rows": torch.tensor([6, 2], dtype=torch.int32),
        **qkv(dtype),
        **{f"{name}p": x.flatten(0, 1) for name, x in qkv(dtype).items()},
        "slopes": torch.tensor([0.5, 0.25, 0.0, 2.0]),
        "cu_q": torch.tensor([0, 3, 2 * SQ], dtype=torch.int32),
        "cu_k": torch.tensor([0, 8, 2 * SKV], dtype=torch.int32),
        "max_q": 5,
        "max_k": 8,
        **new,
        **cache(dtype, "k_cache", "v_cache"),
        "n": torch.tensor([5, 9], dtype=torch.int32),
    }  # fmt: skip


def ffpa_attn(dtype: torch.dtype) -> dict[str, Any]:
    def ffpa_attn_func(q, k, v, is_causal=False, scale=None, enable_gqa=False):
        heads_last = zip(*(x.transpose(1, 2) for x in (q, k, v)), strict=True)
        outs = [plain(*qkv, scale, is_causal)[0] for qkv in heads_last]
        return torch.stack(outs).transpose(1, 2)

    names = {name: x.transpose(1, 2) for name, x in qkv(dtype).items()}
    views = {f"{name}t": x.transpose(1, 2) for name, x in names.items()}
    return {"ffpa_attn_func": ffpa_attn_func, **names, **views}


def sdpa(dtype: torch.dtype) -> dict[str, Any]:
    from torch.nn.attention.bias import causal_lower_right

    names = {name: x.transpose(1, 2) for name, x in qkv(dtype, heads_kv=4).items()}
    return {
        "sdpa": torch.nn.functional.scaled_dot_product_attention,
        "causal_lower_right": causal_lower_right,
        **names,
        **{f"{name}t": x.transpose(1, 2) for name, x in names.items()},
        "long": draw(2, 9, 4, dtype=dtype).transpose(1, 2), "Sq": SQ, "Skv": SKV, "Slong": 9,
        "q_ids": torch.tensor([[0, 0, 0, 1, 1], [4, 3, 4, 3, 3]], dtype=torch.int32)[:, :SQ],
        "kv_ids": torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1], [3, 4] * 4], dtype=torch.int32)[:, :SKV],
        "added": draw(2, 4, SQ, dtype=dtype)[..., :SKV],
        "seen": draw(2, 1, SQ, dtype=dtype)[..., :SKV] > -0.5,
        **MATH,
    }  # fmt: skip


def flexattention(dtype: torch.dtype) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def flex(q, k, v, score_mod=None, block_mask=None):
        if not torch.is_grad_enabled():
            return flex_attention(*(x.detach() for x in (q, k, v)), score_mod, block_mask)
        sizes = *q.shape[:3], k.shape[2]
        index = [
            torch.arange(n).view([-1 if axis == a else 1 for a in range(4)])
            for axis, n in enumerate(sizes)
        ]
        s = q @ k.mT * q.shape[-1] ** -0.5
        s = s if score_mod is None else score_mod(s, *index)
        if block_mask is not None:
            s = s.masked_fill(~block_mask.mask_mod(*index), -math.inf)
        return s.to(v.dtype).softmax(-1) @ v

    def mask(function):
        length = LONG if "kept" in function.__code__.co_names else S
        return create_block_mask(function, 2, 4, length, length, device="cpu")

    def many(*shape: int, seed: int) -> Tensor:
        return draw(*shape, seed, dtype=dtype)[..., seed - 1, :].clone().requires_grad_()

    positions = torch.arange(S, dtype=torch.int32)
    heads = {
        f"{x}{of}": many(2, 4, length, seed=i + 1)
        for i, x in enumerate("qkv")
        for of, length in (("", S), ("_long", LONG))
    }
    return {
        "flex": flex,
        "mask": mask,
        "tanh": torch.tanh,
        **heads,
        **{f"{x}t": heads[x].transpose(1, 2) for x in "qkv"},
        "image": torch.tensor(
            [[-1] * 2 + [0] * 6 + [-1] * 7 + [1] * 9, [-1] * 9 + [0] * 5 + [-1] * 10]
        ),
        "ids": (positions // torch.tensor([[7], [10]])).int(),
        "ends": torch.where((positions >= 10) & (positions < 16), 16, S).int().repeat(2, 1),
        "image_of_text": (positions // 9).repeat(2, 1),
        "image_of_key": (positions // 8).repeat(2, 1),
        "kept": torch.tensor([[True, False], [True, True]]),
        "seen": (positions[:, None] * positions % 5 < 3) | (positions[:, None] == positions),
        "slopes": torch.tensor([0.5, 0.25, 0.0, 2.0]),
        "table": draw(4, dtype=dtype)[:, :11].clone().requires_grad_(),
        "added": draw(2, 4, S, S, dtype=dtype)[..., 0].clone().requires_grad_(),
        **MATH,
        **block_of("FlexAttention"),
    }


def multihead(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    mha = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    for bias in (mha.in_proj_bias, mha.out_proj.bias):
        torch.nn.init.normal_(bias)
    return {
        "mha": mha.half().to(dtype),
        "x": draw(2, S, 4, dtype=dtype).flatten(2).requires_grad_(),
        "hidden": torch.ones(S, S, dtype=torch.bool).triu(1),
        "padding": torch.arange(S) >= torch.tensor([[S], [17]]),
        "zeros": torch.zeros(2, S, dtype=torch.int32),
        **MATH,
        **block_of("nn.MultiheadAttention"),
    }


def block_of(heading: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    block = re.search(rf"## {heading}.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(block[1], names)
    return names


def xformers(dtype: torch.dtype) -> dict[str, Any]:
    """Masks as functions of the shape of scores, True for pairs that are seen."""

    def xattn(q, k, v, attn_bias=None, scale=None):
        s = torch.einsum("bihd,bjhd->bhij", q, k) * (
            q.shape[-1] ** -0.5 if scale is None else scale
        )
        if callable(attn_bias):
            s = s.masked_fill(~attn_bias(*s.shape[2:]), -math.inf)
        elif attn_bias is not None:
            s = s + attn_bias
        return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)

    def lower(shift=None):
        return lambda m, n: torch.ones(m, n).tril(n - m if shift is None else shift).bool()

    def blocks(is_causal):
        def from_seqlens(q_lengths, kv_lengths=None):
            sizes = zip(q_lengths, kv_lengths or q_lengths, strict=True)
            parts = [torch.ones(size).tril(0 if is_causal else 99) for size in sizes]
            return lambda *_: torch.block_diag(*parts).bool()

        return SimpleNamespace(from_seqlens=from_seqlens)

    return {
        "xattn": xattn,
        "LowerTriangularMask": lambda: lower(0),
        "LowerTriangularFromBottomRightMask": lower,
        "BlockDiagonalMask": blocks(False),
        "BlockDiagonalCausalMask": blocks(True),
        **qkv(dtype, heads_kv=4),
        **{f"{name}p": x.flatten(0, 1)[None] for name, x in qkv(dtype, heads_kv=4).items()},
        "bias": draw(2, 4, SQ, dtype=dtype)[..., :SKV],
        "q_lengths": [3, 2 * SQ - 3],
        "kv_lengths": [8, 2 * SKV - 8],
        "cu_q": torch.tensor([0, 3, 2 * SQ], dtype=torch.int32),
        "cu_k": torch.tensor([0, 8, 2 * SKV], dtype=torch.int32),
        "Sq": SQ,
    }


def jax_nn(dtype: torch.dtype) -> dict[str, Any]:
    import jax

    import pallas_attn

    return {
        "attend": jax.nn.dot_product_attention,
        "flash_attention": pallas_attn.flash_attention,
        **{name: jax.numpy.asarray(x.numpy()) for name, x in qkv(dtype).items()},
        **{name: getattr(jax.numpy, name) for name in ("where", "arange", "inf")},
        "mask": (jax.numpy.arange(SQ)[:, None] + jax.numpy.arange(SKV)) % 3 > 0,
        "nq": jax.numpy.array([SQ, 2], jax.numpy.int32),
        "nkv": jax.numpy.array([3, SKV], jax.numpy.int32),
        "Sq": SQ,
        "Skv": SKV,
    }


def flax(dtype: torch.dtype) -> dict[str, Any]:
    linen = pytest.importorskip("flax.linen")
    import jax

    from pallas_attn.adapters.flax import attention_fn

    names = ("make_causal_mask", "make_attention_mask")
    return {
        "attend": linen.dot_product_attention,
        "attention_fn": attention_fn,
        **{name: jax.numpy.asarray(x.numpy()) for name, x in qkv(dtype, heads_kv=4).items()},
        **{name: getattr(linen, name) for name in names},
        "ids": jax.numpy.array([[0, 1, 1, 2], [3, 3, 3, 3]]),
        "valid": jax.numpy.arange(SKV) < jax.numpy.array([[SKV], [3]]),
        "equal": jax.numpy.equal,
        "bias": jax.numpy.linspace(-1, 1, SKV),
        "mask": (jax.numpy.arange(SQ)[:, None] + jax.numpy.arange(SKV)) % 3 > 0,
    }


def flashinfer(dtype: torch.dtype) -> dict[str, Any]:
    def single_prefill_with_kv_cache(
        q, k, v, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=0.0, return_lse=False
    ):
        out, lse = plain(q, k, v, sm_scale, causal, window_left, -1, logits_soft_cap)
        return (out, lse.T / math.log(2)) if return_lse else out

    def run(q, kv_cache):
        indptr, indices, last = (names[x] for x in ("indptr", "indices", "last_page_len"))
        outs = []
        for b in range(len(q)):
            pages = indices[indptr[b] : indptr[b + 1]]
            keys, values = (gather(x, pages, (len(pages) - 1) * 4 + last[b]) for x in kv_cache)
            outs.append(plain(q[b : b + 1], keys, values)[0][0])
        return torch.stack(outs)

    def run_prefill(q, kv_cache):
        indptr, indices, last = (names[x] for x in ("indptr", "indices", "last_page_len"))
        outs = []
        for b in range(len(indptr) - 1):
            new = q[names["qo_indptr"][b] : names["qo_indptr"][b + 1]]
            pages = indices[indptr[b] : indptr[b + 1]]
            keys, values = (gather(x, pages, (len(pages) - 1) * 4 + last[b]) for x in kv_cache)
            outs.append(plain(new, keys, values, None, True)[0])
        return torch.cat(outs)

    def run_hnd(q, kv_cache):
        return run(q, [x.transpose(1, 2) for x in kv_cache])

    names = {
        "single_prefill_with_kv_cache": single_prefill_with_kv_cache,
        "single_decode_with_kv_cache": lambda q, k, v: plain(q[None], k, v)[0][0],
        "wrapper": SimpleNamespace(run=run),
        "hnd_wrapper": SimpleNamespace(run=run_hnd),
        "prefill_wrapper": SimpleNamespace(run=run_prefill),
        "log": math.log,
        **{name: x[0] for name, x in qkv(dtype).items()},
        "q1": draw(2, 4, dtype=dtype),
        "qp": draw(5, 4, dtype=dtype),
        "qo_indptr": torch.tensor([0, 2, 5], dtype=torch.int32),
        **cache(dtype, "k_pages", "v_pages"),
    }
    names["k_hnd"], names["v_hnd"] = (
        names[x].transpose(1, 2).contiguous() for x in ("k_pages", "v_pages")
    )
    names |= block_of("FlashInfer")
    return names


def flash_mla(dtype: torch.dtype) -> dict[str, Any]:
    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, num_splits,
        softmax_scale=None, causal=False,
    ):  # fmt: skip
        pairs = []
        for b, (table, n) in enumerate(zip(block_table, cache_seqlens, strict=True)):
            keys = gather(k_cache, table, n)
            pairs.append(plain(q[b], keys, keys[..., :head_dim_v], softmax_scale, causal))
        return tuple(map(torch.stack, zip(*pairs, strict=True)))

    wide = [torch.cat([draw(*x, dtype=dtype)] * 2, -1) for x in ((2, 3, 4), (7, 4, 1))]
    return {
        "flash_mla_with_kvcache": flash_mla_with_kvcache,
        **dict(zip(("q3", "kvcache"), wide, strict=True)),
        "table": torch.tensor([[3, 0, 5], [6, 1, 4]], dtype=torch.int32),
        "n": torch.tensor([5, 9], dtype=torch.int32),
        "metadata": None,
        "num_splits": None,
    }


def vllm(dtype: torch.dtype) -> dict[str, Any]:
    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, seqused_k, block_table,
        causal, window_size=(-1, -1), softcap=0.0, s_aux=None,
    ):  # fmt: skip
        outs = []
        for b, (table, n) in enumerate(zip(block_table, seqused_k, strict=True)):
            new = q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]
            keys, values = gather(k, table, n), gather(v, table, n)
            outs.append(plain(new, keys, values, None, causal, *window_size, softcap, s_aux)[0])
        return torch.cat(outs)

    def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, *_):
        for new, pool in ((key, key_cache), (value, value_cache)):
            pool.view(-1, *pool.shape[2:])[slot_mapping] = new
        return key_cache, value_cache

    names = {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "reshape_and_cache_flash": reshape_and_cache_flash,
        "q": draw(2, 4, dtype=dtype),
        "key": draw(2, 2, dtype=dtype),
        "value": draw(2, 2, dtype=dtype) + 1,
        **cache(dtype, "key_cache", "value_cache"),
        "one_each": torch.tensor([0, 1, 2]),
        "qp": draw(5, 4, dtype=dtype),
        "query_start_loc": torch.tensor([0, 2, 5], dtype=torch.int32),
        "sinks": SINKS.to(dtype),
        "seq_lens": torch.tensor([5, 9], dtype=torch.int32),
    }
    names |= {"kp": draw(5, 2, dtype=dtype), "vp": draw(5, 2, dtype=dtype) + 1}

    def slots(sequence: list[int], position: list[int]) -> Tensor:
        pages = names["table"][sequence, [p // 4 for p in position]]
        return pages.long() * 4 + torch.tensor(position) % 4

    one_each, packed = ([0, 1], [4, 8]), ([0, 0, 1, 1, 1], [3, 4, 6, 7, 8])
    return names | {"slot_mapping": slots(*one_each), "slots": slots(*packed)}


def transformers(dtype: torch.dtype) -> dict[str, Any]:
    pytest.importorskip("transformers")
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        eager_mask,
        sliding_window_causal_mask_function,
    )
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

    def mask(function):
        return eager_mask(2, SQ, SKV, SKV - SQ, mask_function=function, dtype=dtype)

    names = {name: x.transpose(1, 2) for name, x in qkv(dtype).items()}
    return {
        "eager": lambda layer, q, k, v, mask, scaling, softcap=None: eager_attention_forward(
            layer, q, k, v, mask, scaling=scaling, softcap=softcap
        ),
        "gpt_oss": gpt_oss,
        "layer": SimpleNamespace(
            num_key_value_groups=2, training=False, head_dim=16, sinks=SINKS.to(dtype)
        ),
        "causal": mask(causal_mask_function),
        "full": mask(bidirectional_mask_function),
        "sliding": lambda size: mask(sliding_window_causal_mask_function(size)),
        "scaling": 16**-0.5,
        **names,
        **{f"{name}t": x.transpose(1, 2) for name, x in names.items()},
    }


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    """The same shape gives the same values, rounded to float16."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, 16, generator=generator).half().to(dtype)


def qkv(dtype: torch.dtype, heads_kv: int = 2) -> dict[str, Tensor]:
    return {
        "q": draw(2, SQ, 4, dtype=dtype),
        "k": draw(2, SKV, heads_kv, dtype=dtype),
        "v": draw(2, SKV, heads_kv, dtype=dtype) * 0.5 + 1,
    }


def cache(dtype: torch.dtype, keys: str, values: str) -> dict[str, Tensor]:
    return {
        keys: draw(7, 4, 2, dtype=dtype),
        values: draw(7, 4, 2, dtype=dtype) * 0.5 + 1,
        "table": torch.tensor([[3, 0, 5], [6, 1, 4]], dtype=torch.int32),
    }


LIBRARIES = {
    "flash-attn": flash_attn, "ffpa-attn": ffpa_attn, "torch SDPA": sdpa,
    "FlexAttention": flexattention, "nn.MultiheadAttention": multihead, "xformers": xformers,
    "jax.nn": jax_nn, "Flax": flax, "FlashInfer": flashinfer, "FlashMLA": flash_mla, "vLLM": vllm,
    "Hugging Face transformers": transformers,
}  # fmt: skip


def results(library: str, code: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return results, and their gradient for each tensor that requires one."""
    names = {name: getattr(torch_attn, name) for name in torch_attn.__all__}
    names |= LIBRARIES[library](dtype) | {"W": W}
    with torch.no_grad():
        value = eval(code, names)
    found = [torch.from_dlpack(x) for x in (value if isinstance(value, tuple) else [value])]
    leaves = [x for x in names.values() if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
    if not leaves:
        return found, []
    out = eval(code, names)
    weights = draw(*out.shape[:-1], dtype=dtype)[..., :1]
    gradients = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    return found, [x for x in gradients if x is not None]


@pytest.mark.parametrize(("library", "theirs", "here"), rows())
def test_rows_give_the_same(library: str, theirs: str, here: str):
    wanted = results(library, theirs, torch.float32)
    low_precision = results(library, theirs, torch.float16)
    got = results(library, here, torch.float16)
    for kind, *found in zip(("output", "gradient"), wanted, low_precision, got, strict=True):
        for ref, lp, x in zip(*found, strict=True):
            assert x.shape == ref.shape
            agreement = compare_to_reference(x, ref.double(), lp, "float16", kind)
            assert agreement.ok, agreement


def test_every_library_has_rows():
    assert {library for library, *_ in rows()} == set(LIBRARIES)


def test_every_line_of_a_table_is_a_row():
    lines = re.findall(r"^\|(?!---).*$", PAGE.read_text(), re.MULTILINE)
    headers = [line for line in lines if "`" not in line.split("|")[1]]
    tables = PAGE.read_text().count("\n|---")
    assert (len(rows()), len(headers)) == (len(lines) - tables, tables)


def recipe(heading: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(re.search(rf"## {heading}.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1], names)
    return names


def test_equinox_recipe():
    eqx = pytest.importorskip("equinox")
    import jax

    names = recipe("Equinox")
    theirs = eqx.nn.MultiheadAttention(4, 64, key=names["keys"][0])
    x = jax.random.normal(names["keys"][1], (2, 128, 64))
    causal = jax.numpy.tri(128, dtype=bool)
    want = jax.vmap(lambda x: theirs(x, x, x, mask=causal))(x)
    assert jax.numpy.allclose(names["out"], want, rtol=1e-4, atol=1e-5)


def test_maxtext_recipe():
    import jax
    import jax.numpy as jnp

    names = recipe("MaxText")
    q, k, v, ids = (names[x] for x in ("q", "k", "v", "ids"))
    i, j = jnp.arange(64)[:, None], jnp.arange(64)
    sees = (ids[:, :, None] == ids[:, None]) & (j <= i) & (j > i - 9)  # W counts the query
    s = 5 * jnp.tanh(jnp.einsum("bihd,bjhd->bhij", q, k) / 5)
    p = jax.nn.softmax(jnp.where(sees[:, None], s, -jnp.inf), -1)
    want = jnp.einsum("bhij,bjhd->bihd", p, v)
    got = names["attend"](q, k, v, ids, window=9, softcap=5.0)
    assert jnp.allclose(got[ids > 0], want[ids > 0], rtol=1e-4, atol=1e-5)
