"""Attention kernels in JAX Pallas, the twins of `torch_attn`'s Triton kernels."""

from pallas_attn.decode import append_kv, check_pages, explain_decode, merge_states, paged_decode
from pallas_attn.flash import explain, flash_attention

__all__ = [
    "append_kv",
    "check_pages",
    "explain",
    "explain_decode",
    "flash_attention",
    "merge_states",
    "paged_decode",
]
