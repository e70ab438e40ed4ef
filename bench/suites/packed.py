"""Packed documents: attention over sequences of different lengths, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from random import Random
from typing import TYPE_CHECKING

from bench import ours
from bench.job import Call, Check, Job, Operation, Subject
from bench.peers import PACKED
from bench.peers.packed_peers import document_lengths, offsets_of
from bench.records import YARDSTICKS, Record
from bench.suites import Cells
from bench.suites.flash_jobs import flash_jobs, flash_tensors
from interop.parity.cases import FlashCase, VarlenCase
from twin_attention.contract.cost import (
    backward_bytes,
    forward_bytes,
    varlen_backward_flops,
    varlen_forward_flops,
)

if TYPE_CHECKING:
    from torch import Tensor

TITLE = "Packed documents"
NOTE = (
    "bfloat16, causal within each document, 2048 channels. The lengths of 'lognormal' documents "
    "are drawn once, log-normal around a mean of 1024, and the last one is cut to fill the tokens; "
    "'equal' documents have 1024 tokens each. FLOPs are those of the pairs within documents, 2.5 "
    "times as many backward, also of an implementation that works on more. 'dense' is the portable "
    "kernel of flash_attention on other tensors with as many visible pairs: the equal documents as "
    "a batch, or else one sequence. 'padded' peers get the documents as a batch padded to the "
    "longest one, which is made beforehand, as FlexAttention's block mask is. FA2 varlen is the "
    "FlashAttention-2 in torch."
)

CHANNELS, MEAN_LENGTH, SIGMA = 2048, 1024, 1.0
SEED = 43  # with which the documents drawn have 1092 and 1040 tokens on average
HEAD_DIMS, TOKENS, EQUAL_TOKENS = (64, 128), (16384, 65536), 16384


def jobs(targets: Sequence[str], pattern: str = "") -> list[Job]:
    """Return forward and backward of every case whose name contains `pattern`.

    Args:
        targets: of our kernels, the device's own first.
        pattern: part of a case's name.
    """
    operations: tuple[Operation, ...] = ("forward", "backward")
    chosen = [case for case in cases() if pattern in case.name]
    return [_job(case, name, targets) for case in chosen for name in operations]


def cases() -> list[VarlenCase]:
    """Return both distributions of lengths at every head size."""
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
    """Return lengths of documents that fill the tokens, the same every time."""
    rng = Random(SEED)
    mu = math.log(MEAN_LENGTH) - SIGMA**2 / 2
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(1, round(rng.lognormvariate(mu, SIGMA)))))
    return lengths


def columns(record: Record) -> Cells:
    """Return documents, shape, pass, rate and the host's latency."""
    case, host = record.case, record.host
    lengths = [queries for queries, _ in case["lengths"]]
    return {
        "documents": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "H": case["heads_q"],
        "D": case["head_dim"],
        "pass": record.operation,
        "TFLOP/s": record.tflops,
        "host, us": None if host is None else host.median * 1e3,
    }


def dense_case(case: VarlenCase) -> FlashCase:
    """Return dense attention with as many visible pairs, or nearly: equal documents as a batch."""
    lengths = document_lengths(case)
    batch, length = len(lengths), lengths[0]
    if len(set(lengths)) > 1:
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        batch, length = 1, round(math.sqrt(2 * pairs + 0.25) - 0.5)
    return FlashCase(
        f"{case.name}-dense", batch, length, length, case.heads_q, case.heads_kv, case.head_dim,
        dtype=case.dtype, causal=case.causal,
    )  # fmt: skip


def packed_tensors(case: VarlenCase, device: str = "cuda") -> list[Tensor]:
    """Return q, k, v and dout [T, H, D], random normal."""
    from interop.parity.inputs import make_inputs

    inputs = make_inputs(case, device)
    return [inputs[name] for name in ("q", "k", "v", "dout")]


def _job(case: VarlenCase, operation: Operation, targets: Sequence[str]) -> Job:
    forward = varlen_forward_flops(case.spec, case.lengths), forward_bytes(case.spec)
    backward = varlen_backward_flops(case.spec, case.lengths), backward_bytes(case.spec)
    flops, traffic = {"forward": forward, "backward": backward}[operation]
    factories = _factories(targets)
    return Job(
        case=asdict(case),
        operation=operation,
        flops=flops,
        bytes=traffic,
        inputs=partial(packed_tensors, case),
        factories={s: partial(factory, case, operation) for s, factory in factories.items()},
        check=partial(_check, case, operation),
    )


def _factories(targets: Sequence[str]) -> Mapping[Subject, Callable[..., Call]]:
    dense = {
        Subject(yardstick, target): partial(_dense, Subject(name, target))
        for (name, yardstick), target in product(YARDSTICKS.items(), targets)
    }
    peers = {Subject(name): factory for name, factory in PACKED.items()}
    return ours.packed_factories(targets) | dense | peers


def _dense(subject: Subject, case: VarlenCase, operation: Operation, tensors: list[Tensor]) -> Call:
    """Return the call of a dense yardstick, checked here on tensors of its own."""
    dense = dense_case(case)
    (job,) = flash_jobs([dense], (operation,), lambda _: ours.flash_factories([subject[1] or ""]))
    own = flash_tensors(dense, str(tensors[0].device))
    call = job.factories[subject](own)
    assert job.check is not None
    assert call.result is not None
    error = job.check(own)(call.result(call.run()))
    if error > 1:
        raise ValueError(f"its error is {error:.3g} times the budget")
    return call._replace(result=None)


def _check(case: VarlenCase, operation: str, tensors: list[Tensor]) -> Check:
    from interop.parity.check import sample_check

    q, k, v, dout = tensors
    offsets = offsets_of(case, q.device)
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    if operation == "forward":
        return sample_check(inputs, case.spec, ("out",))
    return sample_check(inputs | {"dout": dout}, case.spec, ("dq", "dk", "dv"))
