"""Flash attention and paged decode for PyTorch, in Triton. Importing it loads no Triton, no JAX."""

from torch_attn.api import explain, flash_attention
from torch_attn.decode import (
    append_kv,
    check_pages,
    explain_decode,
    merge_states,
    paged_decode,
)

__all__ = [
    "append_kv",
    "check_pages",
    "explain",
    "explain_decode",
    "flash_attention",
    "merge_states",
    "paged_decode",
]
