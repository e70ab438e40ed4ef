"""The named problems of `context_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from twin_attention.interop.parity.cases import ContextCase
from twin_attention.interop.parity.suites.choose import Change, choose, in_dtypes


def context_cases(suite: str = "small", pattern: str = "") -> list[ContextCase]:
    return choose(suite, pattern, _small_context, _full_context, _large_context)


def _small_context() -> Iterator[ContextCase]:
    base = ContextCase("", batch=1, seq_q=96, seq_kv=96, heads_q=2, head_dim=16, causal=True)
    yield replace(base, name="context-ring", ranks=4, heads_kv=1, exchange="ring")
    yield replace(
        base, name="context-all-options", batch=2, heads_q=4, head_dim_v=24,
        dtype="float16", window_size=(30, None), softcap=4.0, sinks=True, scale=0.3,
        sharding="balanced", documents=(13, 47, 1, 29), exchange="ring",
    )  # fmt: skip
    yield replace(
        base, name="context-gather", ranks=3, sharding="stripe", exchange="gather", causal=False
    )
    yield replace(base, name="context-fp32-heads", dtype="float32", exchange="heads", softcap=9.0)


def _full_context() -> Iterator[ContextCase]:
    base = ContextCase("context-full", 1, 1536, 1536, 4, 4, causal=True, ranks=4)
    yield from in_dtypes(base, _full_context_changes)


def _full_context_changes() -> Iterator[Change]:
    documents = {"documents": (700, 30, 1, 400, 300), "sharding": "balanced"}
    for exchange in ("ring", "gather"):
        way = {"exchange": exchange}
        for d in (64, 128):
            yield f"{exchange}-d{d}", way | {"head_dim": d}
        yield f"{exchange}-window", way | {"window_size": (100, None), "head_dim": 128}
        yield f"{exchange}-documents", way | documents
    yield "ring-d256", {"exchange": "ring", "head_dim": 256}
    yield "ring-full", {"exchange": "ring", "causal": False, "batch": 2, "heads_kv": 2}
    yield "ring-8-sinks", {"exchange": "ring", "ranks": 8, "sinks": True, "softcap": 20.0}
    yield "ring-deterministic", {"exchange": "ring", "deterministic": True, "head_dim": 128}
    yield "gather-stripe", {"exchange": "gather", "sharding": "stripe", "window_size": (9, None)}
    yield "heads-documents", documents | {"exchange": "heads"}


def _large_context() -> Iterator[ContextCase]:
    base = ContextCase("", 1, 16384, 16384, 4, 2, head_dim=128, causal=True, exchange="ring")
    for ranks in (2, 8):
        yield replace(base, name=f"large-context-{ranks}", ranks=ranks)
    yield replace(base, name="large-context-window", ranks=8, window_size=(1000, None))
