"""The same mistake raises the same error on both sides, before anything runs."""

from functools import partial

import numpy as np
import pytest
import torch

import torch_attn
from tests.mistakes import (
    LEFT_OUT,
    Operand,
    bf16,
    boolean,
    e4m3,
    e5m2,
    f16,
    f32,
    f64,
    i8,
    i32,
    i64,
    mistake,
    refused,
)
from twin_attention.contract.block_mask import BlockMask

INF, NAN = float("inf"), float("nan")
SIZE = "expected a head dimension from 16 to 512 in steps of 8, got "
WINDOW = (
    "window_size: expected None or a tuple (left, right) of non-negative integers or None, got "
)
SOFTCAP = "softcap: expected a positive number up to 2**100 or None, got "
SCALE = "scale: expected a finite number or None, got "
SPLITS = "num_splits: expected None or an integer from 1 to 256, got "
PRECISION = "precision: expected one of 'ieee', 'tf32', got "
CASCADE = "cascade: expected False with num_splits, whose results do not depend on the batch"
TABLE = "relative_bias: expected shape (4, 2R + 1), of each head a value for each distance -R to R"
BIAS = "bias: expected shape (2, 4, 5, 7), or 1 in place of any of these, got "
SLOPES = "alibi_slopes: expected shape (4,) or (2, 4), one of each head, got "
ONE_EACH = "one of each token, got "
HEAD_SCALE = "expected shape () or (2,), one of all heads or of each kv head, got "
CU_SHAPE = "cu_seqlens_q: expected shape (N + 1,) for N sequences, got "
ROTARY = "rotary_cos: expected shape (positions, R / 2) with R from 2 to k_pages' head dimension "
CACHE_DTYPE = "bfloat16, int8, float8_e4m3fn, got "
LIST = "expected a list or tuple of integers, one or more, got "
INTEGER = "expected an integer from 1 to 2147483647, got "
SEE = "see docs/coming-from.md"
WIDTH = "width) and a width from 1 on, got "

FLASH = {"q": bf16(2, 5, 4, 32), "k": bf16(2, 7, 2, 32), "v": bf16(2, 7, 2, 48)}
SPARSE = {"q": f32(1, 150, 2, 16), "k": f32(1, 200, 1, 16), "v": f32(1, 200, 1, 16)}
LISTS = {
    "kv_counts": i32(1, 2, 3), "kv_tiles": i32(1, 2, 3, 4), "q_counts": i32(1, 2, 4),
    "q_tiles": i32(1, 2, 4, 3),
}  # fmt: skip
DILATED = {
    "q": f32(2, 48, 6, 16), "k": f32(2, 48, 3, 16), "v": f32(2, 48, 3, 24),
    "segment_lengths": [12, 24], "dilation_rates": [1, 2],
}  # fmt: skip
CACHE = {
    "k_pages": bf16(9, 8, 2, 32), "v_pages": bf16(9, 8, 2, 48), "block_tables": i32(2, 4),
    "seq_lens": i32(2),
}  # fmt: skip
INT8 = {"k_pages": i8(9, 8, 2, 32), "v_pages": i8(9, 8, 2, 48), "k_scale": f32(), "v_scale": f32(2)}
DECODE = {"q": bf16(2, 3, 4, 32), **CACHE}
PAGED = {"q": bf16(7, 4, 32), **CACHE, "cu_seqlens_q": i32(3)}
APPEND = {"k_new": bf16(2, 3, 2, 32), "v_new": bf16(2, 3, 2, 48), **CACHE}
PACKED = {
    **APPEND, "k_new": bf16(17, 2, 32), "v_new": bf16(17, 2, 48), "cu_seqlens_q": i32(3),
    "q": bf16(17, 4, 32), "rotary_cos": f32(50, 12), "rotary_sin": f32(50, 12),
}  # fmt: skip
MERGE = {"outs": bf16(5, 2, 3, 4, 48), "lses": f32(5, 2, 4, 3)}

