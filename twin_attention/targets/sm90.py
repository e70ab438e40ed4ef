"""Say which problems the explicit SM90 kernels support, and which portable kernels use wgmma.

A producer warp loads tiles with TMA; consumer warpgroups multiply them with wgmma.
"""

from __future__ import annotations

from twin_attention.contract.paged_spec import DecodeSpec, PagedSpec
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, VarlenSpec
from twin_attention.targets import invariant, sm80
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.kernels import Spec
from twin_attention.targets.target import NUM_SMS

# The operations that take score terms, dropout and row maxima.
_WITH_TERMS = frozenset({"flash_fwd", "flash_bwd", "flash_jvp"})
# Query rows of a program in paged attention; with fewer on average, most are padding.
LEAST_ROWS = 128


def supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Return None for a problem that the kernels cover, else the reason why they do not."""
    if isinstance(spec, DecodeSpec) and spec.cache.latent:
        return _supports_latent(spec, target)
    if reason := _too_wide(operation, spec):
        return reason
    is_forward = operation not in invariant.DERIVATIVES
    if is_forward and invariant.is_asked_of(spec) and spec.softcap is not None:
        return "its softcap looks at several rows, which batch_invariant forbids"
    if isinstance(spec, PagedSpec) and operation == "paged_attention":
        return _supports_paged(spec, target)
    if not isinstance(spec, AttentionSpec):
        return "it has only flash attention and paged attention"
    if isinstance(spec, BlockSparseSpec):
        if operation == "flash_bwd":
            return "its backward takes no block masks"
        if (spec.tile_q, spec.tile_kv) != (128, 128):
            return "its block masks have tiles of 128 queries by 128 keys"
    if reason := sm80.unlisted(spec):
        return reason
    if operation not in _WITH_TERMS and (reason := sm80.lacks_terms(operation, spec)):
        return reason
    if target != "sm90":
        return "its kernels are for SM90"
    if spec.dtype_bits != 16:
        return f"its products take float16 and bfloat16, not {spec.dtype}"
    if not spec.rows_aligned:
        return "TMA loads rows that begin at multiples of 16 bytes"
    if spec.depths and spec.dropout is not None and "bias" in spec.terms:
        return "ptxas 12.8 crashes on windows of depths beside dropout and a bias"
    if operation in ("flash_bwd", "partial_bwd", "partial_dq"):
        return _supports_backward(spec)
    if operation == "flash_jvp":
        return _supports_tangents(spec)
    return None


def _too_wide(operation: str, spec: Spec) -> str | None:
    reason = sm80.too_wide(spec)
    if reason is None or operation not in _WITH_TERMS or not isinstance(spec, AttentionSpec):
        return reason
    if isinstance(spec, BlockSparseSpec) or spec.is_part:
        return f"with block masks or a result over other keys {reason}"
    if spec.head_dim != spec.head_dim_v:
        return f"unless they are equal, {reason}"
    return None


def slower(operation: str, spec: Spec, target: str | None) -> str | None:
    """Return why the portable kernels are faster (docs/history/choices.md), or None."""
    if not isinstance(spec, AttentionSpec):
        return None
    head_dim = max(spec.head_dim, spec.head_dim_v)
    if operation == "flash_fwd" and spec.dropout is not None and not spec.terms and head_dim <= 64:
        return "its forward of heads up to 64 with only dropout is slower"
    if operation == "flash_bwd" and 64 < head_dim <= 128:
        if spec.wide_bias:
            return "its backward of heads of 65 to 128 with a bias in float32 is slower"
        if "relative_bias" in spec.terms and (spec.seq_kv < 2048 or spec.deterministic):
            return (
                "its backward of heads of 65 to 128 with relative_bias, of fewer than 2048 keys or "
                "deterministic, is slower"
            )
    return None


def portable_uses_wgmma(kernel: str, spec: Spec) -> bool:
    """Return False where a portable kernel multiplies with SM80's mma.sync on SM90 too.

    Triton copies some tiles to wgmma through registers: tiles with unaligned rows, and TF32 tiles,
    which are rounded there. They share one buffer of shared memory. For two tiles of different
    widths, ptxas of CUDA 12.8, which Triton 3.6 ships, then computes the second tile's wgmma
    descriptor from a wrong address. A TF32 forward is faster with mma.sync.
    """
    if not isinstance(spec, AttentionSpec | DecodeSpec):
        return True
    if type(spec) is DecodeSpec and not spec.cache.latent:
        return True
    if isinstance(spec, AttentionSpec) and spec.dtype_bits == 32 and spec.precision == "tf32":
        widths = {padded_head_dim(size) for size in (spec.head_dim, spec.head_dim_v)}
        return kernel != "flash_fwd" and len(widths) == 1 and spec.rows_aligned
    return spec.rows_aligned


def mosaic_leaves(operation: str, spec: Spec) -> str | None:
    """Return why Mosaic's kernels leave out a problem that `supports` covers, or None."""
    if operation == "flash_jvp":
        return "it has no forward mode"
    if reason := sm80.too_wide(spec):
        return reason
    if spec.is_part:
        return "its kernels take no result over other keys"
    if isinstance(spec, AttentionSpec) and (reason := sm80.lacks_terms(operation, spec)):
        return reason
    if reason := sm80.mosaic_leaves(spec):
        return reason
    if not isinstance(spec, VarlenSpec):
        return None
    if max(spec.head_dim, spec.head_dim_v) <= 64:
        return "its packed sequences have head dimensions above 64"
    if operation == "flash_bwd" and has_large_heads(spec):
        return "its backward of packed sequences has head dimensions up to 128"
    return None


