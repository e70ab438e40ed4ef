"""The `vmap` rules: the mapped dimension joins another axis of each tensor.

A rule takes the operator, the number of its tensors, and what `torch.library.register_vmap` passes.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_attn.operands import with_rows
from twin_attention.contract.operands import DIFFERENTIABLE, TERMS
from twin_attention.contract.validate.errors import (
    not_mapped,
    not_mapped_with_sinks,
    not_mapped_with_sinks_and_mask,
)

# The axes that a mapped dimension joins, batch or heads, by the number of axes: in [B, S, H, D],
# [B, H, S], [B, S] and [H].
_BATCH = {4: 0, 3: 0, 2: 0, 1: 0}
_HEADS = {4: 2, 3: 1, 1: 0}
# The heads' axis of floating-point operands with two axes: [Hq, 2R + 1], [B, Hq].
_HEADS_OF_TERMS = {"relative_bias": 0, "alibi_slopes": 1}


def _join(x: Tensor, dim: int | None, axis: int, size: int) -> Tensor:
    """Let a mapped dimension join another axis, counted without it; None expands."""
    if dim is None:
        x = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])
    else:
        x = x.movedim(dim, axis)
    return x.flatten(axis, axis + 1)


def _call_for_each(op, num_tensors, size, in_dims, *args):
    tensors = [*zip(args[:num_tensors], in_dims, strict=False)]

    def one(i):
        own = (x if dim is None else x.movedim(dim, 0)[i] for x, dim in tensors)
        own = (None if x is None else with_rows(x) for x in own)
        return op(*own, *args[num_tensors:])

    results = zip(*map(one, range(size)), strict=True)
    stacked = tuple(torch.stack(x) for x in results)
    return stacked, (0,) * len(stacked)


def join_batch_or_heads(fields, op, num_tensors, info, in_dims, *args):
    """Join the batch, or the heads if there are sinks or a table, which have no batch.

    Heads share segment ids. A bias or dropout takes a call for each element, because a call's batch
    elements share a bias, and dropout counts them.
    """
    with_tangents = [name for name in fields if name in DIFFERENTIABLE]
    # A forward's tensors; a backward's, behind dout and dlse; or those of tangents.
    before = {len(fields): [], len(fields) + 5: ["", ""]}.get(num_tensors, with_tangents)
    names = dict(enumerate([*before, *fields]))
    places = {i: name for i, name in names.items() if name in TERMS}
    alone = (i for i, name in names.items() if name in ("bias", "dropout_seed"))
    if any(args[i] is not None for i in alone):
        return _call_for_each(op, num_tensors, info.batch_size, in_dims, *args)
    tensors = list(zip(args[:num_tensors], in_dims[:num_tensors], strict=True))
    axis = _BATCH
    if any(
        x is not None and (x.ndim - (dim is not None) == 1 or places.get(i) == "relative_bias")
        for i, (x, dim) in enumerate(tensors)
    ):
        axis = _HEADS

    def fold(i, x, dim):
        if x is None:
            return None
        if axis is _HEADS and i in places and x.ndim - (dim is not None) == 2:
            return _join(x, dim, _HEADS_OF_TERMS[places[i]], info.batch_size)
        if x.dtype == torch.int32 and axis is _HEADS:
            if dim is not None:
                not_mapped_with_sinks()
            return x
        return _join(x, dim, axis[x.ndim - (dim is not None)], info.batch_size)

    folded = (fold(i, *tensor) for i, tensor in enumerate(tensors))
    outputs = op(*folded, *args[num_tensors:])
    dims = [axis.get(x.ndim, 0) for x in outputs]
    sizes = (info.batch_size, -1)
    return tuple(x.unflatten(dim, sizes) for x, dim in zip(outputs, dims, strict=True)), tuple(dims)


def join_batch_of_mask(op, num_tensors, info, in_dims, *args):
    """Join the batch, which sinks lack; an unmapped mask for all sequences stays as it is."""
    batch = args[0].shape[1 if in_dims[0] == 0 else 0]

    def fold(x, dim):
        if x is None:
            return None
        if x.ndim - (dim is not None) == 1:
            not_mapped_with_sinks_and_mask()
        if x.dtype == torch.int32 and dim is None and len(x) == 1:
            return x
        if x.dtype == torch.int32 and dim is not None:
            x, dim = x.movedim(dim, 0), 0
            x = x.expand(-1, batch, *x.shape[2:])
        return _join(x, dim, 0, info.batch_size)

    tensors = zip(args[:num_tensors], in_dims[:num_tensors], strict=True)
    outputs = op(*(fold(x, dim) for x, dim in tensors), *args[num_tensors:])
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0,) * len(outputs)


def join_axes(of_tensors, of_results, op, num_tensors, info, in_dims, *args):
    """Join the batch, given the number of its axis in the tensors and in the results."""
    size = info.batch_size
    tensors = zip(args[:num_tensors], in_dims[:num_tensors], of_tensors, strict=True)
    joined = (None if x is None else _join(x, dim, axis, size) for x, dim, axis in tensors)
    results = op(*joined, *args[num_tensors:])
    return tuple(x.unflatten(of_results, (size, -1)) for x in results), (of_results, of_results)


def of_any_size(rule: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    """Apply a rule to no elements as to one of zeros, and take none of the results."""
    if info.batch_size:
        return rule(info, in_dims, *args)
    pairs = zip(args, (*in_dims, *(None,) * len(args)), strict=False)
    one = [
        x if dim is None else x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
        for x, dim in pairs
    ]
    outputs, dims = rule(info._replace(batch_size=1), in_dims, *one)
    return tuple(x.narrow(dim, 0, 0) for x, dim in zip(outputs, dims, strict=True)), dims


def refuse(function: str, *_: Any) -> NoReturn:
    """Refuse `vmap`: a packed sequence takes more sequences instead."""
    not_mapped(function)
