"""Run the float64 oracle and its low-precision run, in pieces that fit in memory.

A piece is one kv head of one sequence and some queries, or one packed or paged sequence. Problems
too large to evaluate whole are sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from random import Random
from typing import Any

import torch

from twin_attention.contract.block_mask import BlockMask
from twin_attention.contract.operands import (
    BlockSparseOperands,
    DecodeOperands,
    FlashOperands,
    PagedOperands,
    VarlenOperands,
)
from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec, PagedSpec
from twin_attention.contract.reference.cache import quantize
from twin_attention.contract.reference.kinds import backward_of, forward_of, jvp_of
from twin_attention.contract.reference.merge import merge, merge_backward
from twin_attention.contract.reference.paged import paged_forward, ragged_forward
from twin_attention.contract.reference.rotary import rotate
from twin_attention.contract.spec import (
    AttentionSpec,
    BlockSparseSpec,
    DilatedSpec,
    MergeSpec,
    VarlenSpec,
    Window,
)
from twin_attention.contract.tolerances import cancelled_gradient, cancelled_sum, rounded_delta
from twin_attention.interop.parity.inputs import TANGENTS, Tensors, has_gradient

SAMPLE_ABOVE = 1 << 30  # elements of q, 8 GiB in float64: a larger problem is only sampled
STRETCH = 4096  # a sample of a longer sequence is a stretch of it
SCORES = 1 << 25  # at a time: 256 MiB for each copy in float64
SAMPLES = 4  # heads or sequences
WIDER = 128  # distances on each side of a table, by which its ends' errors are found
OF_TOKENS = ("q", "tree_ends", "q_ranges")
SUMS = ("dsinks", "drelative_bias", "dbias")  # over all sequences
OF_ROWS = ("lse", "row_max")  # results of the forward, beside out
OF_TANGENTS = ("tout", "tlse")

# Or a VarlenSpec or PagedSpec, which is one of these.
Spec = AttentionSpec | DecodeSpec | AppendSpec | MergeSpec


@dataclass(frozen=True)
class Part:
    """A part of a problem that can be evaluated separately.

    Attributes:
        where: its index, by name; other tensors are used whole.
        inner: what is compared; None for all.
        first: its first batch element and query head.
    """

    spec: Any
    where: Mapping[str, Any] = field(default_factory=dict)
    inner: slice | None = None
    first: tuple[int, int] = (0, 0)

    def crop(self, tensors: Tensors) -> Tensors:
        return {name: x[self._index(name, x)] if x.ndim else x for name, x in tensors.items()}

    def _index(self, name: str, x: torch.Tensor) -> Any:
        index = self.where.get(name, ...)
        if name in ("bias", "dbias") and index is not ...:
            return tuple(i if n > 1 else slice(None) for i, n in zip(index, x.shape, strict=False))
        if name == "alibi_slopes" and x.ndim == 1:  # sequences share them
            return index[-1] if isinstance(index, tuple) else ...
        return index

    def crop_inner(self, results: Tensors) -> Tensors:
        """Return the results that are compared: inner rows, and no sums over other parts."""
        if self.where:
            results = {name: x for name, x in results.items() if name not in SUMS}
        if self.inner is None:
            return results
        return {
            name: x[..., self.inner] if name in OF_ROWS else x[:, self.inner]
            for name, x in results.items()
        }


@dataclass(frozen=True)
class Expectation:
    """The right results of a part: `ref` by the oracle, `lp` by the low-precision run.

    `cancelled` allows for sums that cancel: dsinks, and the gradients that come from ds. `errors`
    are what rows or numbers of those may have where lp has less by chance. `exponents` are
    log-sum-exps of q·k without terms.
    """

    part: Part
    ref: Tensors
    lp: Tensors
    exponents: torch.Tensor | None = None
    cancelled: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def crop(self, results: Tensors) -> Tensors:
        return self.part.crop_inner(self.part.crop(results))


def expectations(inputs: Tensors, parts: Iterable[Part]) -> list[Expectation]:
    """Evaluate parts from `parts_of` or `sample_of`, given the whole problem's inputs."""
    found = []
    for part in parts:
        own = part.crop(inputs)
        ref = part.crop_inner(evaluate(own, part.spec, torch.float64, part.first))
        lp = _in_low_precision(own, part, ref)
        cancelled = _cancelled(own, part.spec)
        if "dsinks" in ref:
            terms = _terms_of_sinks(own, ref)
            errors = _terms_of_sinks(own, lp) - terms
            lp["dsinks"] = _as_wrong_as(ref["dsinks"], lp["dsinks"], errors.square().sum(1).sqrt())
            cancelled["dsinks"] = cancelled_sum(terms)
        if "dbias" in ref and own["bias"].shape[-1] == 1:
            # A sum of ds over a row's keys has delta's error.
            errors = (_delta(own, lp) - _delta(own, ref)).nan_to_num()[..., None]
            expected = errors.square().sum_to_size(own["bias"].shape).sqrt()
            lp["dbias"] = _as_wrong_as(ref["dbias"], lp["dbias"], expected)
        errors = _errors(own, part, ref, lp)
        found.append(Expectation(part, ref, lp, _exponents(own, part, ref), cancelled, errors))
    return found


