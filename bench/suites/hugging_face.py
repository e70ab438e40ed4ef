"""Training steps and generated tokens of Hugging Face's models with each of three attentions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from bench.job import Entry
from bench.report.tables import status
from bench.suites.columns import MODEL
from bench.training.case import TrainingCase
from bench.training.job import TrainingJob
from twin_attention.interop.parity.subjects.absent import Absent

CASES = (
    *(TrainingCase(name, 4, 2048, "bfloat16") for name in ("Llama", "Gemma 3", "gpt-oss")),
    *(TrainingCase(name, 16, 512, "bfloat16") for name in ("T5", "BERT")),
)
ATTENTIONS = ("twin", "sdpa", "eager")


def jobs(targets: Sequence[str | None]) -> list[TrainingJob]:
    device, found = "cpu" if targets[0] is None else "cuda", []
    for case in CASES:
        if device == "cpu":
            case = TrainingCase(case.size, 2, 16, case.dtype)
        operations = ("step",) if case.size == "BERT" else ("generate", "step")
        for name in ATTENTIONS:
            if (case.size, name) == ("gpt-oss", "sdpa"):  # it takes no sinks
                continue
            subject = Entry(f"torch {name}", targets[0] if name == "twin" else None)
            begin = partial(_start, case, name, device)
            observe = lambda model, case, show: model.observe(show)  # noqa: E731
            found.append(TrainingJob(case, subject, begin, observe, operations))
    return found


def _start(case: TrainingCase, attention: str, device: str) -> Any:
    try:
        from bench.training.programs import JudgedModel
    except ImportError as error:  # not installed, or too old for the adapter
        raise Absent(f"transformers: {error}") from error
    return JudgedModel(case, attention, device)


COLUMNS = MODEL | {"judged": attrgetter("judged"), "status": status}
