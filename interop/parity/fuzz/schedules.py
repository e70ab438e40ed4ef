"""The law of `batch_invariant`: rows that another schedule computes have the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twin_attention.interop.parity.cases import DecodeCase, FlashCase, PagedCase, VarlenCase
from twin_attention.interop.parity.inputs import POOLS, Tensors
from twin_attention.interop.parity.subjects.subject import Run

InvariantCase = FlashCase | VarlenCase | DecodeCase
PAGE_SIZES, NEW_TOKENS = (7, 16, 64), (1, 1, 3, 5, 17)


class Chunk(NamedTuple):
    """A sequence or a chunk of it, and its results: q and out [n, Hq, ..], k and v [m, Hkv, ..],
    lse [Hq, n]."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


# A kind of case, its fields and inputs, and where the results of a chunk's last rows are.
Places = list[tuple[Chunk, Any, Any]]
Call = tuple[Any, dict[str, Any], Tensors, Places]


def differing_bits(
    run: Run, case: InvariantCase, inputs: Tensors, results: Tensors, most: int = 2
) -> str | None:
    """Return which results differ from those of at most `most` other schedules, or None."""
    random, causal = Random(case.name), getattr(case, "causal", True)
    chunks = [chunk_of(x, causal, random) for x in sequences_of(case, inputs, results) if len(x.q)]
    if not chunks:
        return None
    names = ("name", "heads_q", "heads_kv", "head_dim", "head_dim_v", "dtype", "scale",
             "window_size", "softcap", "sinks", "batch_invariant")  # fmt: skip
    same = {name: getattr(case, name) for name in names}
    sinks = {"sinks": inputs["sinks"]} if case.sinks else {}
    every = [dense, packed, paged, decoded] if causal else [dense, packed]
    for schedule in random.sample(every, min(most, len(every))):
        kind, fields, given, places = schedule(chunks, random)
        if schedule in (dense, packed):
            fields["causal"] = causal
        found = run(kind(**same, **fields), given | sinks)
        for chunk, of_out, of_lse in places:
            out, lse = found["out"][of_out], found["lse"][of_lse]
            expected = chunk.out[-len(out) :], chunk.lse[:, -len(out) :]
            for name, x, y in zip(("out", "lse"), (out, lse), expected, strict=True):
                if count := int((_bytes(x) != _bytes(y)).sum()):
                    return f"{schedule.__name__}: {count} of {x.nbytes} bytes of {name}"
    return None


