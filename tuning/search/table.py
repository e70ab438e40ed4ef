"""A table of configurations that can be edited: comments and order stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomlkit
from tomlkit.items import AoT, Comment, Table, Whitespace

from twin_attention.targets.config import KernelConfig, Spec, find_configs

CONFIG_FIELDS = tuple(field.name for field in fields(KernelConfig))
_NOTE = "Tuned "  # begins the comment that an edit writes, and the next edit replaces


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        kernel: whose it is.
        index: its place among the kernel's rows.
        key: the fields that say which problems it is for.
        config: the rest.
    """

    kernel: str
    index: int
    key: tuple[tuple[str, Any], ...]
    config: KernelConfig

    def __str__(self) -> str:
        return " ".join((self.kernel, *(f"{name}={value}" for name, value in self.key)))


class ConfigTable:
    """The text of one table."""

    def __init__(self, text: str) -> None:
        self._document = tomlkit.parse(text)
        self._folder = TemporaryDirectory()

    @property
    def text(self) -> str:
        return tomlkit.dumps(self._document)

    def rows(self, kernel: str) -> Iterator[Row]:
        """A kernel's rows, in order."""
        for index, row in enumerate(self._rows(kernel).unwrap()):
            config = KernelConfig(**{name: row.pop(name) for name in CONFIG_FIELDS})
            yield Row(kernel, index, tuple(row.items()), config)

    def index_of(self, kernel: str, spec: Spec) -> int | None:
        """Which row of a kernel a problem reads; None if there is none for it.

        `find_configs` is asked, so that the rule of the look-up is in one place.
        """
        try:
            return find_configs(self._numbered(kernel), spec)[kernel].block_q
        except KeyError:
            return None

    def write(self, row: Row, config: KernelConfig, note: str) -> None:
        """Give a row another configuration, and a comment in place of its last note.

        Args:
            note: when, where and how it was found; one line.
        """
        rows = self._rows(row.kernel)
        old: Table = rows[row.index]
        old.update(asdict(config))
        new = tomlkit.table()
        new.add(tomlkit.comment(_NOTE + note))
        for key, item in old.value.body:
            if key is not None:
                new.add(key, item)
            elif isinstance(item, Comment | Whitespace) and not _is_note(item):
                new.add(item)
        rows[row.index] = new

    def _rows(self, kernel: str) -> AoT:
        rows = self._document.get(kernel)
        return rows if isinstance(rows, AoT) else tomlkit.aot()

    def _numbered(self, kernel: str) -> Path:
        """A table of the kernel's rows, with their numbers for a configuration."""
        path = Path(self._folder.name) / f"{kernel}.toml"
        if not path.exists():
            rows = [
                dict(row.key) | dict.fromkeys(CONFIG_FIELDS, row.index) for row in self.rows(kernel)
            ]
            path.write_text(tomlkit.dumps({kernel: rows}))
        return path


def _is_note(item: Comment | Whitespace) -> bool:
    return item.as_string().startswith(f"# {_NOTE}")
