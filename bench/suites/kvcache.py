"""Decoding from a paged cache: a sweep over the cache's length, and batches of sequences.

The sweep runs twice, with narrow and with very wide tables, whose width must cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bench import ours
from bench.job import Call, Entry, Job
from bench.peers import DECODE, flash_mla
from bench.problems import DecodeFactories, DecodeTensors, decode_job
from bench.records import Record
from bench.registry import Column
from bench.suites.columns import HOST, of_median, scaled
from twin_attention.contract.paged_spec import LATENT_DIM_MAX
from twin_attention.interop.parity.cases import DecodeCase

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
VARIED = (BATCHES[0], BATCHES[2])  # with more new tokens, and at other head dimensions
LATENT_HEADS = (16, 128)  # of DeepSeek V3 on eight devices, and on one
DRAFTS = 64  # new tokens, in a tree and without one
# With cascades: sequences, keys of each, query heads, kv heads, shared first pages.
SHARED = ((64, 8704, 32, 8, 512), (64, 8704, 32, 8, 0), (64, 1024, 32, 8, 0))


def _noise(field: str) -> Column:
    def cell(record: Record) -> str | None:
        times = getattr(record, field)
        if times is None or times.p20 is None or times.p80 is None:
            return None
        return f"{(times.p80 - times.p20) / 2 / times.median:.1%}"

    return cell


def _billions_of_elements(record: Record) -> float | None:
    """Return the rate of the keys' and values' elements, as nvbench has it."""
    case = record.case
    elements = 2 * sum(case["lengths"]) * case["heads_kv"] * case["head_dim"]
    return elements / record.times.median / 1e6 if record.times else None


COLUMNS = {
    "sequences": lambda record: len(record.case["lengths"]),
    "KV length": lambda record: record.case["lengths"][0],
    "T": "tokens",
    "tree": lambda record: record.case.get("tree"),
    "heads": lambda record: f"{record.case['heads_q']}/{record.case['heads_kv']}",
    "cache": lambda record: record.case["kv_dtype"] or record.case["dtype"],
    "page": "page_size",
    "table, keys": lambda record: record.case["max_pages"] * record.case["page_size"],
    "reads, MB": scaled("reads", 1e6), "writes, MB": scaled("writes", 1e6),
    "CPU time, us": HOST, "CPU noise": _noise("host"),
    "GPU time, us": of_median("times", 1e3), "GPU noise": _noise("times"),
    "Gelem/s": _billions_of_elements,
    "ms": lambda record: None,  # the GPU and CPU time above
    "host, us": lambda record: None,
}  # fmt: skip


def jobs(targets: Sequence[str]) -> list[Job]:
    native = _ours(targets[:1])
    torch_twin = {s: f for s, f in native.items() if s.implementation.startswith("torch ")}
    peers: DecodeFactories = {Entry(peer): factory for peer, factory in DECODE.items()}
    everything = native | ours.decode_factories(targets[1:]) | peers
    planned: list[tuple[DecodeCase, DecodeFactories]] = []
    for case in map(_sweep, SWEEP):
        in_full = case.lengths[0] in SWEEP_IN_FULL
        planned.append((case, everything if in_full else torch_twin | peers))
    for case in map(_sweep, SWEEP):
        wide = replace(case, name=f"{case.name}-wide", max_pages=WIDE_TABLE // case.page_size)
        planned.append((wide, native if case.lengths[0] in SWEEP_IN_FULL else torch_twin))
    foreign = ours.decode_factories(targets[:1], ("jax torch_triton",))
    planned += [(_batch(*shape), everything | foreign) for shape in BATCHES]
    planned += [(_batch(*shape, tokens=4), native | peers) for shape in BATCHES]
    planned += [
        (_batch(*shape, kv_dtype=kv_dtype), native | peers)
        for shape in QUANTIZED
        for kv_dtype in ("int8", "float8_e4m3fn")
    ]
    planned += [(_batch(*shape, tokens=16), everything) for shape in VARIED]
    planned += [
        (_batch(*shape, tokens=DRAFTS, tree=tree), native | peers)
        for shape in VARIED
        for tree in ("", "drafts")
    ]
    planned += [(_batch(*shape, head_dim=d), everything) for d in (64, 256) for shape in VARIED]
    explicit = ours.decode_factories(targets[:1], ("torch gluon", "jax gluon"))
    mla = {Entry("FlashMLA"): flash_mla}
    planned += [(_latent(heads), native | explicit | mla) for heads in LATENT_HEADS]
    found = [decode_job(case, factories) for case, factories in planned]
    return found + [_shared_job(*sizes, factories=native | peers) for sizes in SHARED]


def _shared_job(*shape: int, factories: DecodeFactories) -> Job:
    *sizes, pages = shape
    batch, length, heads_q, heads_kv = sizes
    case = _batch(batch, length, heads_q, heads_kv)
    case = replace(case, name=f"cascade-{case.name}-{pages}-pages")
    cascades: DecodeFactories = {
        Entry(f"{subject.implementation} cascade", subject.target): partial(_cascade, factory)
        for subject, factory in factories.items()
        if subject.implementation in ("torch triton", "jax triton", "torch triton graph")
    }
    job = decode_job(case, factories | cascades)
    return replace(job, inputs=partial(_sharing, job.inputs, pages))


def _cascade(factory: ours.Factory, case: DecodeCase, tensors: DecodeTensors) -> Call:
    return factory(replace(case, cascade=True), tensors)


def _sharing(
    inputs: Callable[..., DecodeTensors], pages: int, device: str = "cuda"
) -> DecodeTensors:
    tensors = inputs(device)
    tensors.block_tables[:, :pages] = tensors.block_tables[:1, :pages].clone()
    return tensors


def _latent(heads: int) -> DecodeCase:
    return DecodeCase(
        f"latent-64x8192-heads-{heads}", (8192,) * 64, 1, heads, 1, LATENT_DIM_MAX, 512,
        dtype="bfloat16", page_size=64, max_pages=128, latent=True,
    )  # fmt: skip


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
    tree: str = "",
) -> DecodeCase:
    variant = "" if tokens == 1 else f"-{tokens}-tokens"
    variant += f"-{tree}" if tree else ""
    variant += "" if head_dim == 128 else f"-d{head_dim}"
    variant += f"-{kv_dtype}" if kv_dtype else ""
    return DecodeCase(
        f"{batch}x{length}-heads-{heads_q}-{heads_kv}{variant}", (length,) * batch, tokens,
        heads_q, heads_kv, head_dim, dtype="float16", page_size=16, max_pages=length // 16,
        kv_dtype=kv_dtype, tree=tree,
    )  # fmt: skip


def _ours(targets: Sequence[str]) -> DecodeFactories:
    factories = ours.decode_factories(targets)
    graphs = {
        Entry("torch triton graph", t): partial(_graph, factories[Entry("torch triton", t)])
        for t in targets
    }
    return factories | graphs


def _graph(factory: ours.Factory, case: DecodeCase, tensors: DecodeTensors) -> Call:
    import torch

    call = factory(case, tensors)
    call.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # JAX's threads may allocate meanwhile; only the capturing thread may not.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = call.run()

    def run() -> Any:
        graph.replay()
        return results

    return Call(run, call.result)
