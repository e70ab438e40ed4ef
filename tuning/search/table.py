"""Edit a table of configurations as text: a row is a line, and other lines stay."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from twin_attention.targets.config import parse_table
from twin_attention.targets.kernels import KERNELS, KernelConfig, Spec

_ROW = re.compile(r"\s*\[.*\],\s*(#.*)?")  # a line


@dataclass(frozen=True)
class Row:
    kernel: str
    index: int
    key: tuple[tuple[str, Any], ...]
    config: KernelConfig

    def __str__(self) -> str:
        key = (f"{name}={value}" for name, value in self.key if value != "")
        return " ".join((self.kernel, *key))


class ConfigTable:
    def __init__(self, text: str) -> None:
        self.text = text
        self._rows = parse_table(text)

    def rows(self, kernel: str) -> Iterator[Row]:
        """Return a kernel's rows in order, without those for cards of less shared memory.

        These follow a row with the same key.
        """
        seen = set()
        for index, row in enumerate(self._rows.get(kernel, ())):
            if row.key not in seen:
                yield Row(kernel, index, row.key, row.config)
            seen.add(row.key)

    def index_of(self, kernel: str, spec: Spec) -> int | None:
        if not isinstance(spec, KERNELS[kernel].spec):
            return None
        rows = enumerate(self._rows.get(kernel, ()))
        return next((index for index, row in rows if row.serves(spec)), None)

    def write(self, row: Row, config: KernelConfig, note: str) -> None:
        """Replace a row's configuration and its comment, a line on when, where and how."""
        lines = self.text.splitlines()
        begin = lines.index(f"[{row.kernel}]")
        end = lines.index("]", begin)
        places = [place for place in range(begin, end) if _ROW.fullmatch(lines[place])]
        rows = tomllib.loads(self.text)[row.kernel]["rows"]
        rows[row.index][len(row.key) :] = vars(config).values()
        for place, line in zip(places, format_rows(rows), strict=True):
            _, hash_sign, comment = lines[place].partition("#")
            if place == places[row.index]:
                hash_sign, comment = "#", f" Tuned {note}"
            lines[place] = f"{line}  {hash_sign}{comment}".rstrip()
        self.text = "\n".join(lines) + "\n"
        self._rows = parse_table(self.text)


def format_rows(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return each row's line, with numbers and the commas after words in columns."""
    columns = []
    for column in zip(*rows, strict=True):
        cells = [json.dumps(value) for value in column]
        width = max(map(len, cells))
        if isinstance(column[0], str):
            columns.append([f"{cell},".ljust(width + 1) for cell in cells])
        else:
            columns.append([f"{cell:>{width}}," for cell in cells])
    return [f"  [{' '.join(cells).rstrip(',')}]," for cells in zip(*columns, strict=True)]
