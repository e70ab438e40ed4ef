"""Attention to a part of the pairs: by block masks, and dilated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from bench.dilation import dilated_check, dilated_flops
from bench.job import Absent, Call, Check, Job, Operation, Subject
from bench.peers import SPARSE
from bench.records import DENSE, Record
from bench.report.patterns import doublings, gains, rows
from bench.report.training import status
from bench.suites import Cells
from bench.suites.flash_jobs import flash_tensors
from bench.suites.pattern_calls import pattern_factories
from bench.suites.pattern_cases import SparseCase, dense_case, pattern_cases
from bench.suites.pattern_modules import module_factories
from interop.parity.cases import DilatedCase, FlashCase
from interop.rendering.tables import Grid
from twin_attention.contract.cost import (
    backward_bytes,
    block_sparse_backward_flops,
    block_sparse_forward_flops,
    forward_bytes,
)

if TYPE_CHECKING:
    from torch import Tensor

TITLE = "Block-sparse and dilated attention"
NOTE = (
    "'random' keeps 10 % of the tiles of 128 queries by 128 keys, the diagonal's among them; "
    "'local' is causal, with a band of 8 tiles and one global tile. 'dilated' has LongNet's "
    "segments of 2048 to 32768 tokens and rates of 1 to 16 in bfloat16, as far as they fit; in "
    "float32 segments of 128 to 512 and rates of 1 to 4, which are 1 where it is 'undilated'. "
    "'dense' is flash_attention without the pattern, 'standard' the formula of dilated attention: "
    "a call of flash_attention for each pair, merged by the framework's operations. 'module' is "
    "the multi-head module, whose FLOPs leave out its four projections; in float32 they multiply "
    "without TF32. Of its results the output is checked. Ours run with "
    "the implementation that they choose. FlexAttention is compiled, with a block mask made "
    "beforehand; jax.nn XLA makes its mask of pairs in each call. FLOPs are those of the pairs "
    "that the pattern keeps, of the dense rows as well, so that rates compare as times do. Memory "
    "is what a call adds at its peak, of JAX what XLA plans. What compiles for every shape, or "
    "takes over a second, is timed at the lengths that the message beside it says."
)

HEADS = 2  # whose rows are checked
# Where an implementation is timed, if not everywhere: it compiles for every shape, or takes over a
# second. All of it is to take minutes.
AT_LENGTHS: Mapping[str, tuple[int, ...]] = {
    "torch dense": (1024, 16384, 32768, 65536),
    "torch module": (1024, 32768),
    "jax block-sparse": (1024, 32768),
    "jax dense": (32768,),
    "jax dilated": (1024, 65536, 131072),
    "jax standard": (1024, 65536),
    "jax module": (1024,),
    "FlexAttention": (1024, 32768),
    "jax.nn XLA": (1024, 4096),
}
OPERATIONS: tuple[Operation, ...] = ("forward", "both")


def jobs(targets: Sequence[str], pattern: str = "") -> list[Job]:
    """Return forward, and forward with backward, of every case whose name contains `pattern`.

    Args:
        targets: of our kernels; only the first, the device's own, is timed.
        pattern: part of a case's name.
    """
    found = []
    for case in pattern_cases():
        if pattern in case.name:
            make = partial(_sparse_job if isinstance(case, SparseCase) else _dilated_job, case)
            found += [make(operation, targets[0]) for operation in OPERATIONS]
    return found


def columns(record: Record) -> Cells:
    """Return the shape, the time, the memory and the rate of tokens."""
    case, times = record.case, record.times
    tokens = case["batch"] * case["seq_q"]
    return {
        "pattern": case["name"].partition("-")[0],
        "dtype": case["dtype"],
        "batch": case["batch"],
        "length": case["seq_q"],
        "heads": case["heads_q"],
        "ms": None if times is None else times.median,
        "memory, MB": None if record.memory is None else record.memory / 1e6,
        "tokens/s": None if times is None else 1e3 * tokens / times.median,
        "TFLOP/s": record.tflops,
        "status": status(record),
    }


def tables(records: Sequence[Record]) -> dict[str, Grid]:
    """Return speed-ups, what twice the tokens cost, and a row for each implementation."""
    return gains(records) | doublings(records) | rows(records, columns)


def _sparse_job(case: SparseCase, operation: Operation, target: str) -> Job:
    forward = block_sparse_forward_flops(case.spec, case.mask)
    backward = block_sparse_backward_flops(case.spec, case.mask)
    ours = pattern_factories(("block-sparse", "dense"), target)
    if case.pattern == "random":
        ours |= module_factories(target, _sparse_check)
    factories = {
        s: partial(_checked, factory) if s.implementation in DENSE else factory
        for s, factory in ours.items()
    }
    peers = {Subject(name): factory for name, factory in SPARSE.items()}
    return _job(case, operation, (forward, backward), factories | peers, _sparse_check)


def _dilated_job(case: DilatedCase, operation: Operation, target: str) -> Job:
    factories = pattern_factories(("dilated", "standard"), target)
    if set(case.dilation_rates) != {1}:
        factories |= module_factories(target, dilated_check)
    return _job(case, operation, dilated_flops(case), factories, dilated_check)


def _job(
    case: FlashCase,
    operation: Operation,
    flops: tuple[int, int],
    factories: Mapping[Subject, Callable[..., Call]],
    check: Callable[..., Check],
) -> Job:
    """Return a job, given the operations of a forward and of a backward."""
    both = operation == "both"
    chosen = {s: partial(f, case, operation) for s, f in factories.items()}
    for subject in chosen:
        lengths = AT_LENGTHS.get(subject.implementation)
        if lengths is not None and case.seq_q not in lengths:
            reason = f"timed at {', '.join(map(str, lengths))} tokens only"
            chosen[subject] = partial(_absent, reason)
    return Job(
        case=asdict(case),
        operation=operation,
        flops=flops[0] + both * flops[1],
        bytes=forward_bytes(case.spec) + both * backward_bytes(case.spec),
        inputs=partial(flash_tensors, dense_case(case)),
        factories=chosen,
        check=partial(check, case, operation),
    )


def _absent(reason: str, *_: Any) -> NoReturn:
    raise Absent(reason)


def _sparse_check(case: FlashCase, operation: str, tensors: list[Tensor]) -> Check:
    import torch

    from interop.parity.check import sample_check

    q, k, v, dout = tensors
    inputs = {"q": q, "k": k, "v": v}
    if isinstance(case, SparseCase):
        inputs["block_mask"] = torch.tensor(case.tiles[None, None], device=q.device)
    if operation == "forward":
        return sample_check(inputs, case.spec, ("out",), HEADS)
    return sample_check(inputs | {"dout": dout}, case.spec, ("out", "dq", "dk", "dv"), HEADS)


def _checked(
    factory: Callable[..., Call], case: SparseCase, operation: str, tensors: list[Tensor]
) -> Call:
    """Return the call of dense attention, checked here: its result is another one."""
    dense = dense_case(case)
    call = factory(dense, operation, tensors)
    assert call.result is not None
    error = _sparse_check(dense, operation, tensors)(call.result(call.run()))
    if error > 1:
        raise ValueError(f"its error is {error:.3g} times the budget")
    return call._replace(result=None)
