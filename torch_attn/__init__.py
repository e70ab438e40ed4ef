"""Flash attention and paged decode for PyTorch, in Triton. Importing it loads no Triton, no JAX."""

from torch_attn.aten import activate as activate
from torch_attn.aten import restore as restore
from torch_attn.block_sparse import block_sparse_attention, check_block_mask
from torch_attn.decode import append_kv, check_pages, merge_states, paged_decode
from torch_attn.dilated import dilated_attention
from torch_attn.explain import explain
from torch_attn.flash import flash_attention
from torch_attn.paged import paged_attention
from torch_attn.varlen import check_offsets, flash_attention_varlen
from twin_attention import __version__ as __version__
from twin_attention.contract.block_mask import BlockMask
from twin_attention.contract.ranges import (
    block_diffusion_ranges,
    check_ranges,
    prefix_ranges,
    span_ranges,
)
from twin_attention.contract.tree import Tree, check_tree, tree_of

__all__ = [
    "BlockMask",
    "Tree",
    "append_kv",
    "block_diffusion_ranges",
    "block_sparse_attention",
    "check_block_mask",
    "check_offsets",
    "check_pages",
    "check_ranges",
    "check_tree",
    "dilated_attention",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "merge_states",
    "paged_attention",
    "paged_decode",
    "prefix_ranges",
    "span_ranges",
    "tree_of",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
