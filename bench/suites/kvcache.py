"""Decoding from a paged cache: a sweep over the cache's length, and batches of sequences.

The sweep runs twice, with page tables as wide as the sequence needs and with tables for 2^20 keys:
a decode whose time follows from the table's width is slow in the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bench import ours
from bench.job import Call, Job, Subject
from bench.peers import DECODE
from bench.problems import DecodeFactories, DecodeTensors, decode_job
from bench.records import Record, Times
from bench.registry import Cells
from interop.parity.cases import DecodeCase

TITLE = "Paged decode"
NOTE = (
    "One call decodes T new tokens of each sequence from a paged cache, whose pages lie in random "
    "order; what no sequence uses holds NaN. The sweep over lengths runs twice: with page tables "
    "as wide as the sequence needs, and with tables for 2^20 keys, where a decode that splits its "
    "work by the table's width is slow. GPU time is that in which one of the call's kernels runs, "
    "CPU time what the call takes on the host; noise is half the distance between the 20th and "
    "the 80th percentile, over the median. Reads are q, the keys and values seen, their table "
    "entries and the lengths; writes are the output and its log-sum-exp; elements are those of "
    "the keys and values. 'torch triton graph' is the torch operator replayed as a CUDA graph, as "
    "servers call it. Dense peers read a copy of the cache without pages."
)

SWEEP = tuple(1 << n for n in range(5, 16))
# Lengths also run with SM80 code and in JAX, which compiles for every shape.
SWEEP_IN_FULL = (32, 64, 128, 256, 1024, 8192, 32768)
WIDE_TABLE = 1 << 20  # keys
BATCHES = (  # sequences, keys of each, query heads, kv heads
    (1, 32768, 32, 8),
    (64, 1024, 32, 8),
    (64, 8192, 32, 8),
    (256, 2048, 64, 8),
    (128, 4096, 32, 32),
)
QUANTIZED = BATCHES[2:]  # in float16 these have more than 1 GiB of keys and values
VARIED = (BATCHES[0], BATCHES[2])  # with more new tokens, and at other head sizes


def jobs(targets: Sequence[str], pattern: str = "") -> list[Job]:
    """Return a decode of every case whose name contains `pattern`.

    Args:
        targets: of our kernels, the device's own first.
        pattern: part of a case's name.
    """
    native = _ours(targets[:1])
    torch_twin = {s: f for s, f in native.items() if s.implementation.startswith("torch ")}
    peers: DecodeFactories = {Subject(peer): factory for peer, factory in DECODE.items()}
    everything = native | ours.decode_factories(targets[1:]) | peers
    planned: list[tuple[DecodeCase, DecodeFactories]] = []
    for case in map(_sweep, SWEEP):
        in_full = case.lengths[0] in SWEEP_IN_FULL
        planned.append((case, everything if in_full else torch_twin | peers))
    for case in map(_sweep, SWEEP):
        wide = replace(case, name=f"{case.name}-wide", max_pages=WIDE_TABLE // case.page_size)
        planned.append((wide, native if case.lengths[0] in SWEEP_IN_FULL else torch_twin))
    planned += [(_batch(*shape), everything) for shape in BATCHES]
    planned += [(_batch(*shape, tokens=4), native | peers) for shape in BATCHES]
    planned += [
        (_batch(*shape, kv_dtype=kv_dtype), native | peers)
        for shape in QUANTIZED
        for kv_dtype in ("int8", "float8_e4m3fn")
    ]
    planned += [(_batch(*shape, tokens=16), everything) for shape in VARIED]
    planned += [(_batch(*shape, head_dim=d), everything) for d in (64, 256) for shape in VARIED]
    return [decode_job(case, factories) for case, factories in planned if pattern in case.name]


def columns(record: Record) -> Cells:
    """Return what tells the cases apart and nvbench's columns; the report adds the bandwidth."""
    case, gpu = record.case, record.times
    elements = 2 * sum(case["lengths"]) * case["heads_kv"] * case["head_dim"]
    return {
        "sequences": len(case["lengths"]),
        "KV length": case["lengths"][0],
        "T": case["tokens"],
        "heads": f"{case['heads_q']}/{case['heads_kv']}",
        "cache": case["kv_dtype"] or case["dtype"],
        "page": case["page_size"],
        "table, keys": case["max_pages"] * case["page_size"],
        "reads, MB": None if record.reads is None else record.reads / 1e6,
        "writes, MB": None if record.writes is None else record.writes / 1e6,
        **_time("CPU", record.host),
        **_time("GPU", gpu),
        "Gelem/s": elements / gpu.median / 1e6 if gpu else None,
        "ms": None,  # the GPU and CPU time above
        "host, us": None,
    }


def _time(processor: str, times: Times | None) -> Cells:
    """Return a time in microseconds and its noise."""
    median = noise = None
    if times is not None:
        median = times.median * 1e3
        if times.p20 is not None and times.p80 is not None:
            noise = f"{(times.p80 - times.p20) / 2 / times.median:.1%}"
    return {f"{processor} time, us": median, f"{processor} noise": noise}


def _sweep(length: int) -> DecodeCase:
    return DecodeCase(
        f"sweep-{length}", (length,), tokens=1, heads_q=32, heads_kv=32, head_dim=128,
        dtype="float16", page_size=256, max_pages=-(-length // 256),
    )  # fmt: skip


def _batch(
    batch: int,
    length: int,
    heads_q: int,
    heads_kv: int,
    tokens: int = 1,
    kv_dtype: str | None = None,
    head_dim: int = 128,
) -> DecodeCase:
    variant = "" if tokens == 1 else f"-{tokens}-tokens"
    variant += "" if head_dim == 128 else f"-d{head_dim}"
    variant += f"-{kv_dtype}" if kv_dtype else ""
    return DecodeCase(
        f"{batch}x{length}-heads-{heads_q}-{heads_kv}{variant}", (length,) * batch, tokens,
        heads_q, heads_kv, head_dim, dtype="float16", page_size=16, max_pages=length // 16,
        kv_dtype=kv_dtype,
    )  # fmt: skip


def _ours(targets: Sequence[str]) -> DecodeFactories:
    """Return both twins, and a CUDA graph of the torch one."""
    factories = ours.decode_factories(targets)
    graphs = {
        Subject("torch triton graph", t): partial(_graph, factories[Subject("torch triton", t)])
        for t in targets
    }
    return factories | graphs


def _graph(factory: ours.Factory, case: DecodeCase, tensors: DecodeTensors) -> Call:
    """Return a call that replays the CUDA graph of another one."""
    import torch

    call = factory(case, tensors)
    call.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # JAX's threads may allocate meanwhile, which is forbidden to the capturing thread alone.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = call.run()

    def run() -> Any:
        graph.replay()
        return results

    return Call(run, call.result)
