"""The suites by their command's name.

Suite "a-b" is the module `bench.suites.a_b`, imported when its command runs. It offers:

- ``TITLE``, ``NOTE``: of its tables;
- ``jobs(targets)``: a list of `Job`s, `TrainingJob`s, `ParityJob`s or `FirstCallJob`s, for each of
  `targets`, the device's own first; (None,) is a CPU;
- ``COLUMNS``: its own columns, also asked for records without a time; a common column of the same
  title is left out;
- ``tables(records)``, if it replaces the common tables, by heading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from bench.records import Record

Cells = dict[str, str | float | None]  # by title
Column = str | Callable[[Record], Any]  # a field of the case, or a function of the record

SUITES = {
    "parity": "errors of a few small problems, beside float64; nothing is timed",
    "flash": "flash attention over lengths and head dimensions, beside every peer",
    "kvcache": "paged decode of one sequence and of batches, over KV lengths",
    "fa2": "FlashAttention-2's shapes in fp16, with clocks and power",
    "eager": "flash attention against eager attention, with the memory they take",
    "float32": "flash attention in float32, with IEEE products and with TF32",
    "packed": "documents of different lengths in one batch without padding, beside every peer",
    "patterns": "block-sparse and dilated attention, beside dense attention and every peer",
    "scores": "biases, tables of distances, slopes, dropout, row maxima, beside plain attention",
    "tree": "trees of tokens: a prompt with continuations, beside separate sequences and masks",
    "ranges": "a prefix, spans and block diffusion, beside masks, a bias and plain causality",
    "prefill": "chunks of prompts and single tokens over a paged cache, beside FlashInfer",
    "context": "context parallel attention, a rank's time beside its share of the whole sequence's",
    "host": "the host's share of calls on small problems",
    "first": "first calls in new processes, with empty caches",
    "end-to-end": "training steps, prefill and decode of transformers with each attention",
    "hugging-face": "training steps and generated tokens of Hugging Face's models",
    "memory": "a training step's memory by category, with our attention and without",
}
ON_CPU = ("end-to-end", "hugging-face", "memory")  # run a tiny model there


class Suite(Protocol):
    """The interface of a suite's module."""

    TITLE: str
    NOTE: str

    COLUMNS: Mapping[str, Column]

    def jobs(self, targets: Sequence[Any]) -> list[Any]: ...


def load(name: str) -> Suite:
    return cast(Suite, import_module(f"bench.suites.{name.replace('-', '_')}"))


def cells(columns: Mapping[str, Column], record: Record) -> Cells:
    return {
        title: record.case[column] if isinstance(column, str) else column(record)
        for title, column in columns.items()
    }
