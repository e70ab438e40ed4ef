from __future__ import annotations

from twin_attention.contract.operands import FlashOperands, PagedOperands, VarlenOperands
from twin_attention.contract.spec import RANGES_MAX, AttentionSpec, FlashOptions, VarlenSpec
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.offsets import check_offset_operands
from twin_attention.contract.validate.operands import (
    Operand,
    check_device,
    check_dtype,
    check_qkv,
    check_rows,
    check_sinks,
    check_slopes,
)


def check_flash_attention(operands: FlashOperands[Operand], options: FlashOptions) -> AttentionSpec:
    check_qkv(operands, ("[B, Sq, Hq, D]", "[B, Skv, Hkv, D]", "[B, Skv, Hkv, Dv]"))
    check_sinks(operands)
    _check_segment_ids(operands)
    _check_tree(operands, options)
    check_ranges_of(operands)
    _check_terms(operands, operands.q.shape[0])
    _check_bias(operands)
    _check_dropout(operands, options)
    return AttentionSpec.of(operands, operands.q.dtype, options)


def check_flash_attention_varlen(
    operands: VarlenOperands[Operand], options: FlashOptions
) -> VarlenSpec:
    check_qkv(operands, ("[Tq, Hq, D]", "[Tkv, Hkv, D]", "[Tkv, Hkv, Dv]"))
    check_offset_operands(operands.cu_seqlens_q, operands.cu_seqlens_kv)
    for x in (operands.cu_seqlens_q, operands.cu_seqlens_kv):
        check_device(x, operands.q)
    check_sinks(operands)
    _check_tree(operands, options)
    check_ranges_of(operands)
    _check_terms(operands, operands.cu_seqlens_q.shape[0] - 1)
    _check_dropout(operands, options)
    return VarlenSpec.of(operands, operands.q.dtype, options)


def check_broadcast(name: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Refuse a shape that does not broadcast to `whole`, [B, Hq, Sq, Skv]."""
    sizes = zip(shape, whole, strict=False)
    if len(shape) != 4 or any(n not in (1, size) for n, size in sizes):
        fail(ValueError, name, f"shape {whole}, or 1 in place of any of these", shape)


def check_ranges_of(
    operands: FlashOperands[Operand] | VarlenOperands[Operand] | PagedOperands[Operand],
) -> None:
    q, x = operands.q, operands.q_ranges
    if x is None:
        return
    check_dtype(x, "int32")
    rows = q.shape[:-2]
    if x.shape not in [(*rows, number, 2) for number in range(1, RANGES_MAX + 1)]:
        expected = f"shape {(*rows, 1, 2)} or {(*rows, RANGES_MAX, 2)}, ranges of each query"
        fail(ValueError, x.name, expected, x.shape)
    check_device(x, q)
    check_rows(x)


def check_saved(dout: Operand, q: Operand, out: Operand, lse: Operand) -> None:
    """Refuse saved tensors that come back to a backward changed in more than their layout.

    dout has the dtype, shape and device of the forward's out; q already agrees with the other
    operands.
    """
    for x in (q, out):
        check_dtype(x, dout.dtype, "the saved ")
    check_dtype(lse, "float32", "the saved ")
    for x in (q, out, lse):
        check_device(x, dout)
    *batch, rows, heads, _ = dout.shape
    for x, shape in ((out, dout.shape), (lse, (*batch, heads, rows))):
        if x.shape != shape:
            fail(ValueError, x.name, f"the saved shape {list(shape)}", list(x.shape))


def _check_segment_ids(operands: FlashOperands[Operand]) -> None:
    q_ids, kv_ids = operands.q_segment_ids, operands.kv_segment_ids
    if q_ids is None and kv_ids is None:
        return
    for name, x in (("q_segment_ids", q_ids), ("kv_segment_ids", kv_ids)):
        if x is None:
            fail(ValueError, name, "ids of queries and of keys, or of neither", None)
    assert q_ids is not None
    assert kv_ids is not None
    for x, of in ((q_ids, operands.q), (kv_ids, operands.k)):
        _check_of_tokens(x, of, operands.q)


def _check_tree(
    operands: FlashOperands[Operand] | VarlenOperands[Operand], options: FlashOptions
) -> None:
    q, k, ends = operands.q, operands.k, operands.kv_ends
    depths = (("q_depths", operands.q_depths, q), ("kv_depths", operands.kv_depths, k))
    if ends is None:
        for name, x, _ in depths:
            if x is not None:
                fail(ValueError, name, "None without kv_ends", f"shape {x.shape}")
        return
    _check_of_tokens(ends, k, q)
    if options.window_right != 0:
        fail(ValueError, "causal", "True with kv_ends", False)
    if operands.q_depths is None and operands.kv_depths is None:
        return
    for name, x, of in depths:
        if x is None:
            fail(ValueError, name, "depths of queries and of keys, or of neither", None)
        _check_of_tokens(x, of, q)


def _check_terms(operands: FlashOperands[Operand] | VarlenOperands[Operand], batch: int) -> None:
    q, table = operands.q, operands.relative_bias
    heads = q.shape[-2]
    if table is not None:
        _check_term_dtype(table, q)
        if len(table.shape) != 2 or table.shape[0] != heads or table.shape[1] % 2 == 0:
            expected = f"shape ({heads}, 2R + 1), of each head a value for each distance -R to R"
            fail(ValueError, table.name, expected, table.shape)
        check_device(table, q)
        check_rows(table)
    check_slopes(operands, batch)


def _check_bias(operands: FlashOperands[Operand]) -> None:
    q, k, bias = operands.q, operands.k, operands.bias
    if bias is None:
        return
    if bias.dtype == "bool":
        expected = "numbers to add to scores, such as where(mask, 0, -inf), or for padding "
        fail(TypeError, "bias", f"{expected}q_segment_ids and kv_segment_ids instead", "bool")
    _check_term_dtype(bias, q)
    check_broadcast("bias", bias.shape, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    check_device(bias, q)
    check_rows(bias)


def _check_term_dtype(x: Operand, q: Operand) -> None:
    if x.dtype not in ("float32", q.dtype):
        others = "" if q.dtype == "float32" else f" or q's {q.dtype}"
        fail(TypeError, x.name, f"dtype float32{others}", x.dtype)


def _check_dropout(
    operands: FlashOperands[Operand] | VarlenOperands[Operand], options: FlashOptions
) -> None:
    q, seed = operands.q, operands.dropout_seed
    if seed is None:
        if options.dropout_rate:
            fail(ValueError, "dropout_seed", "a seed with dropout_rate", None)
        return
    if seed.dtype not in ("int32", "uint32"):
        fail(TypeError, "dropout_seed", "dtype int32 or uint32", seed.dtype)
    if seed.shape not in ((2,), (4,)):
        fail(ValueError, "dropout_seed", "shape (2,) or (4,)", seed.shape)
    check_device(seed, q)
    check_rows(seed)


def _check_of_tokens(x: Operand, of: Operand, q: Operand) -> None:
    check_dtype(x, "int32")
    if x.shape != of.shape[:-2]:
        fail(ValueError, x.name, f"shape {of.shape[:-2]}, one of each token", x.shape)
    check_device(x, q)
    check_rows(x)
