"""The float64 oracle and its low-precision run, in pieces that fit in memory.

Flash attention is evaluated one kv head of one sequence at a time, so that memory stays
O(Sq · Skv). A case too large for that is evaluated on a few samples, at the start, around element
2^31 and at the end of its tensors. Decoding is evaluated one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from interop.parity.inputs import Tensors
from twin_attention.contract.reference import attention_backward, attention_forward, paged_forward
from twin_attention.contract.spec import AttentionSpec, DecodeSpec

# Above this many elements of q, 8 GiB in float64, only samples are evaluated.
SAMPLE_ABOVE = 1 << 30
# Of a sequence longer than this a sample evaluates only a stretch.
STRETCH = 4096


@dataclass(frozen=True)
class Block:
    """A part of a flash attention problem that can be evaluated on its own.

    Attributes:
        batch, heads_kv, queries, keys: the part, as slices with explicit ends; query heads
            follow from the kv heads.
        inner: which of its queries and keys have all their partners inside the block.
    """

    batch: slice
    heads_kv: slice
    queries: slice
    keys: slice
    inner: slice

    @classmethod
    def whole(cls, spec: AttentionSpec) -> Block:
        return cls(
            slice(0, spec.batch),
            slice(0, spec.heads_kv),
            slice(0, spec.seq_q),
            slice(0, spec.seq_kv),
            inner=slice(None),
        )

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        """The problem that the block is, as a part of the problem `spec`."""
        heads_kv = _length(self.heads_kv)
        return replace(
            spec,
            batch=_length(self.batch),
            heads_kv=heads_kv,
            heads_q=heads_kv * spec.group_size,
            seq_q=_length(self.queries),
            seq_kv=_length(self.keys),
        )

    def crop(self, tensors: Tensors, spec: AttentionSpec) -> Tensors:
        """Views of the block in the inputs or results of the problem `spec`."""
        group = spec.group_size
        heads_q = slice(self.heads_kv.start * group, self.heads_kv.stop * group)
        views = {}
        for name, x in tensors.items():
            if name in ("lse", "dlse"):
                views[name] = x[self.batch, heads_q, self.queries]
            elif name in ("k", "v", "dk", "dv"):
                views[name] = x[self.batch, self.keys, self.heads_kv]
            else:
                views[name] = x[self.batch, self.queries, heads_q]
        return views

    def crop_results(self, results: Tensors, spec: AttentionSpec) -> Tensors:
        """The inner queries and keys of the block in the results of the problem `spec`."""
        return self.crop_inner(self.crop(results, spec))

    def crop_inner(self, tensors: Tensors) -> Tensors:
        """The inner queries and keys of results that the block's own evaluation gave."""
        return {
            name: x[..., self.inner] if name == "lse" else x[:, self.inner]
            for name, x in tensors.items()
        }


@dataclass(frozen=True)
class Expectation:
    """What the results should be, all of them or a sample.

    Attributes:
        ref, lp: the oracle's results, and the low-precision run's.
        crop: gives of all results the part that `ref` and `lp` are.
    """

    ref: Tensors
    lp: Tensors
    crop: Callable[[Tensors], Tensors]


def expectations(inputs: Tensors, spec: AttentionSpec | DecodeSpec) -> list[Expectation]:
    """What the results of a case should be, everything at once or on samples.

    Args:
        inputs: as `make_inputs` gives them.
        spec: the problem.
    """
    dtypes = (torch.float64, getattr(torch, spec.dtype))
    if isinstance(spec, DecodeSpec):
        ref, lp = (evaluate(inputs, spec, dtype) for dtype in dtypes)
        return [Expectation(ref, lp, crop=lambda results: results)]
    found = []
    for block in blocks(spec):
        part, part_spec = block.crop(inputs, spec), block.spec(spec)
        ref, lp = (block.crop_inner(evaluate(part, part_spec, dtype)) for dtype in dtypes)
        found.append(Expectation(ref, lp, partial(block.crop_results, spec=spec)))
    return found


def evaluate(inputs: Tensors, spec: AttentionSpec | DecodeSpec, dtype: torch.dtype) -> Tensors:
    """Results of the contract's plain formula in `dtype`.

    Returns:
        out and lse, with dout and dlse among the inputs also dq, dk and dv; shaped as the results
        of the twins.
    """
    if isinstance(spec, DecodeSpec):
        return _evaluate_decode(inputs, spec, dtype)
    return _evaluate_flash(inputs, spec, dtype)


