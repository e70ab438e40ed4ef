"""What a suite's module gives the report: a title, a note and the columns of its table.

``bench/suites/NAME.py`` of suite "name" defines ``TITLE``, ``NOTE`` (the method and what of it was
mended; shown with the table) and ``columns(record)``: the record's own cells of the suite's table,
title to text, number or None. A record without a time is asked as well. The report adds what every
table has: implementation, milliseconds, spread, limits, ratio to the best peer, and the status.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Protocol

from bench.records import Record

Cells = dict[str, str | float | None]


class Suite(Protocol):
    """What the report asks of a suite's module."""

    TITLE: str
    NOTE: str

    def columns(self, record: Record) -> Cells: ...


def suite(name: str) -> Suite:
    """The module of a suite; a stand-in for records of one that is gone."""
    module = f"bench.suites.{name.replace('-', '_')}"
    if name and find_spec("bench.suites") and find_spec(module):
        return import_module(module)  # type: ignore[return-value]
    return SimpleNamespace(TITLE=name or "Benchmark", NOTE="", columns=lambda record: {})