Q_IDS, KV_IDS = {"q_segment_ids": i32(2, 5)}, {"kv_segment_ids": i32(2, 7)}
ENDS, Q_DEPTHS, KV_DEPTHS = i32(2, 7), i32(2, 5), i32(2, 7)
SEED = {"dropout_seed": i32(2), "dropout_rate": 0.1}
# fmt: off
OF_FLASH = [
    mistake(ValueError, "q: expected 4 dimensions [B, Sq, Hq, D], got shape (5, 4, 32)",
            q=bf16(5, 4, 32)),
    mistake(ValueError, "k: expected 4 dimensions [B, Skv, Hkv, D], got shape (7, 2, 32)",
            k=bf16(7, 2, 32)),
    mistake(ValueError, "v: expected 4 dimensions [B, Skv, Hkv, Dv], got shape (1, 2, 7, 2, 48)",
            v=bf16(1, 2, 7, 2, 48)),
    mistake(ValueError, "k: expected q's batch size 2, got 1", k=bf16(1, 7, 2, 32)),
    mistake(ValueError, "v: expected q's batch size 2, got 3", v=bf16(3, 7, 2, 48)),
    mistake(ValueError, "v: expected k's length 7, got 8", v=bf16(2, 8, 2, 48)),
    mistake(ValueError, "v: expected k's 2 heads, got 1", v=bf16(2, 7, 1, 48)),
    mistake(ValueError, "k: expected q's head dimension 32, got 64", k=bf16(2, 7, 2, 64)),
    mistake(ValueError, "q: expected a number of heads divisible by k's 2, got 3",
            q=bf16(2, 5, 3, 32)),
    mistake(ValueError, "q: expected a number of heads divisible by k's 0, got 4",
            k=bf16(2, 7, 0, 32), v=bf16(2, 7, 0, 48)),
    mistake(NotImplementedError, f"q: {SIZE}8", q=bf16(2, 5, 4, 8), k=bf16(2, 7, 2, 8)),
    mistake(NotImplementedError, f"q: {SIZE}520", q=bf16(2, 5, 4, 520), k=bf16(2, 7, 2, 520)),
    mistake(NotImplementedError, f"v: {SIZE}20", v=bf16(2, 7, 2, 20)),
    mistake(TypeError, "k: expected q's dtype bfloat16, got float16", k=f16(2, 7, 2, 32)),
    mistake(TypeError, "v: expected q's dtype bfloat16, got float32", v=f32(2, 7, 2, 48)),
    mistake(TypeError, "q: expected a floating-point dtype, got int32",
            q=i32(2, 5, 4, 32), k=i32(2, 7, 2, 32), v=i32(2, 7, 2, 48)),
    mistake(NotImplementedError, "q: expected dtype float16, bfloat16, float32, got float64",
            q=f64(2, 5, 4, 32), k=f64(2, 7, 2, 32), v=f64(2, 7, 2, 48)),
    mistake(NotImplementedError, "k: expected dtype float16, bfloat16, float32, got float8_e4m3fn",
            k=e4m3(2, 7, 2, 32)),
    mistake(ValueError, f"{TABLE}, got (4, 6)", relative_bias=f32(4, 6)),
    mistake(ValueError, f"{TABLE}, got (2, 5)", relative_bias=f32(2, 5)),
    mistake(TypeError, "relative_bias: expected dtype float32 or q's bfloat16, got float16",
            relative_bias=f16(4, 5)),
    mistake(ValueError, f"{SLOPES}(1, 4)", alibi_slopes=f32(1, 4)),
    mistake(TypeError, "alibi_slopes: expected dtype float32, got float64", alibi_slopes=f64(4)),
    mistake(ValueError, f"{BIAS}(2, 4, 7, 5)", bias=f32(2, 4, 7, 5)),
    mistake(ValueError, f"{BIAS}(5, 7)", bias=f32(5, 7)),
    mistake(TypeError, "bias: expected dtype float32 or q's bfloat16, got float16",
            bias=f16(1, 1, 5, 7)),
    mistake(TypeError, "bias: expected dtype float32, got float16", q=f32(2, 5, 4, 32),
            k=f32(2, 7, 2, 32), v=f32(2, 7, 2, 48), bias=f16(1, 1, 5, 7)),
    mistake(TypeError, "bias: expected numbers to add to scores, such as where(mask, 0, -inf), or "
            "for padding q_segment_ids and kv_segment_ids instead, got bool",
            bias=boolean(1, 1, 5, 7)),
    mistake(TypeError, f"flash_attention() takes scale in place of softmax_scale; {SEE}",
            softmax_scale=0.5),
    mistake(TypeError, "flash_attention() takes dropout_rate and dropout_seed in place of "
            f"dropout_p; {SEE}", dropout_p=0.5),
    mistake(TypeError, f"flash_attention() takes no max_seqlen; {SEE}", max_seqlen=7),
    mistake(ValueError, "dropout_rate: expected a number from 0 on that is less than 1, got 1.0",
            dropout_seed=i32(2), dropout_rate=1.0),
    mistake(TypeError, "dropout_rate: expected a number from 0 on that is less than 1, got str",
            dropout_rate="0.1"),
    mistake(ValueError, "dropout_seed: expected a seed with dropout_rate, got None",
            dropout_rate=0.1),
    mistake(TypeError, "dropout_seed: expected dtype int32 or uint32, got float32",
            **SEED | {"dropout_seed": f32(2)}),
    mistake(ValueError, "dropout_seed: expected shape (2,) or (4,), got (1,)",
            **SEED | {"dropout_seed": i32(1)}),
    mistake(TypeError, "return_row_max: expected a bool, got int", return_row_max=1),
    mistake(TypeError, "batch_invariant: expected a bool, got int", batch_invariant=1),
    *(mistake(ValueError, f"{SOFTCAP}{x}", softcap=x) for x in (0.0, -5.0, INF, NAN, 1e60, 1e35)),
    mistake(TypeError, f"{SOFTCAP}str", softcap="30"),
    *(mistake(ValueError, f"{SCALE}{x}", scale=x) for x in (-INF, NAN, 1e300)),
    mistake(ValueError, f"{WINDOW}(-1, 0)", window_size=(-1, 0)),
    mistake(TypeError, f"{WINDOW}4", window_size=4),
    mistake(TypeError, f"{WINDOW}[4, 0]", window_size=[4, 0]),
    mistake(TypeError, f"{WINDOW}(1.5, 0)", window_size=(1.5, 0)),
    mistake(TypeError, "return_lse: expected a bool, got str", return_lse=""),
    mistake(TypeError, "causal: expected a bool, got numpy.bool", causal=np.True_),
    mistake(TypeError, "causal: expected a bool, got int", causal=1),
    mistake(TypeError, "deterministic: expected None or a bool, got int", deterministic=1),
    mistake(ValueError, f"{PRECISION}'bf16'", precision="bf16"),
    mistake(ValueError, f"{PRECISION}None", precision=None),
    mistake(ValueError, "sinks: expected shape (4,), one of each head, got (2,)", sinks=f32(2)),
    mistake(ValueError, "sinks: expected shape (4,), one of each head, got (2, 4)",
            sinks=f32(2, 4)),
    mistake(TypeError, "sinks: expected dtype float32, got float64", sinks=f64(4)),
    mistake(ValueError, "kv_segment_ids: expected ids of queries and of keys, or of neither, got "
            "None", **Q_IDS),
    mistake(ValueError, "q_segment_ids: expected ids of queries and of keys, or of neither, got "
            "None", **KV_IDS),
    mistake(ValueError, f"q_segment_ids: expected shape (2, 5), {ONE_EACH}(5,)",
            **KV_IDS, q_segment_ids=i32(5)),
    mistake(ValueError, f"kv_segment_ids: expected shape (2, 7), {ONE_EACH}(2, 5)",
            **Q_IDS, kv_segment_ids=i32(2, 5)),
    mistake(TypeError, "kv_segment_ids: expected dtype int32, got int64",
            **Q_IDS, kv_segment_ids=i64(2, 7)),
    mistake(ValueError, "q_depths: expected None without kv_ends, got shape (2, 5)",
            q_depths=Q_DEPTHS, kv_depths=KV_DEPTHS, causal=True),
    mistake(ValueError, f"kv_ends: expected shape (2, 7), {ONE_EACH}(2, 5)",
            kv_ends=i32(2, 5), causal=True),
    mistake(TypeError, "kv_ends: expected dtype int32, got int64", kv_ends=i64(2, 7), causal=True),
    mistake(ValueError, "causal: expected True with kv_ends, got False", kv_ends=ENDS),
    mistake(ValueError, "causal: expected True with kv_ends, got False",
            kv_ends=ENDS, window_size=(None, 3)),
    mistake(ValueError, "kv_depths: expected depths of queries and of keys, or of neither, got "
            "None", kv_ends=ENDS, q_depths=Q_DEPTHS, causal=True),
    mistake(ValueError, f"q_depths: expected shape (2, 5), {ONE_EACH}(2, 7)",
            kv_ends=ENDS, q_depths=i32(2, 7), kv_depths=KV_DEPTHS, causal=True),
    mistake(TypeError, "q_ranges: expected dtype int32, got int64", q_ranges=i64(2, 5, 1, 2)),
    mistake(ValueError, "q_ranges: expected shape (2, 5, 1, 2) or (2, 5, 2, 2), ranges of each "
            "query, got (2, 5, 3, 2)", q_ranges=i32(2, 5, 3, 2)),
]
OF_MASK = [
    mistake(TypeError, "block_mask: expected dtype bool, got int32", block_mask=i32(1, 2, 3, 4)),
    mistake(ValueError, "block_mask: expected 2 to 4 dimensions [B or 1, Hq or 1, tiles_q, "
            "tiles_kv], got shape (4,)", block_mask=boolean(4)),
    mistake(ValueError, "block_mask: expected 3 or 2 tiles for 150 queries, got 4",
            block_mask=boolean(4, 4)),
    mistake(ValueError, "block_mask: expected 4 or 2 tiles for 200 keys, got 3",
            block_mask=boolean(1, 3, 3)),
    mistake(ValueError, "block_mask: expected masks of 1 or 2 heads, got 3",
            block_mask=boolean(3, 3, 4)),
    mistake(ValueError, "block_mask: expected masks of 1 or 1 sequences, got 2",
            block_mask=boolean(2, 1, 3, 4)),
]
OF_LISTS = [
    mistake(TypeError, "kv_tiles: expected dtype int32, got float32", kv_tiles=f32(1, 2, 3, 4)),
    mistake(ValueError, "q_counts: expected 3 dimensions [B or 1, Hq or 1, tiles], got shape (4,)",
            q_counts=i32(4)),
    mistake(ValueError, "q_counts: expected kv_counts' masks (1, 2), got (1, 1)",
            q_counts=i32(1, 1, 4), q_tiles=i32(1, 1, 4, 3)),
    mistake(ValueError, "q_counts: expected 4 or 2 tiles for 200 keys, got 3",
            q_counts=i32(1, 2, 3), q_tiles=i32(1, 2, 3, 3)),
    mistake(ValueError, f"kv_tiles: expected shape (1, 2, 3, {WIDTH}(1, 2, 2, 4)",
            kv_tiles=i32(1, 2, 2, 4)),
    mistake(ValueError, f"q_tiles: expected shape (1, 2, 4, {WIDTH}(1, 2, 4, 0)",
            q_tiles=i32(1, 2, 4, 0)),
]
OF_DILATED = [
    mistake(ValueError, f"segment_lengths: {LIST}[]", segment_lengths=[]),
    mistake(ValueError, f"dilation_rates: {LIST}()", dilation_rates=()),
    mistake(TypeError, f"segment_lengths: {LIST}24", segment_lengths=24),
    mistake(TypeError, f"dilation_rates: {LIST}'12'", dilation_rates="12"),
    mistake(ValueError, "dilation_rates: expected segment_lengths' 2 numbers, got 1",
            dilation_rates=[1]),
    mistake(TypeError, f"segment_lengths[1]: {INTEGER}24.0", segment_lengths=[12, 24.0]),
    mistake(TypeError, f"dilation_rates[0]: {INTEGER}True", dilation_rates=[True, 2]),
    mistake(ValueError, f"dilation_rates[1]: {INTEGER}0", dilation_rates=[1, 0]),
    mistake(ValueError, f"segment_lengths[0]: {INTEGER}-12", segment_lengths=[-12, 24]),
    mistake(ValueError, "segment_lengths[1]: expected a multiple of its rate 5, got 24",
            dilation_rates=[1, 5]),
    mistake(ValueError, "segment_lengths[1]: expected a divisor of q's length 48, got 32",
            segment_lengths=[12, 32]),
    mistake(ValueError, "k: expected q's length 48, got 24",
            k=f32(2, 24, 3, 16), v=f32(2, 24, 3, 24)),
    mistake(ValueError, "q: expected 4 dimensions [B, S, Hq, D], got shape (48, 6, 16)",
            q=f32(48, 6, 16)),
    mistake(ValueError, "q: expected a number of heads divisible by k's 3, got 4",
            q=f32(2, 48, 4, 16)),
    mistake(TypeError, "causal: expected a bool, got int", causal=1),
]
OF_DECODE = [
    mistake(NotImplementedError, "causal: expected True: new tokens see keys up to their own "
            "position, got False", causal=False),
    mistake(TypeError, f"paged_decode() takes no attn_mask; {SEE}", attn_mask=None),
    mistake(NotImplementedError, "bias: expected no such argument of paged_decode "
            "(docs/non-goals.md), got one", bias=f32(4, 4, 1, 7)),
    mistake(TypeError, f"k_pages: expected q's {CACHE_DTYPE}float16", k_pages=f16(9, 8, 2, 32)),
    mistake(NotImplementedError, "q: expected dtype float16, bfloat16, got float32",
            q=f32(2, 3, 4, 32)),
    mistake(ValueError, "q: expected k_pages' head dimension 32, got 40",
            q=bf16(2, 3, 4, 40)),
    mistake(ValueError, "q: expected a number of heads divisible by k_pages' 2, got 3",
            q=bf16(2, 3, 3, 32)),
    mistake(ValueError, "seq_lens: expected shape (2,), got (3,)", seq_lens=i32(3)),
    mistake(ValueError, "k_scale: expected a scale for a cache in int8, got None",
            **INT8 | {"k_scale": LEFT_OUT}),
    mistake(ValueError, "sinks: expected shape (4,), one of each head, got (2,)", sinks=f32(2)),
    mistake(ValueError, f"{SLOPES}(3,)", alibi_slopes=f32(3)),
    mistake(NotImplementedError, "alibi_slopes: expected None with tree_ends, got shape (4,)",
            tree_ends=i32(2, 3), alibi_slopes=f32(4)),
    mistake(ValueError, "value_dim: expected None beside v_pages, got 16", value_dim=16),
    mistake(ValueError, "v_pages: expected a pool [P, page_size, Hkv, Dv], or None with "
            "value_dim, got None", v_pages=None),
    mistake(ValueError, "value_dim: expected at most k_pages' head dimension 32, got 40",
            v_pages=None, value_dim=40),
    mistake(NotImplementedError, f"value_dim: {SIZE}20", v_pages=None, value_dim=20),
    mistake(NotImplementedError, f"k_pages: {SIZE}520", k_pages=bf16(9, 8, 2, 520)),
    mistake(NotImplementedError, f"k_pages: {SIZE.replace('512', '576')}584", v_pages=None,
            value_dim=512, k_pages=bf16(9, 8, 2, 584)),
    mistake(TypeError, "value_dim: expected None or an integer from 1 to 576, got 16.0",
            v_pages=None, value_dim=16.0),
    mistake(ValueError, "v_scale: expected None without v_pages, got shape (2,)",
            **INT8 | {"v_pages": None}, value_dim=16),
    mistake(ValueError, f"{SPLITS}0", num_splits=0),
    mistake(TypeError, f"{WINDOW}4", window_size=4),
    mistake(ValueError, "q: expected 3 or 4 dimensions [B, Hq, D] or [B, T, Hq, D], got shape (4, "
            "32)", q=bf16(4, 32)),
    mistake(ValueError, "k_pages: expected 4 dimensions [P, page_size, Hkv, D], got shape (72, 2, "
            "32)", k_pages=bf16(72, 2, 32)),
    mistake(ValueError, "v_pages: expected 4 dimensions [P, page_size, Hkv, Dv], got shape (1, 9, "
            "8, 2, 48)", v_pages=bf16(1, 9, 8, 2, 48)),
    mistake(TypeError, "q: expected a floating-point dtype, got int8", q=i8(2, 3, 4, 32)),
    mistake(TypeError, f"k_pages: expected q's {CACHE_DTYPE}float8_e5m2",
            k_pages=e5m2(9, 8, 2, 32)),
    mistake(TypeError, "v_pages: expected k_pages' dtype bfloat16, got int8",
            v_pages=i8(9, 8, 2, 48)),
    mistake(ValueError, "v_pages: expected k_pages' pages, page size and heads (9, 8, 2), got (9, "
            "4, 2)", v_pages=bf16(9, 4, 2, 48)),
    mistake(ValueError, "v_pages: expected k_pages' pages, page size and heads (9, 8, 2), got (8, "
            "8, 2)", v_pages=bf16(8, 8, 2, 48)),
    *(mistake(NotImplementedError, f"k_pages: expected a page size from 1 to 256, got {n}",
              k_pages=bf16(9, n, 2, 32), v_pages=bf16(9, n, 2, 48)) for n in (257, 0)),
    mistake(NotImplementedError, f"v_pages: {SIZE}20", v_pages=bf16(9, 8, 2, 20)),
    mistake(NotImplementedError, "q: expected at most 64 new tokens, got 65",
            q=bf16(2, 65, 4, 32)),
    mistake(TypeError, "tree_ends: expected dtype int32, got int64", tree_ends=i64(2, 3)),
    mistake(ValueError, "tree_ends: expected shape (2, 3), one of each new token, got (3,)",
            tree_ends=i32(3)),
    mistake(ValueError, "tree_ends: expected shape (2, 1), one of each new token, got (2,)",
            q=bf16(2, 4, 32), tree_ends=i32(2)),
    mistake(NotImplementedError, "window_size: expected no window to the left with tree_ends, got "
            "5", tree_ends=i32(2, 3), window_size=(5, 0)),
    mistake(TypeError, "block_tables: expected dtype int32, got int64", block_tables=i64(2, 4)),
    mistake(ValueError, "block_tables: expected shape (2, max_pages), got (3, 4)",
            block_tables=i32(3, 4)),
    mistake(ValueError, "seq_lens: expected shape (2,), got (2, 1)", seq_lens=i32(2, 1)),
    mistake(ValueError, "k_scale: expected None for a cache in bfloat16, got shape (2,)",
            k_scale=f32(2)),
    mistake(ValueError, "v_scale: expected a scale for a cache in int8, got None",
            **INT8 | {"v_scale": LEFT_OUT}),
    mistake(TypeError, "k_scale: expected dtype float32, got bfloat16",
            **INT8 | {"k_scale": bf16(2)}),
    mistake(ValueError, f"k_scale: {HEAD_SCALE}(4,)", **INT8 | {"k_scale": f32(4)}),
    mistake(TypeError, "sinks: expected dtype float32, got float64", sinks=f64(4)),
    mistake(ValueError, f"{SPLITS}257", num_splits=257),
    mistake(TypeError, "return_lse: expected a bool, got int", return_lse=1),
    mistake(TypeError, "cascade: expected a bool, got int", cascade=1),
    mistake(TypeError, "batch_invariant: expected a bool, got int", batch_invariant=1),
    mistake(ValueError, f"{CASCADE}, got True", cascade=True, num_splits=2),
    mistake(ValueError, f"{SOFTCAP}0.0", softcap=0.0),
    mistake(ValueError, f"{SCALE}nan", scale=NAN),
]
OF_PAGED = [
    mistake(NotImplementedError, "causal: expected True: new tokens see keys up to their own "
            "position, got False", causal=False),
    # Shared checks, of which OF_DECODE has all.
    mistake(TypeError, f"k_pages: expected q's {CACHE_DTYPE}float16", k_pages=f16(9, 8, 2, 32)),
    mistake(ValueError, "q: expected k_pages' head dimension 32, got 40", q=bf16(7, 4, 40)),
    mistake(ValueError, f"{SLOPES}(3,)", alibi_slopes=f32(3)),
    mistake(ValueError, "value_dim: expected None beside v_pages, got 16", value_dim=16),
    mistake(ValueError, "tree_ends: expected shape (7,), one of each new token, got (2, 3)",
            tree_ends=i32(2, 3)),
    mistake(NotImplementedError, "window_size: expected no window to the left with tree_ends, got "
            "0", tree_ends=i32(7), window_size=(0, None)),
    mistake(ValueError, "q_ranges: expected shape (7, 1, 2) or (7, 2, 2), ranges of each query, "
            "got (8, 1, 2)", q_ranges=i32(8, 1, 2)),
    mistake(ValueError, "q: expected 3 dimensions [Tq, Hq, D], got shape (1, 7, 4, 32)",
            q=bf16(1, 7, 4, 32)),
    *(mistake(ValueError, f"{CU_SHAPE}{x}", cu_seqlens_q=i32(*x)) for x in ((1, 3), (0,))),
    mistake(TypeError, "cu_seqlens_q: expected dtype int32, got int64", cu_seqlens_q=i64(3)),
    mistake(ValueError, "block_tables: expected shape (3, max_pages), got (2, 4)",
            cu_seqlens_q=i32(4)),
]
OF_APPEND = [
    mistake(ValueError, "k_new: expected 3 or 4 dimensions [B, Hkv, D] or [B, T, Hkv, D], got "
            "shape (2, 32)", k_new=bf16(2, 32)),
    mistake(ValueError, "k_new: expected shape (2, 3, 2, 32), got (2, 3, 4, 32)",
            k_new=bf16(2, 3, 4, 32)),
    mistake(ValueError, "v_new: expected shape (2, 3, 2, 48), got (2, 4, 2, 48)",
            v_new=bf16(2, 4, 2, 48)),
    mistake(ValueError, "v_new: expected None without v_pages, got shape (2, 3, 2, 48)",
            v_pages=None),
    mistake(ValueError, "v_new: expected new values for v_pages, got None", v_new=None),
    mistake(TypeError, "v_new: expected k_new's dtype bfloat16, got float16",
            v_new=f16(2, 3, 2, 48)),
    mistake(TypeError, f"k_pages: expected k_new's {CACHE_DTYPE}float16", k_pages=f16(9, 8, 2, 32)),
    mistake(NotImplementedError, "k_new: expected at most 64 new tokens, got 65",
            k_new=bf16(2, 65, 2, 32), v_new=bf16(2, 65, 2, 48)),
    mistake(ValueError, "k_scale: expected None for a cache in bfloat16, got shape ()",
            k_scale=f32()),
]
OF_PACKED = [
    mistake(ValueError, "k_new: expected 3 dimensions [Tq, Hkv, D] with cu_seqlens_q, got shape "
            "(2, 3, 2, 32)", k_new=bf16(2, 3, 2, 32)),
    mistake(ValueError, "v_new: expected shape (17, 2, 48), got (16, 2, 48)",
            v_new=bf16(16, 2, 48)),
    mistake(ValueError, f"{CU_SHAPE}(0,)", cu_seqlens_q=i32(0)),
    mistake(TypeError, "cu_seqlens_q: expected dtype int32, got int64", cu_seqlens_q=i64(3)),
    mistake(ValueError, "block_tables: expected shape (3, max_pages), got (2, 4)",
            cu_seqlens_q=i32(4)),
    mistake(ValueError, "q: expected None without rotary_cos and rotary_sin, got shape (17, 4, 32)",
            rotary_cos=LEFT_OUT, rotary_sin=LEFT_OUT),
    mistake(ValueError, "rotary_sin: expected both rotary_cos and rotary_sin, or neither, got None",
            rotary_sin=LEFT_OUT),
    mistake(ValueError, "rotary_cos: expected both rotary_cos and rotary_sin, or neither, got None",
            rotary_cos=LEFT_OUT, q=LEFT_OUT),
    mistake(TypeError, "rotary_cos: expected dtype float32 or k_new's bfloat16, got float16",
            rotary_cos=f16(50, 12)),
    mistake(TypeError, "rotary_sin: expected rotary_cos' dtype float32, got bfloat16",
            rotary_sin=bf16(50, 12)),
    *(mistake(ValueError, f"{ROTARY}32, got {x}", rotary_cos=f32(*x))
      for x in ((50, 17), (50, 0), (0, 12), (50,))),
    mistake(ValueError, "rotary_sin: expected rotary_cos' shape (50, 12), got (49, 12)",
            rotary_sin=f32(49, 12)),
    *(mistake(ValueError, f"q: expected shape (17, Hq, 32), got {x}", q=bf16(*x))
      for x in ((16, 4, 32), (17, 4, 40), (1, 17, 4, 32))),
    mistake(ValueError, "q: expected a number of heads divisible by k_pages' 2, got 3",
            q=bf16(17, 3, 32)),
    mistake(TypeError, "q: expected k_new's dtype bfloat16, got float16", q=f16(17, 4, 32)),
    mistake(TypeError, "rotary_interleaved: expected a bool, got int", rotary_interleaved=1),
]
OF_MERGE = [
    mistake(ValueError, "outs: expected 4 or 5 dimensions [N, B, H, Dv] or [N, B, S, H, Dv], got "
            "shape (2, 4, 48)", outs=bf16(2, 4, 48)),
    mistake(TypeError, "outs: expected a floating-point dtype, got int32",
            outs=i32(5, 2, 3, 4, 48)),
    mistake(NotImplementedError, f"outs: {SIZE}12", outs=bf16(5, 2, 3, 4, 12)),
    mistake(TypeError, "lses: expected dtype float32, got bfloat16", lses=bf16(5, 2, 4, 3)),
    mistake(ValueError, "lses: expected shape (5, 2, 4, 3), got (5, 2, 3, 4)",
            lses=f32(5, 2, 3, 4)),
    mistake(ValueError, "lses: expected shape (5, 2, 4, 3), got (5, 2, 4)", lses=f32(5, 2, 4)),
]
# fmt: on
FUNCTIONS = {
    "flash_attention": FLASH,
    "block_sparse_attention": {**SPARSE, "block_mask": boolean(3, 4)},
    "dilated_attention": DILATED,
    "paged_decode": DECODE,
    "paged_attention": PAGED,
    "append_kv": PACKED,
    "merge_states": MERGE,
}  # fmt: skip
MISTAKES = [
    pytest.param(name, good, x, id=f"{name}-{x.message}")
    for name, good, mistakes in (
        ("flash_attention", FLASH, OF_FLASH), ("block_sparse_attention", SPARSE, OF_MASK),
        ("block_sparse_attention", SPARSE | LISTS, OF_LISTS),
        ("dilated_attention", DILATED, OF_DILATED), ("paged_decode", DECODE, OF_DECODE),
        ("paged_attention", PAGED, OF_PAGED), ("append_kv", APPEND, OF_APPEND),
        ("append_kv", PACKED, OF_PACKED), ("merge_states", MERGE, OF_MERGE),
    )
    for x in mistakes
]  # fmt: skip


