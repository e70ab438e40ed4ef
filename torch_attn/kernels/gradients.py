"""Run the backward with the same sequence of kernels in every family."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torch_attn.kernels.library.mask import Mask, mask_of_keys, mask_of_queries
from torch_attn.kernels.library.segments import segments_of
from torch_attn.kernels.library.sequences import num_padded_rows, offsets_of
from torch_attn.kernels.library.softmax import LOG2E
from torch_attn.kernels.library.terms import (
    added_gradient,
    is_multiplied,
    shared_gradient,
    stored_gradient,
    terms_of,
)
from torch_attn.kernels.library.tiles import ROW_PADDING
from torch_attn.kernels.preprocess import Statistics, preprocess
from torch_attn.launch import KernelCall, Prepared, launch, num_sequences
from torch_attn.targets import num_sms
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec, VarlenSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.steps import (
    MOST_OF_MEAN,
    has_wide_rows,
    is_uneven,
    splits_group,
)

# What the longest tile of keys may take, as a multiple of an SM's mean work, before each query head
# gets its own program. Used if tiles are uneven and rows wide.
_MOST_OF_UNEVEN = 0.6

# A kernel and the function that prepares its launch.
Kernel = tuple[Any, Callable[[KernelCall], Prepared]]


# Makes the mask of a kernel from its name, the operands, the problem and the backend.
MaskOf = Callable[[str, AttentionOperands[Tensor], AttentionSpec, Backend], Mask]


class OwnPasses(NamedTuple):
    """Say which passes over rows a summing kernel does itself.

    Attributes:
        sums: it first clears the sums of dq, and at the end turns them into dq.
        rows: it also prepares the rows.
        heads: for how many query heads it needs sums of dq at a time.
    """

    sums: bool = False
    rows: bool = False
    heads: int = 0


class Passes(NamedTuple):
    """Hold what a summing kernel reads and writes for its `OwnPasses`.

    Attributes:
        dq: the gradient; None if the kernel does no pass.
        dq_rows: dq by its address, if the kernel needs it besides a descriptor; or None.
        dout, out, statistics: data of the rows; None if the rows are prepared before.
    """

    dq: Any = None
    dq_rows: Any = None
    dout: Any = None
    out: Any = None
    statistics: Any = None


class Sums(NamedTuple):
    """Hold the float32 sums of gradients that a kernel adds to; None where it adds to none.

    Attributes:
        dq, dk, dv: the sums. They start at 0; with `passes` the kernel clears those of dq itself.
        passes: what the kernel does itself.
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    passes: Passes = Passes()


def computed_mask(
    kernel: str, operands: AttentionOperands[Tensor], spec: AttentionSpec, backend: Backend
) -> Mask:
    """Return the mask of a kernel, by its name, with ranges that torch computes."""
    make = mask_of_keys if kernel == "flash_bwd_dq" else mask_of_queries
    return make(operands, spec)