def _bytes(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def sequences_of(case: InvariantCase, inputs: Tensors, results: Tensors) -> list[Chunk]:
    q, out, lse = inputs["q"], results["out"], results["lse"]
    if isinstance(case, FlashCase):
        return [*map(Chunk, q, inputs["k"], inputs["v"], out, lse)]
    if isinstance(case, VarlenCase):
        queries, lengths = zip(*case.lengths, strict=True) if case.lengths else ((), ())
        keys = [inputs[x][: sum(lengths)].split(lengths) for x in "kv"]
    else:
        queries = case.new_tokens if isinstance(case, PagedCase) else ()
        pages = [*zip(inputs["block_tables"].long(), case.lengths, strict=True)]
        keys = [
            [inputs[pool][table[: -(-n // case.page_size)]].flatten(0, 1)[:n] for table, n in pages]
            for pool in POOLS
        ]
    if type(case) is DecodeCase:
        if case.tokens is None:
            q, out, lse = q[:, None], out[:, None], lse[..., None]
        return [*map(Chunk, q, *keys, out, lse)]
    q, out, lse = (x[: sum(queries)].split(queries) for x in (q, out, lse.mT))
    return [*map(Chunk, q, *keys, out, (x.mT for x in lse))]


def chunk_of(x: Chunk, causal: bool, random: Random) -> Chunk:
    """Return a chunk of a sequence; a causal one sees no later keys."""
    stop = random.randint(1, len(x.q)) if causal else len(x.q)
    rows, keys = slice(random.randrange(stop), stop), max(0, len(x.k) - len(x.q) + stop)
    return Chunk(x.q[rows], x.k[:keys], x.v[:keys], x.out[rows], x.lse[:, rows])


def dense(chunks: Sequence[Chunk], random: Random) -> Call:
    """Attend to a chunk beside sequences of NaN."""
    chunk, row, given = random.choice(chunks), random.randrange(3), {}
    for name, x in zip("qkv", chunk, strict=False):
        given[name] = nothing(x, 3, len(x))
        given[name][row] = x
    sizes = {"batch": 3, "seq_q": len(chunk.q), "seq_kv": len(chunk.k), "gradients": False}
    return FlashCase, sizes, given, [(chunk, row, row)]


def packed(chunks: Sequence[Chunk], random: Random) -> Call:
    """Attend to all in another order, behind a sequence of NaN and before padding."""
    order = random.sample(chunks, len(chunks))
    lengths = ((9, 9), *((len(x.q), len(x.k)) for x in order))
    given = {
        name: torch.cat([nothing(parts[0], 9), *parts, nothing(parts[0], 5)])
        for name, parts in zip(Chunk._fields[:3], zip(*order, strict=True), strict=False)
    }
    for name, own in zip(
        ("cu_seqlens_q", "cu_seqlens_kv"), zip(*lengths, strict=True), strict=True
    ):
        given[name] = _offsets(own, order[0].q)
    return VarlenCase, {"lengths": lengths, "padding": (5, 5)}, given, _packed_rows(order, 9)


def paged(chunks: Sequence[Chunk], random: Random) -> Call:
    fields, given = _pages(chunks, random)
    fields |= {"new_tokens": tuple(len(x.q) for x in chunks), "padding": 5}
    given["q"] = torch.cat([*(x.q for x in chunks), nothing(chunks[0].q, 5)])
    given["cu_seqlens_q"] = _offsets(fields["new_tokens"], given["q"])
    return PagedCase, fields, given, _packed_rows(chunks, 0)


def decoded(chunks: Sequence[Chunk], random: Random) -> Call:
    """Attend to as many last tokens of each."""
    tokens = min(random.choice(NEW_TOKENS), *(len(x.q) for x in chunks))
    fields, given = _pages(chunks, random)
    cascade = fields["num_splits"] is None and random.random() < 0.5
    given["q"] = torch.stack([x.q[-tokens:] for x in chunks])
    places = [(x, i, i) for i, x in enumerate(chunks)]
    return DecodeCase, fields | {"tokens": tokens, "cascade": cascade}, given, places


def _packed_rows(chunks: Sequence[Chunk], begin: int) -> Places:
    ends = [*accumulate((len(x.q) for x in chunks), initial=begin)]
    rows = [*map(slice, ends, ends[1:])]
    return [(chunk, x, (slice(None), x)) for chunk, x in zip(chunks, rows, strict=True)]


def _pages(chunks: Sequence[Chunk], random: Random) -> tuple[dict[str, Any], Tensors]:
    """Put keys into pages of any size and order, between slots of NaN."""
    size, lengths = random.choice(PAGE_SIZES), tuple(len(x.k) for x in chunks)
    most, device = -(-max(lengths) // size) + random.randint(1, 3), chunks[0].k.device
    count = most * len(chunks)
    tables = torch.tensor(random.sample(range(count + 3), count), device=device).view(-1, most)
    given = {"block_tables": tables.int()}
    given["seq_lens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    for name, parts in zip(POOLS, zip(*((x.k, x.v) for x in chunks), strict=True), strict=True):
        given[name] = nothing(parts[0], count + 3, size)
        for table, x in zip(tables, parts, strict=True):
            slots = torch.cat([x, nothing(x, most * size - len(x))])
            given[name][table] = slots.view(most, size, *x.shape[1:])
    splits = random.choice((None, 1, 2))
    return {
        "lengths": lengths, "page_size": size, "max_pages": most, "num_splits": splits
    }, given  # fmt: skip


def nothing(x: Tensor, *shape: int) -> Tensor:
    return x.new_full((*shape, *x.shape[1:]), torch.nan)


def _offsets(lengths: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=like.device)
