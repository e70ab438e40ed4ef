"""`merge_states`: merge results over disjoint sets of keys, with the kernel of `kernels.merge`."""

import torch
from torch import Tensor

from torch_attn.kernels.merge import launch_merge
from twin_attention.contract.spec import MergeSpec
from twin_attention.targets.family import Backend


def combine(outs: Tensor, lses: Tensor, spec: MergeSpec, backend: Backend) -> tuple[Tensor, Tensor]:
    """Launch `combine_kernel`; return out in spec's dtype and lse in float32, contiguous."""
    shape = (spec.batch, spec.tokens, spec.heads, spec.head_dim_v)
    out = outs.new_empty(shape, dtype=getattr(torch, spec.dtype))
    lse = lses.new_empty((spec.batch, spec.heads, spec.tokens))
    launch_merge(outs, lses, None, None, out, lse, spec, backend)
    return out, lse