def made(side, described):
    found = {
        name: side.zeros(*x) if isinstance(x, Operand) else x
        for name, x in described.items()
        if x is not LEFT_OUT
    }
    if "kv_counts" in found:
        found["block_mask"] = BlockMask(*(found.pop(name) for name in BlockMask._fields))
    return found


def torch_operands(described, device):
    return {
        name: torch.zeros(x.shape, dtype=getattr(torch, x.dtype), device=device)
        for name, x in described.items()
    }


@pytest.mark.parametrize(("name", "good", "mistake"), MISTAKES)
def test_one_mistake_one_message(side, implementation, name, good, mistake):
    arguments = made(side, good | mistake.changes)
    function = getattr(side.api, name)
    calls = [function, partial(side.trace, function), partial(side.api.explain, function)]
    for call in calls[:: 2 if name == "block_sparse_attention" else 1]:  # lists are not traced
        with refused(mistake.error, mistake.message):
            call(**arguments, implementation=implementation)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_tensor(side, name):
    arguments = made(side, FUNCTIONS[name])
    for operand, x in FUNCTIONS[name].items():
        if isinstance(x, Operand):
            for wrong, got in (([1.0], "list"), (np.zeros(x.shape), "numpy.ndarray")):
                with refused(TypeError, f"{operand}: expected {side.tensor}, got {got}"):
                    getattr(side.api, name)(**arguments | {operand: wrong})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unknown_implementation(side, name):
    message = r"^implementation: expected None or one of '.*', got 'cudnn'"
    with pytest.raises(ValueError, match=message):
        getattr(side.api, name)(**made(side, FUNCTIONS[name]), implementation="cudnn")


