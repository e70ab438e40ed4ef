"""Flash attention and paged decode for PyTorch, in Triton. Importing it loads no Triton, no JAX."""

from torch_attn.decode import (
    append_kv,
    check_pages,
    explain_decode,
    merge_states,
    paged_decode,
)
from torch_attn.flash import explain, flash_attention

__all__ = [
    "append_kv",
    "check_pages",
    "explain",
    "explain_decode",
    "flash_attention",
    "merge_states",
    "paged_decode",
]
