"""Run the backward's kernels, in every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torch_attn.kernels.library.mask import Mask, mask_of_keys, mask_of_queries
from torch_attn.kernels.library.segments import segments_of
from torch_attn.kernels.library.sequences import num_padded_rows, offsets_of
from torch_attn.kernels.library.softmax import LOG2E
from torch_attn.kernels.library.terms import (
    Terms,
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
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.steps import MOST_OF_MEAN, has_wide_rows, is_uneven, splits_group

# Above this length of the longest tile of keys, in an SM's mean work, each query head gets its own
# program. Used if tiles are uneven and rows wide.
_MOST_OF_UNEVEN = 0.6

# A kernel and what prepares its launch.
Kernel = tuple[Any, Callable[[KernelCall], Prepared]]


class OwnPasses(NamedTuple):
    """Passes over rows that the fused kernel runs itself.

    Attributes:
        sums: it clears the sums of dq, and at the end turns them into dq.
        rows: it also prepares the rows.
        heads: query heads whose sums of dq it needs at a time.
    """

    sums: bool = False
    rows: bool = False
    heads: int = 0


class Passes(NamedTuple):
    """Hold what the fused kernel reads and writes for its `OwnPasses`, or None.

    Attributes:
        dq_rows: dq by its address, if needed besides a descriptor.
        dout, out, statistics: None if the rows are prepared before.
    """

    dq: Any = None
    dq_rows: Any = None
    dout: Any = None
    out: Any = None
    statistics: Any = None


class Sums(NamedTuple):
    """The float32 sums of gradients, or None; they start at 0, or `passes` clear those of dq."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    passes: Passes = Passes()


class Fused(NamedTuple):
    """Hold what surrounds a kernel of dk and dv that sums dq as well.

    Attributes:
        postprocess: turns float32 sums into a gradient.
        sum_columns: returns the sums' columns, from the head size.
        splits: programs may share a tile of keys, and then sum dk and dv too.
        own_passes: its last argument is how many query heads a tile of keys visits.
    """

    postprocess: Kernel
    sum_columns: Callable[[int], int]
    splits: bool = False
    own_passes: Callable[[AttentionSpec, Backend, torch.device, int], OwnPasses] | None = None


class BackwardKernels(NamedTuple):
    """The backward kernels of a family.

    Attributes:
        dkdv: the kernel of dk and dv, or one for each, with the same operands.
        fused: how the first of `dkdv` also computes dq, where configured.
        rows_of_dq: returns the dq kernel's operands behind dout; prepares the rows, unless the
            kernel does.
        terms_gradients: compute gradients of terms, by name, in portable kernels. Other kernels
            then take the terms before the mask. None without terms.
        item_counter: makes a launch's counter, which precedes sums, terms and mask.
        mask_of: makes a kernel's mask; None for ranges that torch computes.
    """

    dq: Kernel
    dkdv: tuple[Kernel, ...]
    fused: Fused | None = None
    rows_of_dq: Callable[[Computation], tuple[Any, ...]] = lambda x: x.prepared_rows()
    terms_gradients: tuple[Callable[..., dict[str, Tensor]], ...] | None = None
    item_counter: Callable[..., Tensor | None] | None = None
    mask_of: Callable[[str, AttentionOperands[Tensor], AttentionSpec, Backend], Mask] | None = None
    num_warps: int | None = None


