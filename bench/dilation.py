"""Dilated attention by its formula (Ding et al. 2023, LongNet, sections 2.2 and 2.3).

It calls `flash_attention` for each pair of a segment length and a rate, scatters the results back
and merges them by log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bench.job import Check
from twin_attention.contract.cost import backward_flops, forward_flops
from twin_attention.contract.spec import AttentionSpec, Dilation, MergeSpec
from twin_attention.interop.parity.cases import DilatedCase

if TYPE_CHECKING:
    from torch import Tensor

    from twin_attention.interop.parity.inputs import Tensors
    from twin_attention.interop.parity.oracle import Expectation

Attend = Callable[..., Any]


def torch_standard(attention: Attend, case: DilatedCase) -> Attend:
    import torch

    def attend(q, k, v):
        outs, lses = [], []
        heads = torch.arange(case.heads_q, device=q.device)
        for pair in case.spec.dilations:
            first = torch.arange(0, case.seq_q, pair.rate, device=q.device)
            tokens = first[:, None] + heads % pair.rate
            kept = (x[:, tokens, heads].reshape(-1, pair.kept, *x.shape[2:]) for x in (q, k, v))
            out, lse = attention(*kept, causal=case.causal, return_lse=True)
            rows = case.batch, -1, case.heads_q
            full = q.new_zeros(q.shape, dtype=torch.float32)
            full[:, tokens, heads] = out.reshape(*rows, case.head_dim).float()
            outs.append(full)
            full = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
            full[:, tokens, heads] = lse.mT.reshape(rows)
            lses.append(full)
        weights = torch.stack(lses).softmax(0)
        return (weights[..., None] * torch.stack(outs)).sum(0).to(q.dtype)

    return attend


def jax_standard(attention: Attend, case: DilatedCase) -> Attend:
    import jax
    import jax.numpy as jnp

    def attend(q, k, v):
        outs, lses = [], []
        heads = jnp.arange(case.heads_q)
        for pair in case.spec.dilations:
            tokens = jnp.arange(0, case.seq_q, pair.rate)[:, None] + heads % pair.rate
            kept = (x[:, tokens, heads].reshape(-1, pair.kept, *x.shape[2:]) for x in (q, k, v))
            out, lse = attention(*kept, causal=case.causal, return_lse=True)
            rows = case.batch, -1, case.heads_q
            out = out.reshape(*rows, case.head_dim).astype(jnp.float32)
            outs.append(jnp.zeros(q.shape, jnp.float32).at[:, tokens, heads].set(out))
            lse = lse.mT.reshape(rows)
            lses.append(jnp.full(q.shape[:3], -jnp.inf).at[:, tokens, heads].set(lse))
        weights = jax.nn.softmax(jnp.stack(lses), axis=0)
        return (weights[..., None] * jnp.stack(outs)).sum(0).astype(q.dtype)

    return attend


def dilated_flops(case: DilatedCase) -> tuple[int, int]:
    specs = [_spec_of(case, pair, case.heads_q) for pair in case.spec.dilations]
    return sum(map(forward_flops, specs)), sum(map(backward_flops, specs))


def dilated_check(case: DilatedCase, operation: str, tensors: list[Tensor]) -> Check:
    """Return a check of the first and the last head; one rate is 1, and kv heads are not shared."""
    from twin_attention.interop.parity.check import check_of

    q, k, v, dout = tensors
    inputs, results = {"q": q, "k": k, "v": v}, ("out",)
    if operation == "both":
        inputs, results = inputs | {"dout": dout}, ("out", "dq", "dk", "dv")
    heads = dict.fromkeys((0, case.heads_q - 1))
    return check_of([_expected(case, inputs, head) for head in heads], results)


def _expected(case: DilatedCase, inputs: Tensors, head: int) -> Expectation:
    import torch

    from twin_attention.interop.parity.oracle import Expectation, Part

    where = (slice(None), slice(None), slice(head, head + 1))
    part = Part(case.spec, dict.fromkeys((*inputs, "out", "dq", "dk", "dv"), where))
    own, dtype = part.crop(inputs), getattr(torch, case.dtype)
    ref, lses = _evaluate(case, own, head, torch.float64)
    lp, _ = _evaluate(case, own, head, dtype, lses)
    return Expectation(part, ref, lp)


def _evaluate(
    case: DilatedCase, inputs: Tensors, head: int, dtype: Any, lses: Tensor | None = None
) -> tuple[Tensors, Tensor]:
    """Return one head's results by the formula, and the pairs' log-sum-exps [N, B, S, 1].

    lses: exact ones to use instead; kernels have them in float32.
    """
    import torch

    from twin_attention.interop.parity.oracle import evaluate

    exact = torch.promote_types(dtype, torch.float32)
    pairs, qkv = case.spec.dilations, {name: inputs[name] for name in ("q", "k", "v")}
    specs = [_spec_of(case, pair, 1) for pair in pairs]
    outs = torch.stack([torch.zeros_like(inputs["q"], dtype=dtype) for _ in pairs])
    own_lses = torch.full_like(outs[..., 0], -torch.inf, dtype=torch.float64)
    for pair, spec, out, lse in zip(pairs, specs, outs, own_lses, strict=True):
        found = evaluate({x: _kept(qkv[x], pair, head) for x in qkv}, spec, dtype)
        _kept(out, pair, head)[:] = found["out"]
        _kept(lse, pair, head)[:] = found["lse"].mT
    lses = own_lses if lses is None else lses
    states = {"outs": outs, "lses": lses.mT} | {x: inputs[x] for x in ("dout",) if x in inputs}
    shape = (len(pairs), case.batch, case.seq_q, 1, case.head_dim)
    merged = evaluate(states, MergeSpec(*shape, case.dtype), exact)
    results = {"out": merged["out"].to(dtype)}
    if "dout" not in inputs:
        return results, lses
    sums = {f"d{name}": torch.zeros_like(x, dtype=exact) for name, x in qkv.items()}
    of_pairs = zip(pairs, specs, merged["douts"], merged["dlses"].mT, strict=True)
    for pair, spec, dout, dlse in of_pairs:
        x = {name: _kept(x, pair, head) for name, x in (qkv | {"dout": dout}).items()}
        found = evaluate(x | {"dlse": _kept(dlse, pair, head).mT}, spec, dtype)
        for name, total in sums.items():
            _kept(total, pair, head).add_(found[name])
    return results | {name: x.to(dtype) for name, x in sums.items()}, lses


def _kept(x: Tensor, pair: Dilation, head: int) -> Tensor:
    segments = x.shape[1] // pair.segment_length
    kept = x.unflatten(1, (segments, pair.kept, pair.rate))[:, :, :, head % pair.rate]
    return kept.view(-1, *kept.shape[2:])


def _spec_of(case: DilatedCase, pair: Dilation, heads: int) -> AttentionSpec:
    same: dict[str, Any] = {x.name: getattr(case.spec, x.name) for x in fields(AttentionSpec)}
    same["batch"] *= case.seq_q // pair.segment_length
    same["seq_q"] = same["seq_kv"] = pair.kept
    same["heads_q"] = same["heads_kv"] = heads
    return AttentionSpec(**same)
