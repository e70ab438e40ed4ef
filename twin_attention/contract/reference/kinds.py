from __future__ import annotations

from typing import Any

from twin_attention.contract.reference.attention import (
    attention_backward,
    attention_forward,
    attention_jvp,
)
from twin_attention.contract.reference.block_sparse import (
    block_sparse_backward,
    block_sparse_forward,
)
from twin_attention.contract.reference.dilated import dilated_backward, dilated_forward
from twin_attention.contract.reference.packed import varlen_backward, varlen_forward, varlen_jvp
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, DilatedSpec, VarlenSpec

# Every other attention is dense.
_FORWARD = {
    VarlenSpec: varlen_forward,
    BlockSparseSpec: block_sparse_forward,
    DilatedSpec: dilated_forward,
}
_BACKWARD = {
    VarlenSpec: varlen_backward,
    BlockSparseSpec: block_sparse_backward,
    DilatedSpec: dilated_backward,
}


def forward_of(spec: AttentionSpec) -> Any:
    return _FORWARD.get(type(spec), attention_forward)


def backward_of(spec: AttentionSpec) -> Any:
    return _BACKWARD.get(type(spec), attention_backward)


def jvp_of(spec: AttentionSpec) -> Any:
    return varlen_jvp if spec.is_packed else attention_jvp
