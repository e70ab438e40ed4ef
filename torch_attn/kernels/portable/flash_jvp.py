"""Flash attention, forward mode: the tangents of out and lse, one pass over the keys.

A family's ``flash_jvp(tangents, operands, out, lse, rest, spec, backend)`` returns both. `tangents`
is a tuple as `operands` is, None where there is no tangent, and its products are left out. With p
recomputed from lse, ``ds = (scale · (dq kᵀ + q dkᵀ) + dbias) ∘ dcap``, where dcap is the softcap's
derivative, ``dlse = rowsum(p ∘ ds)``, ``dout = (p ∘ ds) v + p dv - dlse ∘ out``. A sink is a score
without a value: dlse has its ``p dsink`` too. With dropout, the p of dout are multiplied by the
weights of `kept_pairs`.

In a row that sees one key, dlse cancels ds, but not after rounding. So each row subtracts the same
number, its `center`, from every ds, and adds it to dlse.
"""

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.arguments import Tangents
from torch_attn.kernels.library.dropout import kept_pairs
from torch_attn.kernels.library.mask import mask_argument, mask_of_keys
from torch_attn.kernels.library.pairs.rows import load_own, own_queries
from torch_attn.kernels.library.pairs.scores import pair_scores, pair_tangents
from torch_attn.kernels.library.pairs.visits import first_key, load_keys, load_values, tiles_of_keys
from torch_attn.kernels.library.runs import count_runs, next_run
from torch_attn.kernels.library.schedule import order_argument
from torch_attn.kernels.library.scores import round_operand
from torch_attn.kernels.library.sequences import num_sequence_tiles
from torch_attn.kernels.library.softmax import LOG2E, load_forward_lse, probabilities
from torch_attn.kernels.library.terms import terms_argument, terms_of
from torch_attn.kernels.library.tiles import (
    head_base,
    load_tile,
    padded_head_dim,
    store_tile,
    strides_of,
)
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, flash_arguments, launch
from torch_attn.operands import with_rows
from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.schedule import programs_of_sm


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_jvp_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, lse_ptr, tangents, dout_ptr, dlse_ptr, dterms, terms,
    mask, strides, seq_q, seq_kv, diagonal, num_sequences, heads_q, together, rule, window_left,
    window_right, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of dout and dlse of one query head.

    Operands and grid: as in `flash_fwd_kernel`, whose results are out, with a stride, and lse;
    `Tangents`, and `dterms`, the `Terms` of the terms' tangents; dout [B, Sq, Hq, Dv] and dlse [B,
    Hq, Sq] float32, contiguous. Loop invariant: over the keys so far, acc is Σ p (ds - center) v +
    Σ p dv, dlse is Σ p (ds - center), and weight is Σ p. Accumulation: float32, exponents in base
    2, factors of v and dv cast to v's dtype. A row that sees no key gives 0, and 0 or its sink's
    tangent.
    """
    # Locate the tile of queries.
    rows = own_queries(mask, seq_q, seq_kv, diagonal, num_sequences, heads_q, together, BLOCK_Q)
    head_kv = rows.head // GROUP_SIZE
    k_base = head_base(k_ptr, strides.k, rows.batch, head_kv, rows.first_other)
    v_base = head_base(v_ptr, strides.v, rows.batch, head_kv, rows.first_other)
    dk_base = _tangent_base(tangents.k, strides.dk, rows, head_kv)
    dv_base = _tangent_base(tangents.v, strides.dv, rows, head_kv)

    # Load the queries and their rows' data; they stay.
    q = load_own(q_ptr, strides.q, mask, rows, rule, HEAD_DIM)
    dq = None
    if tangents.q is not None:
        dq = load_own(tangents.q, strides.dq, mask, rows, rule, HEAD_DIM)
    row = (rows.batch * heads_q + rows.head) * seq_q
    exists = rows.rows < rows.end
    lse2, rest2 = load_forward_lse(lse_ptr, terms, row, rows.rows, exists)
    acc = tl.zeros([BLOCK_Q, padded_head_dim(HEAD_DIM_V)], tl.float32)
    dlse = tl.zeros([BLOCK_Q], tl.float32)
    weight, center = dlse, dlse

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    tiles = tiles_of_keys(mask, rows, window_left, window_right, BLOCK_KV)
    for masked in tl.static_range(2):
        end = 0
        for _run in tl.range(0, count_runs(mask, rows, tiles, BLOCK_KV, masked)):
            first, end = next_run(mask, rows, tiles, end, BLOCK_KV, masked)
            # Start at 0: from another number, Triton 3.9 does not always pipeline the loads.
            for step in tl.range(0, end - first):
                start_kv = first_key(mask, rows, tiles, first + step, BLOCK_KV, masked)
                # s = scale · q kᵀ
                k, keys = load_keys(
                    k_base, strides.k.row, mask, rows, start_kv, rule, BLOCK_KV, HEAD_DIM, masked
                )
                s, dcap = pair_scores(
                    q, k, mask, terms, rule, rows, keys, window_left, window_right, masked
                )
                # p = exp(s - lse)
                p = probabilities(s, lse2, rest2, terms, rule.exp2_scale)
                # ds = (scale · (dq kᵀ + q dkᵀ) + dbias) ∘ dcap
                dk = _load_tangent(
                    tangents.k, dk_base, strides.dk, mask, keys, rule, HEAD_DIM, masked
                )
                ds = pair_tangents(q, k, dq, dk, dterms, rule, rows, keys, masked) * dcap
                # dlse += Σ p ds, without the center
                ds, weight, center = _centered(p, ds, weight, center)
                dlse += tl.sum(p * ds, 1)
                # acc += (p ∘ ds) v + p dv
                p = p * kept_pairs(terms, rows, keys)
                v = load_values(v_base, strides.v.row, mask, keys, rule, HEAD_DIM_V, masked)
                dp = round_operand((p * ds).to(v.dtype), rule.precision)
                acc = tl.dot(dp, v, acc, input_precision=rule.precision)
                if tangents.v is not None:
                    dv = load_values(dv_base, strides.dv.row, mask, keys, rule, HEAD_DIM_V, masked)
                    p = round_operand(p.to(v.dtype), rule.precision)
                    acc = tl.dot(p, dv, acc, input_precision=rule.precision)

    # Add the sink, and store.
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + rows.head) + tl.zeros([BLOCK_Q, 1], tl.float32)
        dsink = 0.0
        if tangents.sinks is not None:
            dsink = tl.load(tangents.sinks + rows.head)
        p_sink = tl.sum(probabilities(sink, lse2, rest2, terms, LOG2E), 1)
        dlse += p_sink * (dsink - center)
    out_base = head_base(out_ptr, strides.out, rows.batch, rows.head)
    out = load_tile(out_base, rows.start, rows.end, strides.out.row, BLOCK_Q, HEAD_DIM_V, True)
    acc -= dlse[:, None] * out.to(tl.float32)
    dout_row = heads_q * HEAD_DIM_V
    dout_base = dout_ptr + rows.batch * rows.end * dout_row + rows.head * HEAD_DIM_V
    store_tile(dout_base, acc, rows.start, rows.end, dout_row, BLOCK_Q, HEAD_DIM_V)
    tl.store(dlse_ptr + row + rows.rows, dlse + center, mask=exists)


@triton.jit
def _centered(p, ds, weight, center):
    """Return ds without the center, which is the mean over the first tile with a visible key."""
    ds = tl.where(p == 0.0, 0.0, ds)  # what is added to a hidden pair may be NaN
    total = tl.sum(p, 1)
    mean = tl.sum(p * ds, 1) / tl.where(total == 0.0, 1.0, total)
    center = tl.where(weight == 0.0, mean, center)
    return ds - center[:, None], weight + total, center


@triton.jit
def _tangent_base(pointer, strides, rows, head):
    """Return where a head's tangents of the other axis begin; 0 without a tangent."""
    base = 0
    if pointer is not None:
        base = head_base(pointer, strides, rows.batch, head, rows.first_other)
    return base