def make_flash_bwd(
    dq: Kernel,
    dkdv: tuple[Kernel, ...],
    postprocess: Kernel | None = None,
    sum_columns: Callable[[int], int] | None = None,
    num_sums: int = 0,
    own_passes: Callable[[AttentionSpec, Backend, torch.device, int], OwnPasses] | None = None,
    dq_prepares_rows: bool = False,
    item_counter: Callable[..., Tensor | None] | None = None,
    terms_gradients: tuple[Callable[..., dict[str, Tensor]], ...] | None = None,
    mask_of: MaskOf = computed_mask,
    **options: Hashable,
) -> Callable[..., AttentionOperands[Tensor]]:
    """Return the `flash_bwd` of a kernel family.

    Args:
        dq: the dq kernel.
        dkdv: the kernel of dk and dv, or one for each, with the same operands. In a family with
            sums, the `Sums` are one of the operands.
        postprocess: the kernel that turns the float32 sums into dq. None for a family without sums.
        sum_columns: returns the columns of the sums, from the head size.
        num_sums: 1 for sums of dq; 3 for sums of dk and dv as well, where programs may share a tile
            of keys.
        own_passes: returns which passes the summing kernel does itself, from the problem, the
            backend, the device, and the query heads that a tile of keys visits.
        dq_prepares_rows: the dq kernel computes lse2 and delta from dout, out, lse and dlse; the
            preprocess runs only for the sums.
        item_counter: makes the counter of a launch, which the matmul kernels take before the mask.
        terms_gradients: each computes the gradients of some terms, by name, in portable kernels;
            the matmul kernels then take the terms before the mask. None for a family without terms.
        mask_of: makes the mask of a kernel, by its name.
        options: launch options of the matmul kernels.
    """

    def flash_bwd(
        dout: Tensor,
        dlse: Tensor | None,
        operands: AttentionOperands[Tensor],
        out: Tensor,
        lse: Tensor,
        rest: Tensor | None,
        spec: AttentionSpec,
        backend: Backend,
    ) -> AttentionOperands[Tensor]:
        """Launch the backward kernels that the problem has configurations for.

        Packed sequences have no batch axis.

        Args:
            dout: [B, Sq, Hq, Dv], with strides that the family takes.
            dlse: [B, Hq, Sq] float32, contiguous, or None for zero.
            operands, out, lse: inputs and outputs of the forward, as is rest, its `rest_of_lse`,
                None without terms.

        Returns:
            The gradient of each operand that is not frozen, in its dtype, contiguous.
        """
        q, k, v = operands.q, operands.k, operands.v
        offsets, segments = offsets_of(operands), segments_of(operands)
        rows = (spec.batch, spec.heads_q, num_padded_rows(spec))
        lse2, delta = (lse.new_empty(rows) for _ in range(2))
        rest2 = None if rest is None else lse.new_empty(rows)
        terms = () if terms_gradients is None else (terms_of(operands, spec)._replace(rest2=rest2),)
        stored = [x._replace(dbias=stored_gradient(x.bias, spec)) for x in terms]
        stores = all(is_multiplied(x.dbias, q) for x in stored)
        if postprocess is not None and (spec.wide_bias or not stores):
            # The summing kernel gives a gradient of a bias only if TMA can store it, and has no
            # registers for a bias in float32.
            spec = replace(spec, deterministic=True)
        has_sums = postprocess is not None and "flash_bwd_fused" in backend.configs(spec)
        splits = has_sums and num_sums == 3 and _splits_group(spec, backend, q.device)
        members = 1 if splits else spec.group_size
        own = OwnPasses()
        if has_sums and own_passes is not None:
            own = own_passes(spec, backend, q.device, members)
        statistics = Statistics(lse, dlse, lse2, delta, rest, rest2)
        rows_of_dq = (out, statistics)
        if not own.rows and (has_sums or not dq_prepares_rows):
            queries = offsets.q, segments and segments.q
            preprocess(dout, out, statistics, spec, backend, *queries)
            rows_of_dq = (lse2, delta)
        grads = tuple(x.new_empty(x.shape) for x in (q, k, v))
        inputs = (q, k, v, dout, lse2, delta)
        gradients: dict[str, Tensor | None] = {}

        def counter(**needs: bool) -> tuple[Tensor | None, ...]:
            return () if item_counter is None else (item_counter(q, spec, **needs),)

        of_keys = None
        if has_sums:
            assert postprocess is not None
            assert sum_columns is not None
            heads = (own.heads,) if own.sums else (spec.batch, spec.heads_q)
            summed = [(spec, grads[0], (*heads, lse2.shape[-1]))]
            if splits:
                rows = triton.cdiv(spec.seq_kv, ROW_PADDING.value) * ROW_PADDING.value
                of_dk, of_dv = _as_queries(spec)
                shape = (spec.batch, spec.heads_kv, rows)
                summed += [(of_dk, grads[1], shape), (of_dv, grads[2], shape)]
            sums = [lse2.new_empty((*shape, sum_columns(x.head_dim))) for x, _grad, shape in summed]
            first = int(own.sums)
            for values in sums[first:]:
                values.zero_()
            of_rows = (dout, out, statistics) if own.rows else ()
            passes = Passes(grads[0], None, *of_rows) if own.sums else Passes()
            of_queries = mask_of("flash_bwd_fused", operands, spec, backend)
            shared = (shared_gradient(x.bias, q, spec) for x in stored)
            stored = [
                x._replace(
                    dbias=x.dbias if dbias.entries is None else dbias,
                    drelative=added_gradient(x, spec),
                )
                for x, dbias in zip(stored, shared, strict=True)
            ]
            counted = counter(has_uneven=True, has_sections=own.sums)
            of_sums = Sums(*sums)._replace(passes=passes)
            tensors = (*inputs, *grads[1:], of_sums, *counted, *stored, of_queries)
            launch("flash_bwd_fused", *dkdv[0], tensors, spec, backend, **options)
            for (x, grad, _shape), values in zip(summed[first:], sums[first:], strict=True):
                tensors = (values, grad, offsets.q)
                launch("flash_bwd_postprocess", *postprocess, tensors, x, backend)
        else:
            of_keys = mask_of("flash_bwd_dq", operands, spec, backend)
            tensors = (q, k, v, dout, *rows_of_dq, grads[0], *counter(), *stored, of_keys)
            launch("flash_bwd_dq", *dq, tensors, spec, backend, **options)
            for kernel in dkdv:
                # Each launch has its own mask: programs count their work in it.
                of_queries = mask_of("flash_bwd_dkdv", operands, spec, backend)
                no_sums = (Sums(),) if num_sums else ()
                tensors = (*inputs, *grads[1:], *no_sums, *counter(), *terms, of_queries)
                launch("flash_bwd_dkdv", *kernel, tensors, spec, backend, **options)
        others = operands._replace(**dict.fromkeys(spec.frozen))
        dsinks = sinks_gradient(others.sinks, lse2, delta, rest2)
        for x in stored:
            if x.dbias.entries is not None:
                gradients["bias"] = x.dbias.entries
                others = others._replace(bias=None)
            if x.drelative is not None:
                gradients["relative_bias"] = x.drelative.to(x.relative.dtype)
                others = others._replace(relative_bias=None)
        gradients |= dict(zip(("q", "k", "v", "sinks"), (*grads, dsinks), strict=True))
        if spec.terms and terms_gradients:
            if of_keys is None or mask_of is not computed_mask:
                of_keys = computed_mask("flash_bwd_dq", operands, spec, backend)
            for gradient in terms_gradients:
                gradients |= gradient(others, inputs, *terms, of_keys, spec, backend)
        return operands._make(map(gradients.get, operands._fields))

    return flash_bwd


