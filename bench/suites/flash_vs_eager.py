"""One causal head, short to long, against attention that keeps all scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from bench import ours
from bench.calls import torch_call
from bench.job import Call, Job, Operation, Subject
from bench.peers import FLASH
from bench.records import Record
from bench.suites import Cells
from bench.suites.flash_job import FlashMaker, flash_job
from interop.parity.cases import FlashCase

if TYPE_CHECKING:
    from torch import Tensor

TITLE = "Flash attention against eager attention"
NOTE = (
    "One call is causal attention of one head of one sequence. Eager is the formula in torch "
    "operations with a mask made beforehand, jax.nn XLA the same in JAX under jit, SDPA the "
    "kernel that torch chooses by itself. FLOPs are those of the pairs that the mask keeps. "
    "Backward is timed by itself, on a graph that is made beforehand. What needs more memory than "
    "--memory-cap leaves is a row without a time. JAX compiles for every shape and is timed at "
    "few. In float32 all of them multiply in float32, as TF32 is off in torch and jax.nn XLA runs "
    "at the highest precision: eager and XLA in the libraries' kernels, ours in Triton's."
)

DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
LENGTHS = {  # by head size; fewer for two of them, as the suite is to take minutes
    64: (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    32: (128, 2048, 32768),
    16: (128, 2048, 32768),
}
JAX_LENGTHS = {64: (2048, 32768), 32: (2048,), 16: (2048,)}
OPERATIONS: tuple[Operation, ...] = ("forward", "backward", "both")


def jobs(targets: Sequence[str], pattern: str = "") -> list[Job]:
    """Forward, backward and both of every case whose name contains `pattern`.

    Args:
        targets: what our kernels are compiled for; only the first, the device's own, is timed.
    """
    return [
        flash_job(case, operation, _makers(case, targets[:1]))
        for case in cases()
        if pattern in case.name
        for operation in OPERATIONS
    ]


def cases() -> list[FlashCase]:
    """Every dtype, head size and length."""
    found = []
    for (dtype, short), (head_dim, lengths) in product(DTYPES.items(), LENGTHS.items()):
        for length in lengths:
            name = f"{short}-d{head_dim}-{length}"
            found.append(
                FlashCase(name, 1, length, length, 1, 1, head_dim, dtype=dtype, causal=True)
            )
    return found


def columns(record: Record) -> Cells:
    """Return the length, the head size and the dtype."""
    case = record.case
    return {"length": case["seq_q"], "d": case["head_dim"], "dtype": case["dtype"]}


def _makers(case: FlashCase, targets: Sequence[str]) -> dict[Subject, FlashMaker]:
    twins = ours.flash_makers(targets, compiling=False)
    peers = {Subject("eager"): FLASH["eager"], Subject("SDPA"): _sdpa}
    if case.seq_q in JAX_LENGTHS[case.head_dim]:
        return twins | peers | {Subject("jax.nn XLA"): FLASH["jax.nn XLA"]}
    triton = {s: maker for s, maker in twins.items() if s.implementation == "torch triton"}
    return triton | peers


def _sdpa(case: FlashCase, operation: str, tensors: list[Tensor]) -> Call:
    """torch's own choice of a kernel."""
    from torch.nn.functional import scaled_dot_product_attention

    attend = partial(scaled_dot_product_attention, is_causal=True)
    return torch_call(attend, operation, tensors, heads_first=True)
