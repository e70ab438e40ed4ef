"""The suites by their command's name.

Suite "a-b" is the module `bench.suites.a_b`, imported when its command runs. Its texts are in
`texts.toml`. It offers:

- ``jobs(targets)``: a list of `Job`s, `TrainingJob`s or `FirstCallJob`s, for each of `targets`,
  the device's own first; (None,) is a CPU;
- ``COLUMNS``: its own columns, also asked for records without a time; a common column of the same
  title is left out;
- ``tables(records)``, if it replaces the common tables, by heading.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from bench.records import Record

Cells = dict[str, str | float | None]  # by title
Column = str | Callable[[Record], Any]  # a field of the case, or a function of the record


class Texts(NamedTuple):
    about: str
    title: str
    note: str


_TEXTS = Path(__file__).parent / "suites" / "texts.toml"
SUITES = {x: Texts(**texts) for x, texts in tomllib.loads(_TEXTS.read_text("utf-8")).items()}
ON_CPU = ("end-to-end", "hugging-face", "memory")  # run a tiny model there


class Suite(Protocol):
    COLUMNS: Mapping[str, Column]

    def jobs(self, targets: Sequence[Any]) -> list[Any]: ...


def load(name: str) -> Suite:
    return cast(Suite, import_module(f"bench.suites.{name.replace('-', '_')}"))


def cells(columns: Mapping[str, Column], record: Record) -> Cells:
    return {
        title: record.case[column] if isinstance(column, str) else column(record)
        for title, column in columns.items()
    }