def _splits_group(spec: AttentionSpec, backend: Backend, device: torch.device) -> bool:
    config, sms = backend.configs(spec)["flash_bwd_fused"], num_sms(device, backend.target)
    most_of_mean = MOST_OF_MEAN
    if is_uneven(spec) and has_wide_rows(spec):
        most_of_mean = _MOST_OF_UNEVEN
    return splits_group(spec, config.block_q, config.block_kv, sms, most_of_mean)


def _as_queries(spec: AttentionSpec) -> tuple[AttentionSpec, AttentionSpec]:
    """Return problems whose dq is made of sums as dk is here, and as dv is, which has no scale."""
    keys = replace(spec, seq_q=spec.seq_kv, heads_q=spec.heads_kv)
    return keys, replace(keys, head_dim=spec.head_dim_v, scale=1.0)


def sinks_gradient(
    sinks: Tensor | None, lse2: Tensor, delta: Tensor, rest2: Tensor | None = None
) -> Tensor | None:
    """Compute the gradient of the sinks [Hq] from lse2, delta and rest2 of all rows."""
    if sinks is None:
        return None
    of_heads = sinks[:, None]
    if rest2 is None:
        p = torch.exp2(of_heads * LOG2E.value - lse2)
    else:
        p = torch.exp2((of_heads - lse2) * LOG2E.value - rest2)
    return -(p * delta).sum((0, 2))


def prepare_postprocess(call: KernelCall) -> Prepared:
    """Return the grid and the arguments of a `flash_bwd_postprocess_kernel`."""
    spec = call.spec
    rows = num_padded_rows(spec) if isinstance(spec, VarlenSpec) else spec.seq_q
    tiles = triton.cdiv(rows, call.config.block_q)
    arguments = {
        "seq_q": spec.seq_q,
        "heads_q": spec.heads_q,
        "scale": spec.scale,
        "HEAD_DIM": spec.head_dim,
        "num_sequences": num_sequences(spec),
    }
    return (tiles * spec.heads_q * spec.batch,), arguments
