"""Prepare the rows of a backward, before a family's own kernels."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.scores import as_multiplied
from torch_attn.kernels.library.segments import STAYS, load_segments
from torch_attn.kernels.library.sequences import count_sequence_tiles, locate_tile, num_padded_rows
from torch_attn.kernels.library.softmax import LOG2E
from torch_attn.kernels.library.tiles import ROW_PADDING, head_base, load_tile, strides_of
from torch_attn.launch import KernelCall, Prepared, launch, num_sequences
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend


class Statistics(NamedTuple):
    """Rows' values, as `flash_bwd_preprocess_kernel` takes and computes them."""

    lse: Any
    dlse: Any
    lse2: Any
    delta: Any
    rest: Any = None
    rest2: Any = None


@triton.jit(do_not_specialize=["seq_q", "num_sequences"])
def flash_bwd_preprocess_kernel(
    dout_ptr, out_ptr, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, rest_ptr, rest2_ptr,
    cu_seqlens_q_ptr, q_segment_ids_ptr, strides, seq_q, num_sequences, heads_q,
    HEAD_DIM_V: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Prepare the rows for the other kernels; one program takes BLOCK_Q rows of a head.

    ``delta = rowsum(dout ∘ out) - dlse``, and lse2 is lse in base 2, or +inf where a row saw no key
    or does not exist, so that ``exp2(s - lse2)`` is 0 there. Where terms were added, lse2 is lse
    itself, and rest2 is rest (`softmax.rest_of_lse`) in base 2. dlse counts as 0 in a row that saw
    no key. dout is rounded as products take it, so that ds cancels in a row that sees one key.

    Operands: dout and out [B, Sq, Hq, Dv] with the given strides; lse, dlse (or None) and rest [B,
    Hq, Sq], lse2, delta and rest2 [B, Hq, Sq rounded up to ROW_PADDING], float32 and contiguous.
    With packed sequences the latter have `count_sequence_tiles` of ROW_PADDING rows. dout counts as
    0 in padding, also of q_segment_ids [B, Sq]. Grid: (query tiles, heads, batch) in one axis.
    """
    num_rows = count_sequence_tiles(seq_q, num_sequences, ROW_PADDING) * ROW_PADDING
    num_tiles = num_rows // BLOCK_Q
    start_q = tl.program_id(0) % num_tiles * BLOCK_Q
    head = tl.program_id(0) // num_tiles % heads_q
    batch = (tl.program_id(0) // num_tiles // heads_q).to(tl.int64)
    total_q, seq_dout = seq_q, seq_q
    if num_sequences is not None:
        # The other axis is the queries too, where the padding's sequence is empty.
        padded = start_q
        _sequence, _first_q, start_q, seq_q, first_dout, size_dout = locate_tile(
            cu_seqlens_q_ptr, cu_seqlens_q_ptr, padded // ROW_PADDING, seq_q, seq_q, num_sequences,
            ROW_PADDING,
        )  # fmt: skip
        start_q += padded % ROW_PADDING
        seq_dout = first_dout + size_dout
        lse2_ptr += padded - start_q
        delta_ptr += padded - start_q
        if rest_ptr is not None:
            rest2_ptr += padded - start_q
    dout_base = head_base(dout_ptr, strides.dout, batch, head)
    out_base = head_base(out_ptr, strides.out, batch, head)
    _segment_q, is_query = None, None
    if q_segment_ids_ptr is not None:
        q_segment_ids_ptr += batch * seq_q
        _segment_q, is_query = load_segments(q_segment_ids_ptr, start_q, seq_q, BLOCK_Q, STAYS)
    do = load_tile(
        dout_base, start_q, seq_dout, strides.dout.row, BLOCK_Q, HEAD_DIM_V, True, is_query
    )
    out = load_tile(out_base, start_q, seq_q, strides.out.row, BLOCK_Q, HEAD_DIM_V, True)
    do = as_multiplied(do, PRECISION)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    rows = start_q + tl.arange(0, BLOCK_Q)
    offset = (batch * heads_q + head) * total_q
    lse = tl.load(lse_ptr + offset + rows, mask=rows < seq_q, other=float("inf"))
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse)
    if rest_ptr is None:
        lse2 *= LOG2E
    if dlse_ptr is not None:
        has_key = (rows < seq_q) & (lse != float("-inf"))
        delta -= tl.load(dlse_ptr + offset + rows, mask=has_key, other=0.0)
    padded_offset = (batch * heads_q + head) * num_rows
    if rest_ptr is not None:
        rest = tl.load(rest_ptr + offset + rows, mask=rows < seq_q, other=0.0)
        tl.store(rest2_ptr + padded_offset + rows, rest * LOG2E)
    tl.store(lse2_ptr + padded_offset + rows, lse2)
    tl.store(delta_ptr + padded_offset + rows, delta)


def preprocess(
    dout: Tensor,
    out: Tensor,
    statistics: Statistics,
    spec: AttentionSpec,
    backend: Backend,
    offsets: Tensor | None,
    segment_ids: Tensor | None,
) -> None:
    launch(
        "flash_bwd_preprocess",
        flash_bwd_preprocess_kernel,
        _prepare_preprocess,
        (dout, out, *statistics, offsets, segment_ids),
        spec,
        backend,
    )


def _prepare_preprocess(call: KernelCall) -> Prepared:
    spec, (dout, out, *_) = call.spec, call.layouts
    arguments = {
        "strides": strides_of(dout=dout, out=out),
        "seq_q": spec.seq_q,
        "num_sequences": num_sequences(spec),
        "heads_q": spec.heads_q,
        "HEAD_DIM_V": spec.head_dim_v,
        "PRECISION": spec.precision,
    }
    tiles = num_padded_rows(spec) // call.config.block_q
    return (tiles * spec.heads_q * spec.batch,), arguments