def _evaluate_flash(inputs: Tensors, spec: AttentionSpec, dtype: torch.dtype) -> Tensors:
    q, gradients = inputs["q"], "dout" in inputs
    results = {
        "out": q.new_empty((*q.shape[:3], spec.head_dim_v), dtype=dtype),
        "lse": q.new_empty((spec.batch, spec.heads_q, spec.seq_q), dtype=dtype),
    }
    if gradients:
        results |= {f"d{name}": torch.empty_like(inputs[name], dtype=dtype) for name in "qkv"}
    whole = Block.whole(spec)
    for b in range(spec.batch):
        for h in range(spec.heads_kv):
            piece = replace(whole, batch=slice(b, b + 1), heads_kv=slice(h, h + 1))
            x, piece_spec = piece.crop(inputs, spec), piece.spec(spec)
            qkv = x["q"], x["k"], x["v"]
            out, lse = attention_forward(*qkv, piece_spec, dtype)
            values = [out, lse]
            if gradients:
                values += attention_backward(x["dout"], x["dlse"], *qkv, piece_spec, dtype)
            for target, value in zip(piece.crop(results, spec).values(), values, strict=True):
                target.copy_(value)
    return results


def _evaluate_decode(inputs: Tensors, spec: DecodeSpec, dtype: torch.dtype) -> Tensors:
    q = inputs["q"].view(spec.batch, spec.tokens, spec.heads_q, spec.head_dim)
    operands = dict.fromkeys(("sinks", "k_scale", "v_scale")) | inputs
    out = q.new_empty((*q.shape[:3], spec.head_dim_v), dtype=dtype)
    lse = q.new_empty((spec.batch, spec.heads_q, spec.tokens), dtype=dtype)
    for b in range(spec.batch):
        one = slice(b, b + 1)
        rows = {name: inputs[name][one] for name in ("block_tables", "seq_lens")}
        operands |= rows | {"q": q[one]}
        out[one], lse[one] = paged_forward(**operands, spec=replace(spec, batch=1), dtype=dtype)
    if inputs["q"].ndim == 3:
        out, lse = out.squeeze(1), lse.squeeze(2)
    return {"out": out, "lse": lse}


def blocks(spec: AttentionSpec) -> list[Block]:
    """Everything as one block, or samples when q has more than `SAMPLE_ABOVE` elements."""
    shape = (spec.batch, spec.seq_q, spec.heads_q, spec.head_dim)
    elements = torch.Size(shape).numel()
    if elements <= SAMPLE_ABOVE:
        return [Block.whole(spec)]
    found = []
    for element in (0, (1 << 31) - 1, 1 << 31, elements - 1):
        if element < elements:
            row = element // (spec.heads_q * spec.head_dim)
            head = element // spec.head_dim % spec.heads_q
            found.append(_sample(spec, row // spec.seq_q, row % spec.seq_q, head))
    return found


def _sample(spec: AttentionSpec, batch: int, token: int, head: int) -> Block:
    """The kv head of one sequence that a query belongs to, or a stretch of it around the query.

    A stretch is square on the diagonal: the same tokens as queries and as keys, so that every
    position stays what it was. A key's gradient depends on queries within the window, and theirs
    on keys within the window again, so that a halo of left + right tokens is not compared, but
    where the stretch ends with the sequence.
    """
    heads = slice(head // spec.group_size, head // spec.group_size + 1)
    one = replace(Block.whole(spec), batch=slice(batch, batch + 1), heads_kv=heads)
    left, right = spec.window.left, spec.window.right
    if spec.seq_q <= STRETCH or spec.seq_q != spec.seq_kv or left is None or right is None:
        return one
    start = min(max(token - STRETCH // 2, 0), spec.seq_q - STRETCH)
    stretch = slice(start, start + STRETCH)
    halo = left + right
    inner = slice(
        halo if stretch.start > 0 else 0,
        STRETCH - halo if stretch.stop < spec.seq_q else STRETCH,
    )
    return replace(one, queries=stretch, keys=stretch, inner=inner)


def _length(part: slice) -> int:
    return part.stop - part.start
