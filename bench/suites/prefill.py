"""Prefill in chunks: several new tokens per sequence over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from bench import ours
from bench.job import Call, Entry, Job
from bench.peers import PREFILL
from bench.problems import DecodeFactories, DecodeFactory, DecodeTensors, decode_job
from bench.suites.columns import TFLOPS, scaled
from twin_attention.interop.parity.cases import DecodeCase, PagedCase

CHUNK, CHUNKS = 512, 8
LENGTHS = (4096, 8192, 16384, 32768)  # keys, those of the chunk counted in
PAGE_SIZES = (16, 64)
BATCH, BATCH_LENGTH = 64, 8192  # sequences with single tokens among them
COLUMNS = {
    "sequences": lambda record: len(record.case["lengths"]),
    "chunks": lambda record: sum(n > 1 for n in record.case["new_tokens"]),
    "new tokens": lambda record: sum(record.case["new_tokens"]),
    "KV length": lambda record: max(record.case["lengths"]),
    "page": "page_size", "TFLOP/s": TFLOPS, "GB/s": scaled("bytes_per_second", 1e9),
}  # fmt: skip


def jobs(targets: Sequence[str]) -> list[Job]:
    return [decode_job(case, factories(case, targets)) for case in cases()]


def cases() -> list[PagedCase]:
    chunks = (CHUNK,) * CHUNKS
    found = [
        _case(f"chunks-{CHUNKS}x{length}-page{page_size}", chunks, length, page_size)
        for page_size in PAGE_SIZES
        for length in LENGTHS
    ]
    mixed, single = (*chunks, *(1,) * (BATCH - CHUNKS)), (1,) * BATCH
    for name, new_tokens in (("mixed", mixed), ("single", single)):
        case = f"{name}-{BATCH}x{BATCH_LENGTH}-page{PAGE_SIZES[0]}"
        found.append(_case(case, new_tokens, BATCH_LENGTH, PAGE_SIZES[0]))
    return found


def _case(name: str, new_tokens: tuple[int, ...], length: int, page_size: int) -> PagedCase:
    return PagedCase(
        name, (length,) * len(new_tokens), heads_q=32, heads_kv=8, head_dim=128,
        page_size=page_size, max_pages=length // page_size, new_tokens=new_tokens,
    )  # fmt: skip


def factories(case: PagedCase, targets: Sequence[str]) -> DecodeFactories:
    own = ours.prefill_factories(case.spec, targets) | {
        Entry(name): f for name, f in PREFILL.items()
    }
    if set(case.new_tokens) != {1}:
        return own
    return own | {
        Entry(f"{name} paged_decode", target): partial(_decode, factory)
        for (name, target), factory in ours.decode_factories(targets).items()
    }


def _decode(factory: DecodeFactory, case: DecodeCase, tensors: DecodeTensors) -> Call:
    return factory(case, replace(tensors, cu_seqlens_q=None))