def _in_low_precision(inputs: Tensors, part: Part, ref: Tensors) -> Tensors:
    """Return the results in the inputs' dtype.

    Where float16's range ends, an error is an eighth of bfloat16's, whose mantissa is three bits
    shorter, or float32's, in which kernels add terms to scores, if that is larger.
    """

    def run(dtype: torch.dtype) -> Tensors:
        return part.crop_inner(evaluate(inputs, part.spec, dtype, part.first))

    lp = run(getattr(torch, part.spec.dtype))
    if part.spec.dtype != "float16" or all(
        (x.isfinite() >= ref[name].isfinite()).all() for name, x in lp.items()
    ):
        return lp
    coarse, fine = run(torch.bfloat16), run(torch.float32)

    def error(results: Tensors, name: str) -> torch.Tensor:
        return (results[name].double() - ref[name]).abs()

    return {
        name: fine[name]  # always of float32
        if name in OF_ROWS
        else ref[name] + torch.maximum(error(coarse, name) / 8, error(fine, name))
        for name in lp
    }


def _exponents(inputs: Tensors, part: Part, ref: Tensors) -> torch.Tensor | None:
    """Return lse before a softcap and without terms: a score keeps the error of its product."""
    spec = part.spec
    if not isinstance(spec, AttentionSpec) or (not spec.terms and spec.softcap is None):
        return ref.get("lse")
    plain = replace(spec, terms=(), wide_bias=False, softcap=None)
    own = {name: x for name, x in inputs.items() if name not in (*part.spec.terms, "dout", "dlse")}
    return part.crop_inner(evaluate(own, plain, torch.float64, part.first))["lse"]


def _errors(inputs: Tensors, part: Part, ref: Tensors, lp: Tensors) -> Tensors:
    """Return expected errors of rows of dq and dk, and of numbers of dbias and drelative_bias.

    They come from the rounding of out in delta. Numbers of a bias are grouped by shared queries or
    keys.
    """
    spec, found = part.spec, {}
    if "dq" not in ref or not isinstance(spec, AttentionSpec):
        return found
    dtype = "tf32" if spec.precision == "tf32" else spec.dtype
    dout = part.crop_inner({"dout": inputs["dout"]})["dout"].double()
    delta = rounded_delta(ref["out"], dout, dtype)
    scale = abs(spec.scale)
    found["dq"] = scale * delta * _rms(inputs["k"])
    found["dk"] = scale * _rms(delta) * _rms(inputs["q"]) * _rows_of_a_key(spec) ** 0.5
    if "dbias" in ref:
        shape = (*ref["dbias"].shape[:3], 1)
        of_rows = delta.mT[..., None].square().sum_to_size(shape).sqrt()
        found["dbias"] = of_rows.hypot(_rms(lp["dbias"].double() - ref["dbias"], -1))
    if "drelative_bias" in ref:
        found["drelative_bias"] = _errors_of_table(inputs, spec, delta)
    return found