@dataclass(frozen=True)
class Computation:
    """Hold what the kernels of a backward read and write; `stored`: terms with gradients."""

    operands: AttentionOperands[Tensor]
    dout: Tensor
    out: Tensor
    statistics: Statistics
    grads: tuple[Tensor, Tensor, Tensor]
    terms: tuple[Terms, ...]
    stored: tuple[Terms, ...]
    spec: AttentionSpec
    backend: Backend
    kernels: BackwardKernels

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        q, k, v = self.operands[:3]
        return q, k, v, self.dout, self.statistics.lse2, self.statistics.delta

    @cached_property
    def computed_mask(self) -> Mask:
        """Return the mask with ranges that torch computes."""
        return mask_of_keys(self.operands, self.spec)

    def prepare_rows(self) -> None:
        segments = segments_of(self.operands)
        queries = offsets_of(self.operands).q, segments and segments.q
        preprocess(self.dout, self.out, self.statistics, self.spec, self.backend, *queries)

    def prepared_rows(self) -> tuple[Tensor, Tensor]:
        self.prepare_rows()
        return self.statistics.lse2, self.statistics.delta

    def launch(
        self,
        name: str,
        kernel: Kernel,
        tensors: tuple[Any, ...],
        terms: tuple[Terms, ...],
        sums: tuple[Sums, ...] = (),
        **needs: bool,
    ) -> None:
        """Launch a kernel with its own mask and counter.

        The sums, some of which are of given tensors, are behind other tensors: see
        `twin_attention.interop.kernels.triton_call`.
        """
        (q, *_), kernels = self.operands, self.kernels
        if kernels.mask_of is not None:
            mask = kernels.mask_of(name, self.operands, self.spec, self.backend)
        else:
            of_keys = name == "flash_bwd_dq"
            mask = self.computed_mask if of_keys else mask_of_queries(self.operands, self.spec)
        counter = kernels.item_counter and (kernels.item_counter(q, self.spec, **needs),)
        options = {} if kernels.num_warps is None else {"num_warps": kernels.num_warps}
        operands = (*tensors, *(counter or ()), *sums, *terms, mask)
        launch(name, *kernel, operands, self.spec, self.backend, **options)


def launch_dq(x: Computation) -> None:
    """Launch the dq kernel, and before it the preprocess if need be."""
    operands = (*x.inputs[:4], *x.kernels.rows_of_dq(x), x.grads[0])
    x.launch("flash_bwd_dq", x.kernels.dq, operands, x.stored)


def launch_dkdv(x: Computation) -> None:
    sums = () if x.kernels.fused is None else (Sums(),)
    for kernel in x.kernels.dkdv:
        x.launch("flash_bwd_dkdv", kernel, (*x.inputs, *x.grads[1:]), x.terms, sums)


def launch_fused(x: Computation, fused: Fused) -> tuple[Terms, ...]:
    """Launch the fused kernel and its passes; return the terms with gradients."""
    spec, (q, *_), lse2 = x.spec, x.operands, x.statistics.lse2
    splits = fused.splits and _splits_group(spec, x.backend, q.device)
    own = OwnPasses()
    if fused.own_passes is not None:
        own = fused.own_passes(spec, x.backend, q.device, 1 if splits else spec.group_size)
    if not own.rows:
        x.prepare_rows()
    heads = (own.heads,) if own.sums else (spec.batch, spec.heads_q)
    summed = [(spec, x.grads[0], (*heads, lse2.shape[-1]))]
    if splits:
        rows = triton.cdiv(spec.seq_kv, ROW_PADDING.value) * ROW_PADDING.value
        shape = (spec.batch, spec.heads_kv, rows)
        of_both = zip(_as_queries(spec), x.grads[1:], strict=True)
        summed += [(part, grad, shape) for part, grad in of_both]
    sums = [lse2.new_empty((*shape, fused.sum_columns(p.head_dim))) for p, _grad, shape in summed]
    first = int(own.sums)
    for values in sums[first:]:
        values.zero_()
    of_rows = (x.dout, x.out, x.statistics) if own.rows else ()
    passes = Passes(x.grads[0], None, *of_rows) if own.sums else Passes()
    stored = tuple(_with_added(terms, q, spec) for terms in x.stored)
    own_sums = (Sums(*sums)._replace(passes=passes),)
    needs = {"has_uneven": True, "has_sections": own.sums}
    tensors = (*x.inputs, *x.grads[1:])
    x.launch("flash_bwd_fused", x.kernels.dkdv[0], tensors, stored, own_sums, **needs)
    offsets = offsets_of(x.operands).q
    for (part, grad, _shape), values in zip(summed[first:], sums[first:], strict=True):
        tensors = (values, grad, offsets)
        launch("flash_bwd_postprocess", *fused.postprocess, tensors, part, x.backend)
    return stored


