"""The named problems of `flash_attention_varlen`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from twin_attention.interop.parity.cases import VarlenCase
from twin_attention.interop.parity.suites.choose import Change, choose, in_dtypes


def varlen_cases(suite: str = "small", pattern: str = "") -> list[VarlenCase]:
    return choose(suite, pattern, _small_varlen, _full_varlen, _large_varlen)


def _small_varlen() -> Iterator[VarlenCase]:
    base = VarlenCase("")
    yield replace(base, name="varlen-fp32", dtype="float32", causal=False, head_dim=32)
    # Sequences with more queries than keys, without queries, without keys.
    lengths = ((17, 50), (0, 5), (33, 20), (4, 0))
    yield replace(
        base, name="varlen-all-options", lengths=lengths, heads_q=4, head_dim=72, head_dim_v=48,
        window_size=(24, None), softcap=20.0, sinks=True, scale=0.2, dtype="float16",
    )  # fmt: skip
    yield replace(base, name="varlen-row-max", lengths=lengths, row_max=True, sinks=True)
    yield replace(
        base, name="varlen-terms", lengths=lengths, relative=30, alibi="all", head_dim=32,
        window_size=(24, None), softcap=20.0, dtype="float16",
    )  # fmt: skip
    yield replace(
        base, name="varlen-tree-any", lengths=lengths, tree="any", depths=True, head_dim=32,
        window_size=(12, None), dtype="float16",
    )  # fmt: skip
    yield replace(
        base, name="varlen-ranges", lengths=((17, 50), (0, 5), (33, 20), (70, 70)), ranges="any",
        window_size=(12, None), relative=9,
    )  # fmt: skip
    yield replace(
        base, name="varlen-batch-invariant", dtype="float16", window_size=(20, 0), softcap=20.0,
        batch_invariant=True,
    )  # fmt: skip
    yield replace(base, name="varlen-all-padding", lengths=())


def _full_varlen() -> Iterator[VarlenCase]:
    base, lengths = VarlenCase(""), ((17, 50), (0, 5), (33, 20), (4, 0))
    yield replace(base, name="varlen-bf16")
    yield replace(base, name="varlen-ranges-tree", ranges="both", tree="any", sinks=True)
    yield replace(base, name="varlen-relative", relative=9, causal=False)
    yield replace(base, name="varlen-dropout", lengths=lengths, dropout_rate=0.3, head_dim=32)
    yield replace(base, name="varlen-tree", tree="nested")
    yield replace(base, name="varlen-deterministic", padding=(0, 0), heads_q=4, deterministic=True)
    lengths = ((333, 333), (1, 1), (0, 0), (127, 400), (400, 127), (64, 0), (0, 64), (256, 256))
    base = VarlenCase("varlen-full", lengths, (70, 40), heads_q=4)
    yield from in_dtypes(base, _full_varlen_changes)
    base = replace(base, dtype="float32", precision="tf32")
    for d in (32, 64, 128, 256):
        yield replace(base, name=f"{base.name}-tf32-d{d}", head_dim=d)


def _full_varlen_changes() -> Iterator[Change]:
    for d, causal in product((16, 40, 64, 96, 128, 256, 512), (False, True)):
        yield f"d{d}{'-causal' if causal else ''}", {"head_dim": d, "causal": causal}
    yield "d192-dv128", {"head_dim": 192, "head_dim_v": 128}
    yield "window", {"window_size": (70, 5), "causal": False}
    yield "softcap", {"softcap": 5.0, "head_dim": 128}
    yield "sinks", {"sinks": True}
    yield "row-max", {"row_max": True, "sinks": True}
    for d in (64, 128, 320):
        yield f"relative-d{d}", {"relative": 50, "head_dim": d, "alibi": "all"}
    yield "relative-any", {"relative": 300, "causal": False, "softcap": 5.0}
    for d in (64, 128):
        yield f"dropout-d{d}", {"dropout_rate": 0.1, "head_dim": d}
    for d in (64, 128):
        yield f"tree-d{d}", {"tree": "nested", "head_dim": d}
    yield "tree-depths", {"tree": "nested", "depths": True, "window_size": (70, None)}
    yield "tree-any", {"tree": "any", "sinks": True}
    for kind, d in (("prefix", 64), ("both", 128), ("any", 96)):
        yield f"ranges-{kind}", {"ranges": kind, "head_dim": d, "window_size": (70, None)}
    yield "heads8-1", {"heads_q": 8, "heads_kv": 1}
    # So long that the explicit kernels add up dq.
    long = {"lengths": ((2100, 2500), (0, 64), (30, 0), (2600, 2700)), "heads_kv": 1}
    for d in (64, 72, 96, 128):
        yield f"long-d{d}", {**long, "head_dim": d}
    yield "long-window", {**long, "head_dim": 128, "causal": False, "window_size": (900, 300)}
    yield "long-no-mask", {**long, "head_dim": 128, "head_dim_v": 112, "causal": False}
    yield "long-softcap", {**long, "head_dim": 128, "softcap": 5.0}
    # More sequences than a step of the search reads offsets of.
    yield "300-sequences", {"lengths": tuple((i % 7, i % 5) for i in range(300))}


def _large_varlen() -> Iterator[VarlenCase]:
    lengths = tuple((n, n) for n in (9000, 1, 500, 0, 6000, 883))
    base = VarlenCase("", lengths, padding=(0, 0), heads_q=16, heads_kv=4)
    for d in (64, 128):
        yield replace(base, name=f"large-varlen-d{d}", head_dim=d)
