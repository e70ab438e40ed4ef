"""The named problems of `dilated_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from twin_attention.interop.parity.cases import DilatedCase
from twin_attention.interop.parity.suites.choose import Change, choose, in_dtypes


def dilated_cases(suite: str = "small", pattern: str = "") -> list[DilatedCase]:
    return choose(suite, pattern, _small_dilated, _full_dilated, _large_dilated)


def _small_dilated() -> Iterator[DilatedCase]:
    base = DilatedCase("", batch=1, seq_q=96, seq_kv=96, head_dim=16, segment_lengths=(24, 48, 96))
    # Two lengths, so two calls, one without a copy; rates that do not divide the heads.
    yield replace(
        base, name="dilated-all-options", batch=2, seq_q=48, seq_kv=48, heads_q=6,
        heads_kv=3, head_dim=24, head_dim_v=16, dtype="float16", softcap=20.0, scale=0.2,
        segment_lengths=(48, 24, 16), dilation_rates=(6, 3, 1),
    )  # fmt: skip
    # Some tokens are kept by no head, or by one.
    yield replace(
        base, name="dilated-fp32-one-pair", heads_kv=1, dtype="float32", causal=True,
        segment_lengths=(48,), dilation_rates=(3,),
    )  # fmt: skip


def _full_dilated() -> Iterator[DilatedCase]:
    base = DilatedCase("", batch=1, seq_q=96, seq_kv=96, head_dim=16, segment_lengths=(24, 48, 96))
    yield replace(base, name="dilated-causal", causal=True, heads_q=4, heads_kv=4)
    base = DilatedCase(
        "dilated-full", 2, 768, 768, 4, 4, segment_lengths=(128, 256, 768),
        dilation_rates=(1, 2, 6),
    )  # fmt: skip
    yield from in_dtypes(base, _full_dilated_changes)


def _full_dilated_changes() -> Iterator[Change]:
    for d in (16, 64, 128, 256):
        yield f"d{d}", {"head_dim": d}
        yield f"d{d}-causal", {"head_dim": d, "causal": True}
    yield "heads6-2", {"heads_q": 6, "heads_kv": 2, "causal": True}
    yield "heads8-8", {"heads_q": 8, "heads_kv": 8}
    yield "segments", {"segment_lengths": (64,), "dilation_rates": (1,), "causal": True}
    yield "uncovered", {"segment_lengths": (384, 768), "dilation_rates": (8, 16)}
    yield "rate32", {"segment_lengths": (768, 96), "dilation_rates": (32, 1), "causal": True}
    yield "softcap", {"softcap": 5.0}


def _large_dilated() -> Iterator[DilatedCase]:
    base = DilatedCase(
        "", 1, 4096, 4096, 4, 2, segment_lengths=(512, 1024, 2048, 4096),
        dilation_rates=(1, 2, 4, 8),
    )  # fmt: skip
    for d in (64, 128):
        yield replace(base, name=f"large-dilated-d{d}", head_dim=d)
        yield replace(base, name=f"large-dilated-d{d}-causal", head_dim=d, causal=True)
