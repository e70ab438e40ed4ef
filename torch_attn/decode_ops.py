"""Decoding: the torch operators of a paged cache and of merges, and what they run.

None waits for the device, except append_kv's reference; the device reads lengths and page tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_attn import vmap
from torch_attn.attention import Attention
from torch_attn.autograd import Backward, Forward
from torch_attn.calls import Call
from torch_attn.operands import cast_float32, dtype_name, operand
from torch_attn.operators import Operator, schema
from twin_attention.contract.operands import (
    AppendOperands,
    DecodeOperands,
    PagedOperands,
    describe_operands,
)
from twin_attention.contract.paged_spec import AppendSpec, DecodeOptions
from twin_attention.contract.spec import MergeSpec
from twin_attention.contract.validate.errors import one_pool
from twin_attention.contract.validate.merge import check_merge_states
from twin_attention.contract.validate.options import check_decode_options, check_paged_options
from twin_attention.contract.validate.paged import (
    check_append_kv,
    check_paged_attention,
    check_paged_decode,
)


class CacheAttention(Attention):
    """Attention over a paged cache, without a derivative."""

    def __init__(
        self,
        name: str,
        operands: type[Any],
        check_options: Callable[..., DecodeOptions],
        check: Callable[[Any, DecodeOptions], Any],
    ) -> None:
        super().__init__(name, operands, DecodeOptions, check_options, check)
        definition = (
            f"{name}({self.tensors_schema}, {self.others_schema}) -> (Tensor out, Tensor lse)"
        )
        self.operator = Operator(definition, self.num_operands, self.call_of, self.fake, name)

    def cast(self, operands: Any) -> Any:
        return self.operands(cast_float32("q", operands[0]), *operands[1:])

    def run(self, function: Any, spec: Any, backend: Any, *operands: Tensor | None) -> Any:
        given = self.operands._make(operands)
        if given.q.ndim == 3 and self.operands is DecodeOperands:
            out, lse = self.run(function, spec, backend, given.q.unsqueeze(1), *operands[1:])
            return out.squeeze(1), lse.squeeze(2)
        if spec.is_empty:
            out, lse = self.new_outputs(given, spec.head_dim_v)
            sinks = given.sinks
            lse = lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[:, None])
            return out.zero_(), lse
        return function(given, spec, backend)


PAGED_DECODE = CacheAttention(
    "paged_decode", DecodeOperands, check_decode_options, check_paged_decode
)
PAGED_ATTENTION = CacheAttention(
    "paged_attention", PagedOperands, check_paged_options, check_paged_attention
)
PAGED_ATTENTION.operator.register_vmap(partial(vmap.refuse, "paged_attention"))


class _Append(Operator):
    """`append_kv`, which writes into the pools and returns the rotated queries, if any."""

    def prepare(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        operands = AppendOperands._make(tensors)
        check_pools(operands.k_pages, operands.v_pages)
        return tensors

    def finish(self, call: Call, tensors: tuple[Any, ...], results: Any) -> Tensor:
        operands, (q,) = AppendOperands._make(tensors), results
        if not call.spec.is_empty:
            count_write(operands)
        return _or_nothing(q, operands)


def check_append(operands: AppendOperands[Tensor], interleaved: bool) -> AppendSpec:
    return check_append_kv(describe_operands(operands, operand), interleaved)


def _append(function, spec, backend, *operands: Tensor | None) -> tuple[Tensor | None]:
    """Run a family's append_kv; unless packed, give k_new, v_new and q an axis of tokens."""
    given = AppendOperands._make(operands)
    k_new, v_new, q = given.k_new, given.v_new, given.q
    if k_new.ndim == 4 or spec.packed:
        return (function(given, spec, backend),)
    q = None if q is None else q.unsqueeze(1)
    v_new = None if v_new is None else v_new.unsqueeze(1)
    given = given._replace(k_new=k_new.unsqueeze(1), v_new=v_new, q=q)
    q = function(given, spec, backend)
    return (None if q is None else q.squeeze(1),)