def jax_leaves(operation: str, spec: Spec, target: str | None) -> str | None:
    """Return why JAX cannot launch a problem that the kernels of `torch_attn` cover, or None."""
    if target != "sm90" or spec.is_packed or not isinstance(spec, AttentionSpec):
        return None
    results = {spec.head_dim_v}
    if spec.is_part and operation != "partial_fwd":
        results = set()  # an address each
    elif operation == "flash_bwd":
        results |= {spec.head_dim}
    if any(len(column_pieces(size)) > 2 for size in results):
        return "JAX passes two TMA descriptors of a result at most"
    return None


def _supports_backward(spec: AttentionSpec) -> str | None:
    if spec.is_part and has_large_heads(spec):
        return "its gradients through some of the keys have head dimensions up to 128"
    sequences = spec.num_sequences if isinstance(spec, VarlenSpec) else 1
    if 0 < spec.seq_kv < 16 * sequences:
        # With one key the exact ds is 0, so only rounding error would remain.
        return "its backward takes at least 16 keys" + ", on average" * (sequences > 1)
    return None


def _supports_tangents(spec: AttentionSpec) -> str | None:
    if has_large_heads(spec) or spec.head_dim != spec.head_dim_v:
        return "its forward mode has equal head dimensions up to 128"
    added = [x for x in spec.terms if x != "alibi_slopes"]
    return f"its forward mode takes no {added[0]}" if added else None


def has_large_heads(spec: Spec) -> bool:
    """Return True for head dimensions above 128, whose dk and dv need separate kernels."""
    return isinstance(spec, AttentionSpec) and max(spec.head_dim, spec.head_dim_v) > 128


def _supports_latent(spec: DecodeSpec, target: str | None) -> str | None:
    if reason := _lacks_of_pages(spec, target):
        return reason
    if spec.head_dim_v != 512:
        return "its latent caches have values of 512 columns"
    if spec.group_size == 0 or spec.group_size % 64:
        return "its latent caches have a multiple of 64 query heads for each kv head"
    return None


def _supports_paged(spec: PagedSpec, target: str | None) -> str | None:
    if reason := _lacks_of_pages(spec, target):
        return reason
    if spec.group_size not in (1, 2, 4, 8, 16, 32, 64):
        return "its kv heads have a power of two of query heads, at most 64"
    if spec.rows < LEAST_ROWS:
        return f"its paged attention is for chunks, of {LEAST_ROWS} query rows on average"
    programs = spec.batch * spec.heads_kv * -(-spec.rows // LEAST_ROWS)
    needs_splits = spec.num_splits is None and 2 * programs <= NUM_SMS["sm90"]
    if needs_splits or spec.num_splits not in (None, 1):
        return "it does not split keys"
    return None


def _lacks_of_pages(spec: DecodeSpec, target: str | None) -> str | None:
    if target != "sm90":
        return "its kernels are for SM90"
    if spec.alibi:
        return "its paged attention takes no alibi_slopes"
    if spec.has_tree:
        return "its paged attention takes no trees"
    if spec.ranges:
        return "its kernels take no q_ranges"
    if spec.dtype_bits != 16:
        return f"its products take float16 and bfloat16, not {spec.cache.dtype}"
    if spec.cache.page_size not in (16, 32, 64, 128, 256):
        return "its pages have a power of two of keys, at least 16"
    if not spec.rows_aligned:
        return "TMA loads rows that begin at multiples of 16 bytes"
    return None


def column_pieces(size: int) -> tuple[int, ...]:
    """Return the widths of the column pieces in which a head's tile is stored and multiplied.

    At most three powers of two from 16 on, with the fewest columns: (64, 32, 16) for 112, (128, 64)
    for 192, and (256,) for 240. Above 256, that is the first and those of the rest follow.
    """
    first = (256,) if size > 256 else ()
    size -= sum(first)
    rest, pieces = -(-size // 16) * 16, []
    while rest:
        whole = 1 << (rest - 1).bit_length()
        piece = whole if whole == rest or len(pieces) == 2 else whole // 2
        pieces.append(piece)
        rest -= min(piece, rest)
    most = 1 << (size - 1).bit_length()
    return (*first, *pieces) if sum(pieces) < most else (*first, max(most, 16))


def first_columns(size: int) -> int:
    """Return how many columns of a result one consumer has; a second one has the others."""
    return min(size, 256)
