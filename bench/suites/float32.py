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
