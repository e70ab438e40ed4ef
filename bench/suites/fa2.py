"""The forward at shapes that FlashAttention-2 is often timed at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from bench import ours
from bench.job import Entry, Job
from bench.peers import FLASH
from bench.problems import Factories, attention_jobs
from bench.suites.columns import TFLOPS, of_gpu, yes_no
from twin_attention.interop.parity.cases import FlashCase

HEADS_Q, HEAD_DIM = 32, 128
SHAPES = ((16, 1024, 1024), (4, 1024, 4096), (1, 4096, 4096))  # batch, queries, keys
HEADS_KV = (32, 8)
PEERS = ("FA2", "cuDNN")
COLUMNS = {
    "bs": "batch", "Sq": "seq_q", "Skv": "seq_kv", "heads kv": "heads_kv",
    "causal": yes_no("causal"), "TFLOP/s": TFLOPS, "SM clock, MHz": of_gpu("sm_mhz"),
    "power, W": of_gpu("watts"),
}  # fmt: skip


def jobs(targets: Sequence[str]) -> list[Job]:
    return attention_jobs(cases(), ("forward",), partial(_factories, targets))


def cases() -> list[FlashCase]:
    found = []
    for causal, heads_kv, (batch, seq_q, seq_kv) in product((False, True), HEADS_KV, SHAPES):
        name = f"{batch}x{seq_q}x{seq_kv}-kv{heads_kv}" + ("-causal" if causal else "")
        case = FlashCase(
            name, batch, seq_q, seq_kv, HEADS_Q, heads_kv, HEAD_DIM, dtype="float16", causal=causal
        )
        found.append(case)
    return found


def _factories(targets: Sequence[str], case: FlashCase) -> Factories:
    factories = ours.flash_factories(targets, variants=False)
    if case.heads_kv != case.heads_q:  # JAX compiles for every shape
        for target in targets[1:]:
            del factories[Entry("jax triton", target)]
    return factories | {Entry(name): FLASH[name] for name in PEERS}
