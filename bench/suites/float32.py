"""Flash attention in float32, with products in IEEE precision and in TF32, and torch's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from bench import ours
from bench.job import Entry, Job
from bench.peers import EFFICIENT
from bench.problems import Factories, attention_jobs
from bench.suites.columns import OPERATION, TFLOPS, yes_no
from twin_attention.contract.spec import PRECISIONS
from twin_attention.interop.parity.cases import FlashCase

TITLE = "Flash attention in float32"
NOTE = (
    "4 sequences of 4096 tokens in 16 heads. The precision is our option, and that of the budget "
    "which results are held to. SDPA efficient is torch's memory-efficient attention at its "
    "default precision: each product is made of three TF32 products, about as exact as IEEE's. "
    "Beside either precision it is the same call. FLOPs are those of the pairs that the mask "
    "keeps, 2.5 times as many backward. A backward is timed by itself, on a graph that is made "
    "beforehand."
)

HEAD_DIMS = (64, 128)
COLUMNS = {
    "d": "head_dim", "causal": yes_no("causal"), "precision": "precision", "pass": OPERATION,
    "TFLOP/s": TFLOPS,
}  # fmt: skip


def jobs(targets: Sequence[str]) -> list[Job]:
    return attention_jobs(cases(), ("forward", "backward"), partial(_factories, targets))


def cases() -> list[FlashCase]:
    return [
        FlashCase(
            f"{precision}-d{head_dim}" + ("-causal" if causal else ""), 4, 4096, 4096, 16, 16,
            head_dim, dtype="float32", causal=causal, precision=precision,
        )
        for head_dim, causal, precision in product(HEAD_DIMS, (False, True), PRECISIONS)
    ]  # fmt: skip


def _factories(targets: Sequence[str], case: FlashCase) -> Factories:
    twins = ours.flash_factories(targets, variants=False)
    portable = {s: make for s, make in twins.items() if s.implementation.endswith(" triton")}
    return portable | {Entry("SDPA efficient"): EFFICIENT}
