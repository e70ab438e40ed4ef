"""The host's share of a call, on problems so small that the device waits for the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bench import ours
from bench.calls import PREPARE
from bench.job import Call, Check, Entry, Job
from bench.peers import DECODE, FLASH, PREFILL, SDPA, sdpa_operator
from bench.problems import (
    DecodeFactories,
    DecodeTensors,
    Factories,
    attention_jobs,
    decode_job,
    decode_tensors,
)
from bench.suites.columns import of_median
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, PagedCase

if TYPE_CHECKING:
    from torch import Tensor

    from bench.timing import Timing


FLASH_CASE = FlashCase("1x128x8x64-causal", 1, 128, 128, 8, 8, 64, causal=True)
CACHE = DecodeCase("2-sequences", (100, 120), heads_q=8, heads_kv=8, page_size=16)
CHUNKS = PagedCase("2-chunks", (100, 120), heads_q=8, heads_kv=8, page_size=16, new_tokens=(32, 40))
SPLITS = {1: "1-split", 4: "4-splits"}
CALLS, CALLS_OF_BOTH = 300, 100  # of a turn
COLUMNS = {
    "case": "name",
    "host, us": of_median("times", 1e3),
    "ms": lambda record: None,  # the same
    "kernels": lambda record: None,  # none is looked at
}

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    return jax.jit(function)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from twin_attention.interop.parity.torch_calls import compiled

    return compiled(function, fullgraph=True)


def jobs(targets: Sequence[str]) -> list[Job]:
    native = targets[0]
    found = [
        *attention_jobs([FLASH_CASE], ("forward", "both"), lambda case: _flash(native)),
        *(decode_job(case, _decode(native)) for case in _decode_cases()),
        decode_job(CHUNKS, _chunks(native)),
        _append_job(native),
    ]
    return [_timed_on_the_host(job) for job in found]


def _timed_on_the_host(job: Job) -> Job:
    repeats = CALLS_OF_BOTH if job.operation == "both" else CALLS
    timer = partial(_time, repeats)
    return replace(job, time=timer, flops=0, bytes=0, reads=None, writes=None)


def _time(repeats: int, calls: Mapping[Entry, Callable[[], Any]]) -> Mapping[Entry, Timing]:
    from bench.timing import time_host

    return time_host(calls, repeats=repeats)


def _flash(target: str) -> Factories:
    return {
        Entry("torch triton", target): partial(_our_flash, "torch_attn"),
        Entry("torch triton compiled", target): partial(_our_flash, "torch_attn", wrap=_compiled),
        Entry("jax triton", target): partial(_our_flash, "pallas_attn"),
        **_by_name(_our_flash, ("torch gluon", "jax mosaic", "jax gluon"), target),
        Entry("SDPA"): SDPA,
        Entry("SDPA compiled"): _sdpa_compiled,
        Entry("FA2"): partial(sdpa_operator, "flash"),
        Entry("cuDNN"): partial(sdpa_operator, "cudnn"),
        Entry("jax.nn cuDNN"): FLASH["jax.nn cuDNN"],
    }


def _by_name(
    call: Callable[..., Call], names: Sequence[str], target: str, **options: Any
) -> dict[Entry, Callable[..., Call]]:
    return {
        Entry(name, target): partial(call, side, implementation=family, **options)
        for name in names
        for side, family in [ours.kernels_of(name)]
    }


def _sdpa_compiled(case: FlashCase, operation: str, tensors: list[Tensor]) -> Call:
    """SDPA under `torch.compile`, with a dout that is contiguous heads first.

    The compiled backward of torch 2.11 is wrong for a dout that is a view of [B, S, H, D].
    """
    *operands, dout = tensors
    dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    return SDPA(case, operation, [*operands, dout], wrap=_compiled)


def _our_flash(
    side: str,
    case: FlashCase,
    operation: str,
    tensors: list[Tensor],
    wrap: Wrap = _as_it_is,
    implementation: str | None = None,
) -> Call:
    attention = import_module(side).flash_attention
    attention = partial(attention, causal=case.causal, implementation=implementation)
    return PREPARE[side](wrap(attention), operation, tensors)


def _decode(target: str) -> DecodeFactories:
    in_torch = partial(_our_decode, "torch_attn")
    return {
        Entry("torch triton", target): partial(in_torch, wrap=_as_it_is),
        Entry("torch triton compiled", target): partial(in_torch, wrap=_compiled),
        Entry("jax triton", target): partial(_our_decode, "pallas_attn", wrap=_jitted),
        **_by_name(_our_decode, ("jax mosaic", "jax torch_triton"), target, wrap=_jitted),
        Entry("FlashInfer"): DECODE["FlashInfer"],
    }


def _chunks(target: str) -> DecodeFactories:
    return {
        Entry("torch triton", target): partial(_our_decode, "torch_attn", wrap=_as_it_is),
        Entry("jax triton", target): partial(_our_decode, "pallas_attn", wrap=_jitted),
        Entry("FlashInfer"): PREFILL["FlashInfer"],
    }


def _our_decode(
    side: str,
    case: DecodeCase,
    tensors: DecodeTensors,
    wrap: Wrap,
    implementation: str | None = None,
) -> Call:
    api = import_module(side)
    if isinstance(case, PagedCase):
        attend = wrap(api.paged_attention)
    else:
        options = {"num_splits": case.num_splits, "implementation": implementation}
        attend = wrap(partial(api.paged_decode, **options))
    operands = tensors.arguments.values()
    if side == "pallas_attn":
        from twin_attention.interop.exchange import to_jax

        operands = map(to_jax, operands)
    return Call(partial(attend, *operands), lambda out: (out,))


def _decode_cases() -> list[DecodeCase]:
    return [
        replace(CACHE, name=f"{CACHE.name}-{name}", num_splits=splits)
        for splits, name in SPLITS.items()
    ]


def _append_job(target: str) -> Job:
    """JAX only has an `append_kv` in programs that own the cache."""
    return Job(
        case=asdict(CACHE),
        operation="append",
        flops=0,
        bytes=0,
        inputs=partial(decode_tensors, CACHE),
        factories={Entry("torch triton", target): _append},
        check=_check_append,
    )


def _append(tensors: DecodeTensors) -> Call:
    from torch_attn import append_kv

    q, *cache = tensors.arguments.values()
    return Call(partial(append_kv, q, q, *cache), lambda pools: pools)


def _check_append(tensors: DecodeTensors) -> Check:
    import torch

    sequences = torch.arange(len(CACHE.lengths), device=tensors.q.device)
    last = tensors.seq_lens.long() - 1
    pages = tensors.block_tables[sequences, last // CACHE.page_size].long()
    slots = last % CACHE.page_size

    def check(pools: Sequence[Any]) -> float:
        written = (torch.equal(pool[pages, slots], tensors.q) for pool in pools)
        return 0.0 if all(written) else math.inf

    return check