def _append_call(tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Call:
    operands = AppendOperands._make(tensors)
    spec = check_append(operands, others[0])
    return Call("append_kv", _append, spec, operands.k_new.device, others)


def _fake_append(*args):
    *tensors, interleaved, _ = args
    operands = AppendOperands._make(tensors)
    check_append(operands, interleaved)
    q = operands.q
    return _or_nothing(None if q is None else q.new_empty(q.shape), operands)


def _or_nothing(q: Tensor | None, operands: AppendOperands[Tensor]) -> Tensor:
    """Return an empty tensor for None: an operator cannot return None."""
    return operands.k_new.new_empty(0) if q is None else q


def check_pools(k_pages: Tensor, v_pages: Tensor | None) -> None:
    """Refuse pools that begin at one address: values would overwrite keys.

    Views that share a storage but no element begin at different addresses.
    """
    if k_pages is v_pages:
        one_pool()
    if v_pages is None or torch.compiler.is_compiling() or type(k_pages) is not Tensor:
        return  # the operator checks when it runs; asking a fake tensor gives a warning
    try:
        address = k_pages.data_ptr()
        if address and address == v_pages.data_ptr():  # 0 without memory
            one_pool()
    except RuntimeError:  # a tensor of torch.func has no address
        return


def count_write(operands: AppendOperands[Tensor]) -> None:
    """Tell autograd of an append, which it cannot see."""
    pools = operands.k_pages, operands.v_pages
    torch.autograd.graph.increment_version([x for x in pools if x is not None])


APPEND = _Append(
    f"append_kv({schema(AppendOperands, ('k_pages', 'v_pages'))}, bool rotary_interleaved, "
    "str? implementation) -> Tensor",
    len(AppendOperands._fields), _append_call, _fake_append, "append_kv",
)  # fmt: skip


def check_merge(outs, lses) -> MergeSpec:
    return check_merge_states(operand("outs", outs), operand("lses", lses))


def _merge(function, spec, backend, outs: Tensor, lses: Tensor):
    if spec.is_empty:
        out, lse = _allocate_merged(outs, lses)
        return out.zero_(), lse.fill_(-torch.inf)
    return function(outs, lses, spec, backend)


def _merge_backward(function, spec, backend, *tensors: Tensor | None):
    return function(*tensors, spec, backend)


def _merge_call(operation: str, run: Any, tensors: Any, others: tuple[Any, ...]) -> Call:
    outs = tensors[-2]
    spec = MergeSpec(*outs.shape, dtype=dtype_name(outs.dtype))
    return Call(operation, run, spec, outs.device, others)


def _fake_merge(outs, lses, implementation):
    check_merge(outs, lses)
    return _allocate_merged(outs, lses)


def _allocate_merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _fake_merge_backward(dout, dlse, outs, lses, implementation):
    return outs.new_empty(outs.shape), lses.new_empty(lses.shape)


_MERGE_BACKWARD = Backward(
    "merge_states_bwd(Tensor dout, Tensor? dlse, Tensor outs, Tensor lses, "
    "str? implementation) -> (Tensor douts, Tensor dlses)",
    4, partial(_merge_call, "combine_bwd", _merge_backward), _fake_merge_backward, "merge_states",
)  # fmt: skip
MERGE = Forward(
    "merge_states(Tensor outs, Tensor lses, str? implementation) -> (Tensor out, Tensor lse)",
    2, partial(_merge_call, "combine", _merge), _fake_merge, "merge_states",
    backward=_MERGE_BACKWARD, num_saved=0,
)  # fmt: skip
MERGE.register_vmap(partial(vmap.join_axes, (1, 1), 0))
_MERGE_BACKWARD.register_vmap(partial(vmap.join_axes, (0, 0, 1, 1), 1))