@triton.jit
def _load_tangent(
    pointer, base, strides, mask, others, rule, SIZE: tl.constexpr, MASKED: tl.constexpr
):
    x = None
    if pointer is not None:
        x = load_values(base, strides.row, mask, others, rule, SIZE, MASKED)
    return x


def flash_jvp(
    tangents: FlashOperands[Tensor | None] | VarlenOperands[Tensor | None],
    operands: FlashOperands[Tensor] | VarlenOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Launch `flash_jvp_kernel`.

    `out`, `lse` and `rest` are the forward's. Return dout [B, Sq, Hq, Dv] in q's dtype and dlse [B,
    Hq, Sq] float32, contiguous. Packed sequences have no batch axis.
    """
    tangents = tangents._make(None if x is None else with_rows(x) for x in tangents)
    dout, dlse = out.new_empty(out.shape), lse.new_empty(lse.shape)
    tensors = (
        *operands[:3], operands.sinks, out, lse, Tangents(*tangents[:3], tangents.sinks), dout,
        dlse, terms_of(tangents, spec), terms_of(operands, spec)._replace(rest2=rest),
        mask_of_keys(operands, spec),
    )  # fmt: skip
    launch("flash_jvp", flash_jvp_kernel, _prepare, tensors, spec, backend)
    return dout, dlse


def _prepare(call: KernelCall) -> Prepared:
    spec = call.spec
    q, k, v, _, out, _, tangents, *_ = call.layouts
    tiles = num_sequence_tiles(spec, spec.seq_q, call.config.block_q)
    programs = programs_of_sm(call.config.block_q, spec.head_dim_v)
    of_tangents = {f"d{name}": x for name, x in zip("qkv", tangents, strict=False) if x is not None}
    arguments = flash_arguments(spec) | {
        "strides": strides_of(q=q, k=k, v=v, out=out, **of_tangents)
    }
    dterms = terms_argument(call._replace(layouts=call.layouts[:-1]))["terms"]
    arguments |= terms_argument(call) | {"dterms": dterms} | mask_argument(call, of_keys=True)
    arguments |= order_argument(call, tiles, programs)
    return (tiles * spec.heads_q * spec.batch,), arguments
