"""Training steps of `models/` with each attention, in both frameworks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from bench.job import Entry
from bench.records import Record
from bench.report.tables import status
from bench.report.training import GAINS, gains, mfu, phases, warmups
from bench.suites.columns import MEMORY, MODEL, SAVED
from bench.training.case import ATTENTIONS, FORM_ATTENTIONS, TrainingCase
from bench.training.job import TrainingJob, start
from bench.training.steps import OPERATIONS, WARMUPS, observe
from twin_attention.interop.rendering.tables import Grid

TITLE = "Training steps"
NOTE = (
    "A step is a forward with its loss, a backward and an AdamW update, of a transformer of "
    "`models/` on random tokens. A case is a size, batch x context, and a dtype: 'mixed' is "
    "bfloat16 products on float32 parameters. Names are the framework and its attention; "
    "'compiled' has each block under torch.compile, and JAX is jitted. In torch the phases of a "
    "step lie between events on the device, and the step is all of them; in JAX each phase is a "
    "program of its own and the step another one, which the host waits for. Means are of up to 10 "
    "steps after a warm-up of 0, 1 or 5; the first step compiles what is not in a cache on disk. "
    "FLOPs are the model's, with a backward of two forwards and no optimizer; MFU is their rate "
    "over the datasheet's for bfloat16, whatever the dtype. Saved is what a forward leaves for its "
    "backward, memory all that is allocated at the peak, parameters and optimizer included; of JAX "
    "it is what XLA plans. A CPU's memory is not known to torch."
)

TINY = (TrainingCase("tiny", 2, 64),)
# By value, because a run may be cut off.
CASES = (
    *(TrainingCase("M", 1, context) for context in (4096, 16384)),
    TrainingCase("M", 4, 4096),
    *(TrainingCase("S", 1, context) for context in (1024, 4096, 16384, 65536)),
    *(TrainingCase("S", 4, 1024, dtype) for dtype in ("mixed", "float32", "bfloat16")),
    TrainingCase("S", 16, 1024),
    *(TrainingCase(size, 4, 256, form="gpt") for size in ("S", "M", "L", "XL", "2.7B")),
    *(TrainingCase(size, 4, 256, "float32", "gpt") for size in ("S", "M", "L", "XL", "2.7B")),
)
COMPILED = ("M-1x4096-mixed", "S-4x1024-mixed", "tiny-2x64-mixed")
IN_JAX = (
    "M-1x4096-mixed",
    "M-4x4096-mixed",
    "S-1x16384-mixed",
    "S-4x1024-mixed",
    "tiny-2x64-mixed",
)


def jobs(targets: Sequence[str | None]) -> list[TrainingJob]:
    """Torch goes first: JAX keeps the memory that it took. Jobs are tiny on a CPU."""
    target = targets[0]
    cases = TINY if target is None else CASES
    return [job for side in ATTENTIONS for case in cases for job in _jobs(case, side, target)]


def _jobs(case: TrainingCase, framework: str, target: str | None) -> Iterator[TrainingJob]:
    modes = {"torch": ("", " compiled"), "jax": ("",)}[framework]
    for mode in modes:
        if (mode and case.name not in COMPILED) or (framework == "jax" and case.name not in IN_JAX):
            continue
        for attention in ATTENTIONS[framework]:
            if attention not in FORM_ATTENTIONS.get(case.form, ATTENTIONS[framework]):
                continue
            name = f"{framework} {attention}{mode}"
            subject = Entry(name, target if attention == "twin" else None)
            device = "cpu" if target is None else "cuda"
            begin = partial(start, case, framework, attention, device, compiled=bool(mode))
            yield TrainingJob(case, subject, begin, observe, OPERATIONS)


def _tokens_per_second(record: Record) -> float | None:
    tokens = record.case["batch"] * record.case["context"]
    counts = record.operation != "optimizer"
    return 1e3 * tokens / record.times.median if counts and record.times else None


COLUMNS = MODEL | {
    "tokens/s": _tokens_per_second, "MFU": mfu, "of datasheet": lambda record: None,
    "saved, MB": SAVED, "memory, MB": MEMORY, "status": status,
}  # fmt: skip


def tables(records: Sequence[Record]) -> dict[str, Grid]:
    """Return the gain of attention per step, phases with memory, and means by warm-up."""
    after = ", ".join(map(str, WARMUPS))
    deviation = "mean ± standard deviation"
    return {
        GAINS: gains(records),
        f"Phases after a warm-up of {WARMUPS[-1]} steps ({deviation})": phases(records),
        f"Phases after a warm-up of {after} steps, ms ({deviation})": warmups(records),
    }