WITH_ROWS = ("flash_attention", "paged_decode", "paged_attention", "append_kv", "merge_states")


@pytest.mark.parametrize(
    ("name", "operand"), [(name, x) for name in WITH_ROWS for x in FUNCTIONS[name] if x != "lses"]
)
def test_a_last_dimension_that_is_not_contiguous(implementation, torch_device, name, operand):
    """In torch only: JAX arrays have no strides."""
    operands = torch_operands(FUNCTIONS[name], torch_device)
    operands[operand] = operands[operand].repeat_interleave(2, dim=-1)[..., ::2]
    message = f"{operand}: expected a contiguous last dimension, got a stride other than 1"
    with refused(ValueError, message):
        getattr(torch_attn, name)(**operands, implementation=implementation)


@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
@pytest.mark.parametrize("odd", ["offset", "stride"])
def test_rows_of_an_8_bit_cache_at_odd_offsets(implementation, torch_device, name, odd):
    """In torch only: JAX arrays have no strides."""
    operands = torch_operands(DECODE | INT8, torch_device)
    pool = operands[name]
    if odd == "offset":
        operands[name] = pool.new_zeros(pool.numel() + 1)[1:].view(pool.shape)
    else:
        operands[name] = pool.new_zeros(*pool.shape[:3], pool.shape[3] + 1)[..., :-1]
    message = f"{name}: expected rows at even offsets in an 8-bit cache, got an odd one"
    with refused(ValueError, message):
        torch_attn.paged_decode(**operands, implementation=implementation)


