"""The named problems of `append_kv`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from twin_attention.interop.parity.cases import AppendCase
from twin_attention.interop.parity.suites.choose import Change, choose, in_dtypes


def append_cases(suite: str = "small", pattern: str = "") -> list[AppendCase]:
    return choose(suite, pattern, _small_append, _full_append, _large_append)


def _small_append() -> Iterator[AppendCase]:
    # Tokens before the first position and past the capacity; sequences without tokens; padding.
    yield AppendCase(
        "append-packed", (20, 2, 38, 9), new_tokens=(17, 4, 4, 0), padding=2, page_size=7,
        max_pages=5, head_dim_v=48, kv_dtype="int8", scale_shape=(2,),
    )  # fmt: skip
    yield AppendCase(
        "append-latent", (20, 3), new_tokens=(17, 4), padding=2, heads_kv=1, head_dim=576,
        latent=True,
    )  # fmt: skip
    yield AppendCase(
        "append-rotary", (30, 3, 40), new_tokens=(4, 3, 1), padding=2, heads_q=4, rotary_dim=64
    )
    yield AppendCase(
        "append-rotary-interleaved", (30, 40), tokens=3, heads_q=6, head_dim=72, rotary_dim=40,
        kv_dtype="float8_e4m3fn", rotary_interleaved=True, dtype="float16",
    )  # fmt: skip


def _full_append() -> Iterator[AppendCase]:
    lengths, new = (300, 2, 512, 9, 128), (300, 1, 17, 0, 64)
    base = AppendCase(
        "append-full", lengths, new_tokens=new, padding=9, heads_q=8, page_size=64, positions=512
    )
    yield from in_dtypes(base, _full_append_changes, "float32")
    for d, rotary in ((16, 2), (80, 48), (128, 126)):
        yield replace(base, name=f"{base.name}-d{d}-r{rotary}", head_dim=d, rotary_dim=rotary)
    for tokens in (1, 3, 16, 64):
        lengths = 300, max(20, tokens), 512
        dense = {"new_tokens": None, "tokens": tokens, "lengths": lengths, "padding": 0}
        yield replace(base, name=f"{base.name}-tokens{tokens}", rotary_dim=64, **dense)
    # More sequences than a step of the search reads offsets of.
    many = {"lengths": tuple(i % 60 for i in range(300)), "max_pages": 1}
    many["new_tokens"] = tuple(i % 5 for i in range(300))
    yield replace(base, name=f"{base.name}-300-sequences", rotary_dim=64, **many)


def _full_append_changes() -> Iterator[Change]:
    for kv_dtype, d in product((None, "int8", "float8_e4m3fn"), (16, 64, 128, 256)):
        name = f"d{d}{'' if kv_dtype is None else '-' + kv_dtype}"
        sizes = {"head_dim": d, "kv_dtype": kv_dtype, "rotary_dim": d}
        yield name, sizes
        yield f"{name}-latent", {**sizes, "latent": True}
        yield f"{name}-interleaved", {**sizes, "rotary_interleaved": True}


def _large_append() -> Iterator[AppendCase]:
    # 2^31 elements of a pool are passed by page id times page size.
    yield AppendCase(
        "large-append-2g-elements", (8192,) * 260, new_tokens=(64,) * 260, heads_q=32, heads_kv=8,
        head_dim=128, max_pages=512, rotary_dim=128, positions=8192,
    )  # fmt: skip
