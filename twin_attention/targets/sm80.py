"""Say which problems the explicit SM80 kernels of both sides support.

They copy 16 bytes at a time with cp.async, read operands with ldmatrix, and multiply with mma.sync.
"""

from __future__ import annotations

from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.kernels import Spec

# The most query-key pairs, over all batch elements, whose tiles are listed.
MOST_LISTED = 2**36
PROGRAMS_OF_SM = 2  # at a time, of most kernels
EXPLICIT_HEAD_DIM_MAX = 256  # the portable kernels have all


def supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Return None for a problem that the kernels cover, else the reason why they do not."""
    if not isinstance(spec, AttentionSpec):
        return "it has only flash attention"
    if operation == "flash_jvp":
        return "it has no forward mode"
    if reason := too_wide(spec):
        return reason
    if spec.has_lists:
        return "its kernels take no block masks"
    if spec.is_part:
        return "its kernels take no result over other keys"
    if reason := unlisted(spec):
        return reason
    if reason := lacks_terms(operation, spec):
        return reason
    if target != "sm80":
        return "its kernels are for SM80"
    if spec.dtype_bits != 16:
        return f"its products take float16 and bfloat16, not {spec.dtype}"
    return None


def too_wide(spec: Spec) -> str | None:
    if max(getattr(spec, "head_dim", 0), getattr(spec, "head_dim_v", 0)) > EXPLICIT_HEAD_DIM_MAX:
        return f"its head dimensions go up to {EXPLICIT_HEAD_DIM_MAX}"
    return None


def lacks_terms(operation: str, spec: AttentionSpec) -> str | None:
    if spec.terms:
        return f"its kernels take no {spec.terms[0]}"
    if spec.dropout is not None:
        return "its kernels have no dropout"
    if spec.row_max and operation == "flash_fwd":
        return "its kernels return no row maxima"
    return None


def unlisted(spec: AttentionSpec) -> str | None:
    """Return why the tiles that segment ids, ends and ranges show cannot be listed, or None."""
    if spec.hides_by_data and spec.batch * spec.seq_q * spec.seq_kv > MOST_LISTED:
        options = "segment ids, kv_ends or q_ranges"
        return f"with {options} it takes at most {MOST_LISTED} pairs of tokens"
    return None


def slower(operation: str, spec: Spec, target: str | None) -> str | None:
    """Return why Gluon's kernels leave a problem to the portable ones, or None."""
    if isinstance(spec, AttentionSpec) and spec.depths:
        return "a window of depths was not timed in its kernels"
    return None


def mosaic_leaves(spec: Spec) -> str | None:
    """Return why Mosaic's kernels leave out a problem that `supports` covers, or None."""
    if isinstance(spec, AttentionSpec) and spec.hides_by_data:
        return "segment ids, kv_ends and q_ranges run in kernels written in Triton and Gluon"
    return None


def column_pieces(size: int) -> tuple[int, ...]:
    """Return the widths of column pieces: (64, 32) for 96, as one would be a third too wide."""
    whole = max(16, 1 << (size - 1).bit_length())
    half = whole // 2
    rest = max(16, 1 << (size - half - 1).bit_length())
    return (half, rest) if rest < half else (whole,)