@pytest.mark.parametrize("name", ["flash_attention", "paged_decode"])
def test_a_cpu_tensor_with_a_gpu_one(side, implementation, torch_device, name):
    if torch_device == "cpu":
        pytest.skip("needs two devices: run on a machine with a GPU")
    good = FUNCTIONS[name] | {"sinks": f32(4)}
    for operand in good.keys() - {"q"}:
        operands = made(side, good)
        operands[operand] = side.on_cpu(operands[operand])
        with pytest.raises(ValueError, match=f"^{operand}: expected q's device cuda:0, got cpu"):
            getattr(side.api, name)(**operands, implementation=implementation)


@pytest.mark.parametrize("name", ["flash_attention", "paged_decode"])
def test_arguments_after_the_tensors_are_named(side, name):
    message = r"positional arguments \(q, .*\), got \d+; give others by name"
    with pytest.raises(TypeError, match=message):
        getattr(side.api, name)(*made(side, FUNCTIONS[name]).values(), 0.5)


@pytest.mark.parametrize(("name", "hint"), [("scal", ". Did you mean 'scale'?"), ("xyz", "")])
def test_a_name_that_no_library_has(side, name, hint):
    with refused(TypeError, f"flash_attention() got an unexpected keyword argument {name!r}{hint}"):
        side.api.flash_attention(**made(side, FLASH), **{name: 0.5})


@pytest.mark.parametrize("asked", [None, "reference", "triton"])
def test_explain_refuses_a_wrong_target(side, monkeypatch, asked):
    monkeypatch.setattr("twin_attention.targets.target._environment", "banana")
    message = "TWIN_ATTENTION_TARGET: expected None or one of 'sm80', 'sm90', got 'banana'"
    with refused(ValueError, message):
        side.api.explain(side.api.flash_attention, **made(side, FLASH), implementation=asked)