def _errors_of_table(inputs: Tensors, spec: AttentionSpec, delta: torch.Tensor) -> torch.Tensor:
    """Return the expected errors of a table's gradient; its ends' errors are a wider table's.

    The one number of a table may sum rows of a single distance, with nothing wider: it has at least
    the errors of their delta.
    """
    table = inputs["relative_bias"]
    first, last = (x.expand(-1, WIDER) for x in (table[:, :1], table[:, -1:]))
    wide = inputs | {"relative_bias": torch.cat([first, table, last], 1)}
    ref = evaluate(wide, spec, torch.float64)
    lp = _in_low_precision(wide, Part(spec), ref)
    errors = (lp["drelative_bias"].double() - ref["drelative_bias"]).square()
    if table.shape[1] == 1:
        return (errors.sum(1) + delta.square().sum((0, 1))).sqrt()[:, None]
    first, near, last = errors.tensor_split((WIDER + 1, errors.shape[1] - WIDER - 1), 1)
    near = torch.full_like(near, float(_rms(near.sqrt())) ** 2)
    return torch.cat([first.sum(1, keepdim=True), near, last.sum(1, keepdim=True)], 1).sqrt()


def _rms(x: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    squares = x.double().nan_to_num().square()
    keep = {} if axis is None else {"dim": axis, "keepdim": True}
    return (squares.sum(**keep) / (squares > 0).sum(**keep).clamp(min=1)).sqrt()


def _cancelled(inputs: Tensors, spec: Spec) -> dict[str, float]:
    found = {}
    if not isinstance(spec, AttentionSpec):
        return found
    pairs = [x for x in (("tq", "k"), ("q", "tk")) if {*x} <= inputs.keys()]
    if pairs:
        v = inputs["v"].double().nan_to_num()
        both = ((inputs[x].double().nan_to_num() for x in pair) for pair in pairs)
        found["tout"] = sum(cancelled_gradient(spec.scale, *x, v, 1.0) for x in both)
    if "dout" not in inputs:
        return found
    q, k, v, dout = (inputs[name].double().nan_to_num() for name in ("q", "k", "v", "dout"))
    found |= {
        "dq": cancelled_gradient(spec.scale, dout, v, k, 1.0),
        "dk": cancelled_gradient(spec.scale, dout, v, q, _rows_of_a_key(spec)),
    }
    for name in ("bias", "relative_bias"):  # added to scores: ds, summed over rows that share it
        if name in inputs:
            sharing = spec.batch * spec.heads_q * spec.seq_q / max(1, prod(inputs[name].shape[:-1]))
            ones = torch.ones_like(v[:1])
            found[f"d{name}"] = cancelled_gradient(1.0, dout, v, ones, max(1.0, sharing))
    return found


def _rows_of_a_key(spec: AttentionSpec) -> float:
    """Return the mean number of rows with their largest probability at the same key."""
    return max(1.0, spec.seq_q * spec.group_size / max(1, spec.seq_kv))


def _delta(inputs: Tensors, results: Tensors) -> torch.Tensor:
    return (inputs["dout"] * results["out"].double()).sum(-1).transpose(-1, -2)


def _terms_of_sinks(inputs: Tensors, results: Tensors) -> torch.Tensor:
    p = (inputs["sinks"][:, None] - results["lse"].double()).exp()
    terms = (p * _delta(inputs, results)).nan_to_num(0.0, 0.0, 0.0)
    return terms.movedim(-2, 0).flatten(1)


def _as_wrong_as(ref: torch.Tensor, lp: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return lp's sums over many rows, no nearer to ref than their expected errors.

    A sum's expected error is the root of its terms' squared errors.
    """
    error = lp.double() - ref
    return ref + torch.copysign(torch.maximum(error.abs(), expected), error)


def parts_of(spec: Spec) -> list[Part]:
    """Return the whole problem, or samples if q has more than `SAMPLE_ABOVE` elements.

    Samples lie at the start, around element 2^31, and at the end of q.
    """
    if isinstance(spec, DecodeSpec | DilatedSpec | VarlenSpec | AppendSpec | MergeSpec):
        return [Part(spec)]
    elements = spec.batch * spec.seq_q * spec.heads_q * spec.head_dim
    if elements <= SAMPLE_ABOVE:
        return [Part(spec)]
    samples = (0, (1 << 31) - 1, 1 << 31, elements - 1)
    return [_around(spec, element) for element in samples if element < elements]


def sample_of(spec: Spec, samples: int = SAMPLES) -> list[Part]:
    """Return fixed samples: the first and last kv heads or sequences, and some between."""
    if isinstance(spec, DilatedSpec | VarlenSpec | AppendSpec | MergeSpec):
        return [Part(spec)]
    if isinstance(spec, PagedSpec):
        parts = _paged_heads(spec)
    else:
        parts = _sequences(spec) if isinstance(spec, DecodeSpec) else _heads(spec)
    if len(parts) <= samples:
        return parts
    between = Random(0).sample(range(1, len(parts) - 1), samples - 2)
    return [parts[i] for i in (0, *sorted(between), len(parts) - 1)]


def evaluate(
    inputs: Tensors, spec: Spec, dtype: torch.dtype, first: tuple[int, int] = (0, 0)
) -> Tensors:
    """Run the contract's plain formula in `dtype`; return out, lse, and gradients if there is dout.

    With tangents of operands, return those of out and lse too; such a problem is evaluated whole.
    An append returns the pools, and q if given. `first` is as in `Part`.
    """
    if isinstance(spec, AppendSpec):
        return _evaluate_append(inputs, spec, dtype)
    if isinstance(spec, PagedSpec):
        return _evaluate_paged(inputs, spec, dtype)
    if isinstance(spec, DecodeSpec):
        return _evaluate_decode(inputs, spec, dtype)
    if isinstance(spec, MergeSpec):
        return _evaluate_merge(inputs, dtype)
    tangents = {x: inputs[t] for t, x in TANGENTS.items() if t in inputs}
    inputs = {name: x for name, x in inputs.items() if name not in TANGENTS}
    if isinstance(spec, VarlenSpec):
        results = _evaluate_varlen(inputs, spec, dtype)
    else:
        results = _evaluate_flash(inputs, spec, dtype, first)
    if tangents:
        kind: Any = VarlenOperands if isinstance(spec, VarlenSpec) else FlashOperands
        both = (kind(*map(x.get, kind._fields)) for x in (tangents, inputs))
        results |= zip(OF_TANGENTS, jvp_of(spec)(*both, spec, dtype), strict=True)
    return results


def _evaluate_flash(
    inputs: Tensors, spec: AttentionSpec, dtype: torch.dtype, first: tuple[int, int]
) -> Tensors:
    results = _empty_results(inputs["q"], spec, dtype)
    names = [name for name in FlashOperands._fields if name in inputs]
    differentiable = [name for name in names if has_gradient(name, inputs[name])]
    forward, backward = forward_of(spec), backward_of(spec)
    if "dout" in inputs:
        # The chunks' own rounding is that of a plain run in `dtype`.
        exact = torch.promote_types(dtype, torch.float32)
        results |= {
            f"d{name}": torch.zeros_like(inputs[name], dtype=exact) for name in differentiable
        }
    for chunk in _chunks(spec):
        x, found = chunk.crop(inputs), chunk.crop(results)
        operands: Any = FlashOperands(**{name: x[name] for name in names})
        if spec.has_lists:
            lists = BlockMask.of(x["block_mask"])._asdict()
            operands = BlockSparseOperands(**{name: x[name] for name in names}, **lists)
        more = ()
        if spec.dropout is not None:
            more = ((first[0] + chunk.first[0], first[1] + chunk.first[1]),)
        for name, values in zip(found, forward(operands, chunk.spec, dtype, *more), strict=False):
            found[name][:] = values
        if "dout" in x:
            dout, dlse = x["dout"], x.get("dlse")
            gradients = backward(dout, dlse, operands, chunk.spec, dtype, *more)
            for name in differentiable:
                found[f"d{name}"] += getattr(gradients, name)
    return {name: x.to(dtype) for name, x in results.items()}


def _evaluate_varlen(inputs: Tensors, spec: VarlenSpec, dtype: torch.dtype) -> Tensors:
    """Evaluate each sequence separately; padding sees no key."""
    bounds = [inputs[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_kv")]
    inputs = {name: x for name, x in inputs.items() if not name.startswith("cu_")}
    results = _empty_results(inputs["q"][None], spec, dtype)
    results = {name: x[0] for name, x in results.items()}
    nothing = inputs["sinks"][:, None] if "sinks" in inputs else -torch.inf
    results["out"][:], results["lse"][:] = 0, nothing
    if spec.row_max:
        results["row_max"][:] = -torch.inf
    exact = torch.promote_types(dtype, torch.float32)
    shared = [name for name in ("sinks", "relative_bias") if name in inputs]
    for name in ("q", "k", "v", *shared) if "dout" in inputs else ():
        results[f"d{name}"] = torch.zeros_like(inputs[name], dtype=exact)
    if "dsinks" in results:
        dlse = inputs.get("dlse", torch.zeros_like(results["lse"]))
        results["dsinks"] += dlse[:, bounds[0][-1] :].to(exact).sum(1)
    for n, (begin_q, end_q, begin_kv, end_kv) in enumerate(
        zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False)
    ):
        queries, keys = slice(begin_q, end_q), slice(begin_kv, end_kv)
        where: dict[str, Any] = dict.fromkeys(
            ("q", "out", "dout", "dq", "q_depths", "q_ranges"), queries
        )
        where |= dict.fromkeys(("k", "v", "dk", "dv", "kv_ends", "kv_depths"), keys)
        where |= dict.fromkeys((*OF_ROWS, "dlse"), (slice(None), queries))
        one = Part(spec.sequence(end_q - begin_q, end_kv - begin_kv), where)
        own = {name: x for name, x in inputs.items() if name != "alibi_slopes"}
        whole = (*shared, "dropout_seed")
        batch = {name: x if name in whole else x[None] for name, x in one.crop(own).items()}
        if "alibi_slopes" in inputs:
            slopes = inputs["alibi_slopes"]
            batch["alibi_slopes"] = slopes[n] if slopes.ndim == 2 else slopes
        found, into = _evaluate_flash(batch, one.spec, dtype, (n, 0)), one.crop(results)
        for name, x in found.items():
            if name in SUMS:
                into[name] += x
            else:
                into[name][:] = x[0]
    return {name: x.to(dtype) for name, x in results.items()}


def _evaluate_decode(inputs: Tensors, spec: DecodeSpec, dtype: torch.dtype) -> Tensors:
    q = inputs["q"].reshape(spec.batch, spec.tokens, spec.heads_q, spec.head_dim)
    results = _empty_results(q, spec, dtype)
    for one in _sequences(spec):
        x, found = one.crop(inputs | {"q": q}), one.crop(results)
        # A table may be much wider than its sequence needs.
        pages = min(spec.cache.max_pages, -(-int(x["seq_lens"]) // spec.cache.page_size))
        x["block_tables"] = x["block_tables"][:, :pages]
        narrow = replace(spec, batch=1, cache=replace(spec.cache, max_pages=pages))
        found["out"][:], found["lse"][:] = paged_forward(
            DecodeOperands(**{"v_pages": None} | x), narrow, dtype
        )
    if inputs["q"].ndim == 3:
        return {"out": results["out"].squeeze(1), "lse": results["lse"].squeeze(2)}
    return results


def _evaluate_paged(inputs: Tensors, spec: PagedSpec, dtype: torch.dtype) -> Tensors:
    """Evaluate each sequence as a decode; padding sees no key."""
    bounds = inputs["cu_seqlens_q"].tolist()
    results = {name: x[0] for name, x in _empty_results(inputs["q"][None], spec, dtype).items()}
    nothing = inputs["sinks"][:, None] if "sinks" in inputs else -torch.inf
    results["out"][:], results["lse"][:] = 0, nothing
    for b, (begin, end) in enumerate(pairwise(bounds)):
        one, tokens = slice(b, b + 1), slice(begin, end)
        own = {name: x for name, x in inputs.items() if name != "cu_seqlens_q"}
        own |= {name: inputs[name][one] for name in ("block_tables", "seq_lens")}
        if "alibi_slopes" in inputs and inputs["alibi_slopes"].ndim == 2:
            own["alibi_slopes"] = inputs["alibi_slopes"][one]
        if spec.ranges:
            own |= {name: inputs[name][tokens] for name in OF_TOKENS if name in inputs}
            own["cu_seqlens_q"] = inputs["cu_seqlens_q"].new_tensor([0, end - begin])
            alone = replace(spec, batch=1, tokens=end - begin)
            found = ragged_forward(PagedOperands(**own), alone, dtype)
            results["out"][tokens], results["lse"][:, tokens] = found
            continue
        own |= {name: inputs[name][None, tokens] for name in OF_TOKENS if name in inputs}
        found = _evaluate_decode(own, spec.sequence(end - begin), dtype)
        results["out"][tokens], results["lse"][:, tokens] = found["out"][0], found["lse"][0]
    return results


def _evaluate_append(inputs: Tensors, spec: AppendSpec, dtype: torch.dtype) -> Tensors:
    cache = spec.cache
    new = {name: inputs[name].flatten(0, -3) for name in ("k_new", "v_new", "q") if name in inputs}
    bounds = range(0, spec.batch * spec.tokens + 1, max(1, spec.tokens))
    if spec.packed:
        bounds = inputs["cu_seqlens_q"].tolist()
    kept = [x for x in ("k", "v") if f"{x}_new" in inputs]
    pools = {f"{x}_pages": inputs[f"{x}_pages"].to(dtype, copy=True) for x in kept}
    q = torch.zeros_like(inputs["q"], dtype=dtype) if "q" in inputs else None
    for b, (begin, end) in enumerate(pairwise(bounds)):
        length, table = int(inputs["seq_lens"][b]), inputs["block_tables"][b].tolist()
        own = {name: x[begin:end].to(dtype) for name, x in new.items()}
        if spec.rotary_dim:
            position = torch.arange(begin, end, device=new["k_new"].device) - end + length
            angles = inputs["rotary_cos"], inputs["rotary_sin"]
            for name in own.keys() - {"v_new"}:
                own[name] = rotate(own[name], position, *angles, spec.interleaved, dtype)
        if q is not None:
            q.flatten(0, -3)[begin:end] = own["q"]
        for x in kept:
            if cache.is_quantized:
                stored = getattr(torch, cache.dtype)
                own[f"{x}_new"] = quantize(own[f"{x}_new"], inputs[f"{x}_scale"], cache, stored)
            for t, key in enumerate(own[f"{x}_new"]):
                p = length - (end - begin) + t
                if 0 <= p < cache.capacity and 0 <= table[p // cache.page_size] < cache.num_pages:
                    page, slot = table[p // cache.page_size], p % cache.page_size
                    pools[f"{x}_pages"][page, slot] = key.to(dtype)
    return pools if q is None else {"q": q, **pools}


def _evaluate_merge(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    states = inputs["outs"], inputs["lses"]
    results: Tensors = dict(zip(("out", "lse"), merge(*states, dtype), strict=True))
    if "dout" in inputs:
        gradients = merge_backward(inputs["dout"], inputs.get("dlse"), *states, dtype)
        results |= dict(zip(("douts", "dlses"), gradients, strict=True))
    return results


def _empty_results(
    q: torch.Tensor, spec: AttentionSpec | DecodeSpec, dtype: torch.dtype
) -> Tensors:
    batch, rows, heads, _ = q.shape
    out = q.new_empty((batch, rows, heads, spec.head_dim_v), dtype=dtype)
    names = OF_ROWS if isinstance(spec, AttentionSpec) and spec.row_max else OF_ROWS[:1]
    return {"out": out} | {x: q.new_empty((batch, heads, rows), dtype=dtype) for x in names}


def _sequences(spec: DecodeSpec) -> list[Part]:
    one = replace(spec, batch=1)
    names = ("q", "block_tables", "seq_lens", "tree_ends", "alibi_slopes", "out", "lse")
    return [Part(one, dict.fromkeys(names, slice(b, b + 1))) for b in range(spec.batch)]


def _paged_heads(spec: PagedSpec) -> list[Part]:
    group, every = spec.group_size, slice(None)
    one = replace(spec, heads_q=group, cache=replace(spec.cache, heads=1))

    def part(head: int) -> Part:
        heads_q, heads_kv = slice(head * group, head * group + group), slice(head, head + 1)
        where: dict[str, Any] = dict.fromkeys(("q", "out"), (every, heads_q))
        where |= dict.fromkeys(("lse", "sinks"), heads_q) | {"alibi_slopes": (every, heads_q)}
        where |= dict.fromkeys(("k_pages", "v_pages"), (every, every, heads_kv))
        return Part(one, where | dict.fromkeys(("k_scale", "v_scale"), heads_kv))

    return [part(head) for head in range(spec.heads_kv)]


def _heads(spec: AttentionSpec) -> list[Part]:
    heads = product(range(spec.batch), range(spec.heads_kv))
    return [_block(spec, b, h, slice(0, spec.seq_q), slice(0, spec.seq_kv)) for b, h in heads]


def _chunks(spec: AttentionSpec) -> Iterator[Part]:
    """Yield the kv heads in chunks of queries; a dilated attention, chosen by head, is one."""
    if isinstance(spec, DilatedSpec):
        yield Part(spec)
        return
    size = max(1, SCORES // max(1, spec.group_size * spec.seq_kv))
    if spec.terms or spec.dropout is not None:  # positions are those of all queries
        size = max(1, spec.seq_q)
    if isinstance(spec, BlockSparseSpec):  # whole tiles
        size = -(-size // spec.tile_q) * spec.tile_q
    starts = range(0, spec.seq_q, size)
    for b, h, start in product(range(spec.batch), range(spec.heads_kv), starts):
        queries = slice(start, min(start + size, spec.seq_q))
        yield _block(spec, b, h, queries, slice(0, spec.seq_kv))


def _block(spec: AttentionSpec, batch: int, head: int, queries: slice, keys: slice) -> Part:
    """Return these queries and keys of one kv head; both slices have explicit ends.

    The window moves if the block's last query does not stand at its last key. Ends and
    ranges count from the first key of the whole, so a block with them has all keys.
    """
    group, one, heads_kv = spec.group_size, slice(batch, batch + 1), slice(head, head + 1)
    heads_q = slice(head * group, head * group + group)
    where: dict[str, Any] = dict.fromkeys(("q", "out", "dout", "dq"), (one, queries, heads_q))
    where |= dict.fromkeys(("k", "v", "dk", "dv"), (one, keys, heads_kv))
    where |= dict.fromkeys((*OF_ROWS, "dlse"), (one, heads_q, queries))
    where |= dict.fromkeys(("sinks", "relative_bias", *SUMS), heads_q)
    where["alibi_slopes"] = one, heads_q
    where |= dict.fromkeys(("bias", "dbias"), (one, heads_q, queries, keys))
    where |= dict.fromkeys(("q_segment_ids", "q_depths", "q_ranges"), (one, queries))
    where |= dict.fromkeys(("kv_segment_ids", "kv_depths", "kv_ends"), (one, keys))
    ahead = (spec.seq_q - queries.stop) - (spec.seq_kv - keys.stop)
    left, right = spec.window.left, spec.window.right
    window = Window(
        left if left is None or spec.depths else left + ahead,
        None if right is None else right - ahead,
    )
    lengths = {"seq_q": queries.stop - queries.start, "seq_kv": keys.stop - keys.start}
    own = replace(spec, batch=1, heads_q=group, heads_kv=1, window=window, **lengths)
    if isinstance(own, BlockSparseSpec):  # all keys, and queries from the start of a tile
        tiles = slice(queries.start // own.tile_q, -(-queries.stop // own.tile_q))
        sequences = one if own.mask_batch > 1 else slice(0, 1)
        heads = heads_q if own.mask_heads > 1 else slice(0, 1)
        where["block_mask"] = (sequences, heads, tiles)
        own = replace(own, mask_batch=1, mask_heads=group if own.mask_heads > 1 else 1)
    return Part(own, where, first=(batch, heads_q.start))


def _around(spec: AttentionSpec, element: int) -> Part:
    """Return the kv head of one sequence around an element of q, or a stretch of it.

    A stretch has the same tokens as queries and keys. A halo of left + right tokens is not
    compared: their gradients depend on tokens outside.
    """
    row, head = divmod(element // spec.head_dim, spec.heads_q)
    (batch, token), head = divmod(row, spec.seq_q), head // spec.group_size
    left, right = spec.window.left, spec.window.right
    is_whole = spec.seq_q <= STRETCH or spec.seq_q != spec.seq_kv or spec.tree or spec.ranges
    is_whole = is_whole or bool(spec.terms) or spec.dropout is not None
    if is_whole or left is None or right is None:
        return _block(spec, batch, head, slice(0, spec.seq_q), slice(0, spec.seq_kv))
    start = min(max(token - STRETCH // 2, 0), spec.seq_q - STRETCH)
    end, halo = start + STRETCH, left + right
    inner = slice(halo if start > 0 else 0, STRETCH - halo if end < spec.seq_q else STRETCH)
    block = _block(spec, batch, head, slice(start, end), slice(start, end))
    return replace(block, inner=inner)
