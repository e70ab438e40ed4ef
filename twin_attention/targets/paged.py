"""Say which paged-cache problems the Mosaic GPU kernels support, on SM80 and SM90."""

from __future__ import annotations

from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec, PagedSpec
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets import sm80
from twin_attention.targets.kernels import Spec

# These kernels are faster up to this many query rows per kv head.
_ROWS_MAX = {
    ("sm90", "8 bits"): 16, ("sm90", "16 bits"): 8,
    ("sm80", "8 bits"): 16, ("sm80", "16 bits"): 64,
}  # fmt: skip


def supports(spec: Spec) -> str | None:
    if isinstance(spec, AttentionSpec):
        return "its kernels of paged caches take no other attention"
    if reason := sm80.too_wide(spec):
        return reason
    if isinstance(spec, PagedSpec) or (isinstance(spec, AppendSpec) and spec.packed):
        return "its kernels take no packed sequences"
    if isinstance(spec, AppendSpec) and spec.rotary_dim:
        return "its kernels rotate nothing"
    if isinstance(spec, DecodeSpec | AppendSpec) and spec.cache.latent:
        return "its kernels read and write a pool of values"
    if isinstance(spec, DecodeSpec) and spec.alibi:
        return "its kernels take no alibi_slopes"
    if isinstance(spec, DecodeSpec) and spec.has_tree:
        return "its kernels take no trees"
    if isinstance(spec, DecodeSpec) and spec.cascade:
        return "its kernels read each sequence's pages"
    if (
        isinstance(spec, DecodeSpec)
        and spec.cache.is_quantized
        and (spec.head_dim % 16 or spec.head_dim_v % 16)
    ):
        return "its copies of 16 bytes take head dimensions that are multiples of 16 in 8 bits"
    if isinstance(spec, DecodeSpec) and spec.cache.num_pages * spec.cache.page_size >= 2**31:
        return "its kernels number the keys of a pool in 32 bits"
    return None


def slower(operation: str, spec: Spec, target: str | None) -> str | None:
    """Return why the portable kernels are faster for a problem that these cover, or None.

    A program of these has few rows of a kv head, so of many rows several programs read each key.
    """
    if operation != "paged_decode" or not isinstance(spec, DecodeSpec):
        return "the portable kernels are as fast"
    bits = "8 bits" if spec.cache.is_quantized else "16 bits"
    if target == "sm90" and bits == "16 bits" and max(spec.head_dim, spec.head_dim_v) <= 64:
        return "the portable kernels are as fast with head dimensions up to 64 in 16 bits"
    limit = _ROWS_MAX[target or "sm80", bits]
    if spec.rows > limit:
        return f"the portable kernels are faster above {limit} query rows of a kv head in {bits}"
    return None
