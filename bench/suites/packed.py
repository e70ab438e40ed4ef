"""Packed documents: attention over consecutive sequences of different lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from random import Random
from typing import TYPE_CHECKING

from bench import ours
from bench.job import Call, Entry, Job, Operation
from bench.peers import PACKED
from bench.problems import (
    Factories,
    attention_check,
    attention_jobs,
    attention_tensors,
    checked,
    document_lengths,
)
from bench.records import YARDSTICKS
from bench.suites.columns import HOST, OPERATION, TFLOPS
from twin_attention.interop.parity.cases import FlashCase, VarlenCase

if TYPE_CHECKING:
    from torch import Tensor


CHANNELS, MEAN_LENGTH, SIGMA = 2048, 1024, 1.0
SEED = 43  # with which the documents drawn have 1092 and 1040 tokens on average
HEAD_DIMS, TOKENS, EQUAL_TOKENS = (64, 128), (16384, 65536), 16384
COLUMNS = {
    "documents": lambda record: len(record.case["lengths"]),
    "tokens": lambda record: sum(queries for queries, _ in record.case["lengths"]),
    "longest": lambda record: max(queries for queries, _ in record.case["lengths"]),
    "H": "heads_q", "D": "head_dim", "pass": OPERATION, "TFLOP/s": TFLOPS, "host, us": HOST,
}  # fmt: skip


def jobs(targets: Sequence[str]) -> list[Job]:
    return attention_jobs(cases(), ("forward", "backward"), lambda _: factories(targets))


def cases() -> list[VarlenCase]:
    distributions = {f"lognormal-{tokens}": lognormal(tokens) for tokens in TOKENS}
    equal = [MEAN_LENGTH] * (EQUAL_TOKENS // MEAN_LENGTH)
    distributions[f"equal-{EQUAL_TOKENS}"] = equal
    return [
        VarlenCase(
            f"{name}-d{head_dim}", tuple((n, n) for n in lengths), (0, 0), CHANNELS // head_dim,
            CHANNELS // head_dim, head_dim,
        )
        for head_dim, (name, lengths) in product(HEAD_DIMS, distributions.items())
    ]  # fmt: skip


def lognormal(tokens: int) -> list[int]:
    """Return lengths of documents that fill the tokens, always the same."""
    rng = Random(SEED)
    mu = math.log(MEAN_LENGTH) - SIGMA**2 / 2
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(1, round(rng.lognormvariate(mu, SIGMA)))))
    return lengths


def dense_case(case: VarlenCase) -> FlashCase:
    """Return dense attention with about as many visible pairs: a batch of equal documents."""
    lengths = document_lengths(case)
    batch, length = len(lengths), lengths[0]
    if len(set(lengths)) > 1:
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        batch, length = 1, round(math.sqrt(2 * pairs + 0.25) - 0.5)
    return FlashCase(
        f"{case.name}-dense", batch, length, length, case.heads_q, case.heads_kv, case.head_dim,
        dtype=case.dtype, causal=case.causal,
    )  # fmt: skip


def factories(targets: Sequence[str]) -> Factories:
    dense = {
        Entry(yardstick, target): partial(_dense, Entry(name, target))
        for (name, yardstick), target in product(YARDSTICKS.items(), targets)
    }
    peers = {Entry(name): factory for name, factory in PACKED.items()}
    return ours.packed_factories(targets) | dense | peers


def _dense(subject: Entry, case: VarlenCase, operation: Operation, tensors: list[Tensor]) -> Call:
    dense = dense_case(case)
    make = ours.flash_factories([subject.target or ""])[subject]
    own = attention_tensors(dense, str(tensors[0].device))
    return checked(make(dense, operation, own), attention_check(dense, operation, own))
