"""Time forward mode, out and its tangent, against the forward."""

from __future__ import annotations

from collections.abc import Sequence

from bench import ours
from bench.job import Entry, Job, Operation
from bench.peers import TANGENTS
from bench.problems import attention_job
from twin_attention.interop.parity.cases import FlashCase

SHAPES = ((4, 1024, 64), (1, 4096, 64), (1, 4096, 128))  # batch, length, head dimension
HEADS, HEADS_CHECKED = 16, 2
OPERATIONS: tuple[Operation, ...] = ("forward", "jvp")
COLUMNS = {"length": "seq_q", "batch": "batch", "D": "head_dim"}


def jobs(targets: Sequence[str]) -> list[Job]:
    return [
        job(case, operation, targets[:1])
        for batch, length, head_dim in SHAPES
        for causal in (False, True)
        for operation in OPERATIONS
        for case in [
            FlashCase(
                f"{batch}x{length}x{HEADS}x{head_dim}{'-causal' * causal}", batch, length, length,
                HEADS, HEADS, head_dim, causal=causal,
            )
        ]
    ]  # fmt: skip


def job(case: FlashCase, operation: Operation, targets: Sequence[str]) -> Job:
    peers = {Entry(name): factory for name, factory in TANGENTS.items()}
    return attention_job(case, operation, ours.score_factories(targets) | peers, HEADS_CHECKED)
