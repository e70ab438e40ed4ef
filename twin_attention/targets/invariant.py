"""`batch_invariant`: the order in which a row adds up its keys, and which kernels follow it.

Blocks of keys are counted from the sequence's key 0, and so are spans of `SPAN` keys. A span's
blocks are added from left to right, starting from nothing, and the spans' results likewise
(docs/semantics.md). Every configuration of the kernels has the same block for a head dimension.
"""

from __future__ import annotations

from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.kernels import Spec

SPAN = 2048
HEAD_DIM_MAX = 256
_MOST_OF_PARTS = 2**28  # numbers that all spans' results together may have


def is_asked_of(spec: Spec) -> bool:
    """Return True for a problem with `batch_invariant`."""
    return isinstance(spec, AttentionSpec | DecodeSpec) and spec.batch_invariant


def rounds_by_shape(operation: str, spec: Spec, target: str | None) -> str | None:
    """Return why other kernels than torch_attn's Triton ones leave a forward out, or None."""
    if not is_asked_of(spec) or operation == "flash_bwd":
        return None
    return "its rounding follows the shape, which batch_invariant excludes"


def lacks(operation: str, spec: Spec) -> str | None:
    """Return why the kernels do not cover a problem with `batch_invariant`, or None."""
    if not is_asked_of(spec) or operation == "flash_bwd":
        return None
    if isinstance(spec, AttentionSpec):
        names = ("segmented", "tree", "ranges", "terms", "dropout_rate")
        operands = "segment ids, kv_ends, q_ranges, bias, relative_bias, alibi_slopes and dropout"
    else:
        names = ("has_tree", "ranges", "alibi")
        operands = "tree_ends, q_ranges and alibi_slopes"
        if spec.cache.latent or spec.cache.is_quantized:
            return "batch_invariant takes pools of keys and of values in 16 bits"
    if any(getattr(spec, name) for name in names):
        return f"batch_invariant takes no {operands}"
    if spec.dtype_bits != 16:
        return f"batch_invariant takes float16 and bfloat16, not {spec.dtype}"
    if max(spec.head_dim, spec.head_dim_v) > HEAD_DIM_MAX:
        return f"batch_invariant takes head dimensions up to {HEAD_DIM_MAX}"
    return None


def choose_spans(spec: DecodeSpec, programs: int, num_sms: int) -> int:
    """Return into how many spans a paged decode divides keys, 1 for programs that take all.

    That follows from shapes, and no bit depends on it.
    """
    spans = -(-spec.cache.capacity // SPAN)
    tokens = spec.merge(1).batch * spec.tokens
    fits = spans * tokens * spec.heads_q * spec.head_dim_v <= _MOST_OF_PARTS
    splits = programs < 4 * num_sms if spec.num_splits is None else spec.num_splits > 1
    return spans if splits and fits else 1
