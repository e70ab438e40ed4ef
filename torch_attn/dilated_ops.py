"""Gather the tokens that dilated attention keeps, and scatter its results.

The derivative of a gather is a scatter, and vice versa. Both copy between views, without indices,
and sums have a fixed order. Operands pass through `once`, so that errors name `dilated_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_attn.autograd import refuse_forward_mode, refuse_second_derivative
from twin_attention.contract.spec import Dilation

Pairs = tuple[Dilation, ...]


def once(x: Tensor) -> Tensor:
    """Return a tensor unchanged; refuse all derivatives but one in reverse mode."""
    return _Once.apply(x)  # pyright: ignore[reportReturnType]


def take(x: Tensor, call: Pairs, heads_kv: int) -> Tensor:
    """Return the tokens that the heads keep, each segment as a batch entry.

    Args:
        x: [B, S, H, D].
        call: pairs that keep the same number of tokens per segment.
        heads_kv: number of groups that the H heads form.

    Returns:
        [B · segments, kept, H, D], one pair's segments after another's. A view if there is one pair
        and it keeps all tokens.
    """
    if _keeps_all(call):
        return x.unflatten(1, (x.shape[1] // call[0].kept, call[0].kept)).flatten(0, 1)
    return _Take.apply(x, call, heads_kv)  # pyright: ignore[reportReturnType]


def place(
    states: Sequence[tuple[Tensor, Tensor]], calls: tuple[Pairs, ...], heads_kv: int, rows: Any
) -> tuple[Tensor, Tensor]:
    """Put the calls' results at their tokens' places.

    Args:
        states: out [B · segments, kept, Hq, Dv] and lse [B · segments, Hq, kept] of each call.
        rows: B and S.

    Returns:
        outs [N, B, S, Hq, Dv] and lses [N, B, Hq, S] of the N pairs. Where a head keeps nothing,
        lse is -inf, and out may be anything if there are several pairs.
    """
    if len(calls) == 1 and _keeps_all(calls[0]):
        ((out, lse),) = states
        lse = lse.unflatten(0, (rows[0], rows[1] // calls[0][0].kept)).transpose(1, 2)
        return out.reshape(1, *rows, *out.shape[2:]), lse.flatten(2, 3)[None]
    flat = (x for state in states for x in state)
    return _PlaceAll.apply(calls, heads_kv, rows, *flat)  # pyright: ignore[reportReturnType]


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, dx):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Gradient.apply(dx)

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        refuse_forward_mode("dilated_attention")


class _Gradient(_Once):
    @staticmethod
    def backward(*_: Any) -> NoReturn:
        refuse_second_derivative("dilated_attention")


class _Take(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, call, heads_kv):
        return _gather([x for _ in call], call, heads_kv)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, ctx.call, ctx.heads_kv = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx, dkept):  # pyright: ignore[reportIncompatibleMethodOverride]
        # The first pair has the lowest rate; if that is 1, it writes the whole gradient.
        dx = (dkept.new_empty if ctx.call[0].rate == 1 else dkept.new_zeros)(ctx.shape)
        parts = _parts(dkept, ctx.call, *ctx.shape[:2])
        for n, (pair, part) in enumerate(zip(ctx.call, parts, strict=True)):
            for target, source in _matching(dx, part, pair, ctx.heads_kv):
                target.add_(source) if n else target.copy_(source)
        return dx, None, None


class _PlaceAll(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(calls, heads_kv, rows, *states):
        (batch, tokens), num_pairs = rows, sum(map(len, calls))
        out, lse = states[:2]
        # merge_states ignores values where lse is -inf.
        new = out.new_empty if num_pairs > 1 else out.new_zeros
        outs = new((num_pairs, batch, tokens, *out.shape[2:]))
        lses = lse.new_full((num_pairs, batch, lse.shape[1], tokens), -torch.inf)
        n = 0
        for call, out, lse in zip(calls, states[::2], states[1::2], strict=True):
            parts = (_parts(x, call, *rows) for x in (out, _as_rows(lse)))
            for pair, *kept in zip(call, *parts, strict=True):
                for full, part in zip((outs[n], _as_rows(lses[n])), kept, strict=True):
                    for target, source in _matching(full, part, pair, heads_kv):
                        target.copy_(source)
                n += 1
        return outs, lses

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.calls, ctx.heads_kv, *_ = inputs

    @staticmethod
    def backward(ctx, douts, dlses):  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients, begin = [], 0
        for call in ctx.calls:
            slots = slice(begin, begin + len(call))
            gradients.append(_gather(douts[slots], call, ctx.heads_kv))
            dlse = _gather(_as_rows(dlses[slots]), call, ctx.heads_kv)
            gradients.append(dlse.squeeze(-1).mT)
            begin += len(call)
        return None, None, None, *gradients


def _gather(fulls: Sequence[Tensor] | Tensor, call: Pairs, heads_kv: int) -> Tensor:
    """Return what each pair keeps of its own [B, S, H, D], as `take` does."""
    batch, tokens, *row = fulls[0].shape
    segments = sum(tokens // pair.segment_length for pair in call)
    kept = fulls[0].new_empty((batch * segments, call[0].kept, *row))
    for full, part, pair in zip(fulls, _parts(kept, call, batch, tokens), call, strict=True):
        for source, target in _matching(full, part, pair, heads_kv):
            target.copy_(source)
    return kept


def _parts(kept: Tensor, call: Pairs, batch: int, tokens: int) -> Sequence[Tensor]:
    """Return each pair's batch entries. (Autograd forbids writes to a split's views.)"""
    ends = accumulate(batch * (tokens // pair.segment_length) for pair in call)
    return [kept[begin:end] for begin, end in pairwise((0, *ends))]


def _matching(
    full: Tensor, kept: Tensor, pair: Dilation, heads_kv: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of the same tokens in both: whole rounds of offsets, then the heads left."""
    (batch, tokens, heads, _), rate = full.shape, pair.rate
    groups, segments = (heads_kv, heads // max(1, heads_kv)), tokens // pair.segment_length
    full = full.unflatten(2, groups).unflatten(1, (segments, pair.kept, rate))
    kept = kept.unflatten(2, groups).unflatten(0, (batch, segments))
    whole = heads_kv - heads_kv % rate
    for first, last, offsets in ((0, whole, rate), (whole, heads_kv, heads_kv - whole)):
        if first < last:
            rounds = ((last - first) // offsets, offsets)
            # [B, segments, kept, offset, round, offset, group, D]: equal offsets are a diagonal.
            of_heads = full[:, :, :, :offsets, first:last].unflatten(4, rounds)
            yield (
                of_heads.diagonal(0, 3, 5).movedim(-1, 4),
                kept[:, :, :, first:last].unflatten(3, rounds),
            )


def _as_rows(lse: Tensor) -> Tensor:
    """Return [..., H, S] as [..., S, H, 1]."""
    return lse.mT[..., None]


def _keeps_all(call: Pairs) -> bool:
    return len(call) == 1 and call[0].rate == 1
