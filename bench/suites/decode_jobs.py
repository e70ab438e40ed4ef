"""Jobs of a paged decode, for the suites that time it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from bench.job import Call, Check, Job, Subject
from interop.parity.cases import DecodeCase
from twin_attention.contract.cost import ITEMSIZE, decode_bytes, decode_flops

if TYPE_CHECKING:
    from bench.suites.decode_inputs import DecodeTensors

# Returns a call of an implementation from the case and its tensors.
DecodeFactory = Callable[[DecodeCase, "DecodeTensors"], Call]
DecodeFactories = dict[Subject, DecodeFactory]


def decode_job(case: DecodeCase, factories: DecodeFactories) -> Job:
    """Return the job of a case, with its reads and writes."""
    spec, total = case.spec, decode_bytes(case.spec, case.lengths)
    row = spec.head_dim_v * ITEMSIZE[spec.dtype] + 4  # and its log-sum-exp
    writes = spec.batch * spec.tokens * spec.heads_q * row
    return Job(
        case=asdict(case),
        operation="decode",
        flops=decode_flops(spec, case.lengths),
        bytes=total,
        inputs=partial(decode_inputs, case),
        factories={s: partial(factory, case) for s, factory in factories.items()},
        check=partial(_check, case),
        reads=total - writes,
        writes=writes,
    )


def decode_inputs(case: DecodeCase) -> DecodeTensors:
    """Return the tensors of a case on the GPU."""
    from bench.suites.decode_inputs import decode_tensors

    return decode_tensors(case)


def _check(case: DecodeCase, tensors: DecodeTensors) -> Check:
    from interop.parity.check import sample_check

    return sample_check(tensors.arguments, case.spec, ("out",))
