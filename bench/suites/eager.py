"""Time and memory of attention that keeps all scores, compared with kernels that do not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from bench import ours
from bench.job import Entry, Job
from bench.peers import FLASH, SDPA
from bench.problems import Factories, attention_jobs
from bench.suites.columns import MEMORY, SAVED
from twin_attention.interop.parity.cases import FlashCase

DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
LENGTHS = {  # by head dimension; fewer for two of them, as the suite is to take minutes
    64: (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    32: (128, 2048, 32768),
    16: (128, 2048, 32768),
}
JAX_LENGTHS = {64: (2048, 32768), 32: (2048,), 16: (2048,)}
BATCH, BATCH_HEAD_DIMS, BATCH_LENGTHS = 8, (16, 32, 64, 128), (256, 1024, 4096, 8192, 16384)
COLUMNS = {
    "batch": "batch", "length": "seq_q", "d": "head_dim", "dtype": "dtype", "saved, MB": SAVED,
    "memory, MB": MEMORY,
}  # fmt: skip


def jobs(targets: Sequence[str]) -> list[Job]:
    factories = partial(_factories, targets[:1])
    single, batches = _cases()
    return [
        *attention_jobs(single, ("forward", "backward", "both"), factories),
        *attention_jobs(batches, ("forward", "backward"), factories),
    ]


def _cases() -> tuple[list[FlashCase], list[FlashCase]]:
    single = [
        FlashCase(f"{short}-d{d}-{n}", 1, n, n, 1, 1, d, dtype=dtype, causal=True)
        for (dtype, short), (d, lengths) in product(DTYPES.items(), LENGTHS.items())
        for n in lengths
    ]
    batches = [
        FlashCase(f"d{d}-{n}", BATCH, n, n, 1, 1, d, dtype="float32")
        for d, n in product(BATCH_HEAD_DIMS, BATCH_LENGTHS)
    ]
    return single, batches


def _factories(targets: Sequence[str], case: FlashCase) -> Factories:
    twins = ours.flash_factories(targets, variants=False)
    # Those of every dtype.
    jax_twin, torch_twin = (
        {s: factory for s, factory in twins.items() if s.implementation == name}
        for name in ("jax triton", "torch triton")
    )
    eager = {Entry("eager"): FLASH["eager"]}
    if not case.causal:
        return torch_twin | eager
    eager[Entry("SDPA")] = SDPA
    if case.seq_q not in JAX_LENGTHS[case.head_dim]:
        return torch_twin | eager
    return torch_twin | jax_twin | eager | {Entry("jax.nn XLA"): FLASH["jax.nn XLA"]}