def _with_added(terms: Terms, q: Tensor, spec: AttentionSpec) -> Terms:
    shared = shared_gradient(terms.bias, q, spec)
    dbias = terms.dbias if shared.entries is None else shared
    return terms._replace(dbias=dbias, drelative=added_gradient(terms, spec))


def make_flash_bwd(kernels: BackwardKernels) -> Callable[..., AttentionOperands[Tensor]]:
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

        `dout` [B, Sq, Hq, Dv] has strides that the family takes, `dlse` [B, Hq, Sq] float32 is
        contiguous or None, `rest` the forward's `rest_of_lse` or None. Packed sequences have no
        batch axis. Return the gradient of each operand that is not frozen, contiguous.
        """
        rows = (spec.batch, spec.heads_q, num_padded_rows(spec))
        lse2, delta = (lse.new_empty(rows) for _ in range(2))
        rest2 = None if rest is None else lse.new_empty(rows)
        terms = (terms_of(operands, spec)._replace(rest2=rest2),)
        if kernels.terms_gradients is None:
            terms = ()
        stored = tuple(x._replace(dbias=stored_gradient(x.bias, spec)) for x in terms)
        stores = all(is_multiplied(x.dbias, operands.q) for x in stored)
        if kernels.fused is not None and (spec.wide_bias or not stores):
            # The fused kernel gives a gradient of a bias only if TMA can store it, and has no
            # registers for a bias in float32.
            spec = replace(spec, deterministic=True)
        statistics = Statistics(lse, dlse, lse2, delta, rest, rest2)
        dq, dk, dv = (x.new_empty(x.shape) for x in operands[:3])
        inputs = operands, dout, out, statistics, (dq, dk, dv), terms, stored
        x = Computation(*inputs, spec, backend, kernels)
        if kernels.fused is not None and "flash_bwd_fused" in backend.configs(spec):
            stored = launch_fused(x, kernels.fused)
        else:
            launch_dq(x)
            launch_dkdv(x)
        others = operands._replace(**dict.fromkeys(spec.frozen))
        dsinks = sinks_gradient(others.sinks, lse2, delta, rest2)
        gradients: dict[str, Tensor | None] = {"q": dq, "k": dk, "v": dv, "sinks": dsinks}
        for given in stored:
            if given.dbias.entries is not None:
                gradients["bias"] = given.dbias.entries
                others = others._replace(bias=None)
            if given.drelative is not None:
                gradients["relative_bias"] = given.drelative.to(given.relative.dtype)
                others = others._replace(relative_bias=None)
        for gradient in (spec.terms and kernels.terms_gradients) or ():
            gradients |= gradient(others, x.inputs, *terms, x.computed_mask, spec, backend)
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
    if sinks is None:
        return None
    of_heads = sinks[:, None]
    if rest2 is None:
        p = torch.exp2(of_heads * LOG2E.value - lse2)
    else:
        p = torch.exp2((of_heads - lse2) * LOG2E.value - rest2)
    return -(p * delta).sum((0, 2))


def prepare_postprocess(call: KernelCall) -> Prepared:
    spec = call.spec
    rows = num_padded_rows(spec) if spec.is_packed else spec.seq_q
    tiles = triton.cdiv(rows, call.config.block_q)
    arguments = {
        "seq_q": spec.seq_q,
        "heads_q": spec.heads_q,
        "scale": spec.scale,
        "HEAD_DIM": spec.head_dim,
        "num_sequences": num_sequences(spec),
    }
    return (tiles * spec.heads_q * spec.batch,), arguments
