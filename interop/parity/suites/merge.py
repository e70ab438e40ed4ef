"""The named problems of `merge_states`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from twin_attention.interop.parity.cases import MergeCase
from twin_attention.interop.parity.suites.choose import choose


def merge_cases(suite: str = "small", pattern: str = "") -> list[MergeCase]:
    return choose(suite, pattern, _small_merge, _full_merge, _large_merge)


def _small_merge() -> Iterator[MergeCase]:
    yield MergeCase("merge-bf16")
    yield MergeCase("merge-fp32-dv24", dtype="float32", head_dim_v=24)
    yield MergeCase("merge-no-state", num_states=0)


def _full_merge() -> Iterator[MergeCase]:
    for dtype, states in product(("bfloat16", "float16", "float32"), (1, 2, 33)):
        yield MergeCase(f"merge-full-{dtype}-{states}", states, tokens=130, dtype=dtype)


def _large_merge() -> Iterator[MergeCase]:
    yield MergeCase("large-merge", 8, 4, 8192, 16, 128)
