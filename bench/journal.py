"""Go on behind an implementation that ends the process, as a segmentation fault in a library does.

`supervise` runs a command in a process of its own. That one writes to a `Journal` what it has
measured, and before each step whose kernels they are. If a signal of `CRASHES` ends it, another one
takes from there what was measured, and knows what crashed. What ran when SIGTERM ended it, as
``timeout`` does, is named.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.records import Record, append, load

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
VARIABLE = "TWIN_ATTENTION_JOURNAL"  # the folder of the run's journal
STARTED = "TWIN_ATTENTION_STARTED"  # when the run began, by `time.monotonic`
_COMMAND = [sys.executable, "-m", "bench"]
_MEASURED, _RUNNING = "measured.jsonl", "running.jsonl"


class Journal:
    """Records of a run that outlive its process, in a folder; without one, none do.

    Attributes:
        folder: where they are kept, or None.
        measured: by key, what processes before this one have measured.
        crashed: of these, what ended one of them, as rows that say so.
        suspects: keys of what ran together when one ended.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        running = self._load(_RUNNING)
        message = "its process crashed"
        self.crashed = [replace(record, status="failed", message=message) for record in running]
        self.suspects: set[str] = set()
        if len({record.label for record in running}) > 1:
            self.crashed, self.suspects = [], {record.key for record in running}
        self.end(self.crashed)
        self.measured = {record.key: record for record in self._load(_MEASURED)}

    def begin(self, records: Iterable[Record]) -> None:
        """Note what runs next: if the process ends, one of them is why."""
        if self.folder is not None:
            (self.folder / _RUNNING).unlink(missing_ok=True)
            append(self.folder / _RUNNING, records)

    def end(self, records: Iterable[Record]) -> None:
        """Note what was measured; nothing runs."""
        if self.folder is not None:
            append(self.folder / _MEASURED, records)
            (self.folder / _RUNNING).unlink(missing_ok=True)

    def _load(self, name: str) -> list[Record]:
        if self.folder is None or not (self.folder / name).exists():
            return []
        return load(self.folder / name)


def start_of_run() -> float:
    """Return when the run that this process belongs to began, by `time.monotonic`."""
    return float(os.environ.get(STARTED, time.monotonic()))


def supervise(arguments: Sequence[str]) -> int:
    """Run ``python -m bench`` in a process of its own, again while it crashes at an implementation.

    Returns:
        The exit code.
    """
    started = str(time.monotonic())
    handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
    with TemporaryDirectory() as folder:
        try:
            while True:
                process = subprocess.Popen(
                    [*_COMMAND, *arguments],
                    env=os.environ | {VARIABLE: folder, STARTED: started},
                )
                # A terminal sends Ctrl-C to that process as well, which ends in its own time.
                signal.signal(signal.SIGINT, lambda *_: None)
                signal.signal(signal.SIGTERM, lambda *_, process=process: process.terminate())
                code = process.wait()
                if code == -signal.SIGTERM:
                    print(f"SIGTERM during: {_names(Path(folder, _RUNNING))}", file=sys.stderr)
                if -code not in CRASHES or not Path(folder, _RUNNING).exists():
                    return code if code >= 0 else 128 - code
                print(f"{signal.Signals(-code).name}: the run goes on behind it", file=sys.stderr)
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)


def _names(running: Path) -> str:
    """Return the case and the implementations that a journal has as running."""
    records = load(running) if running.exists() else []
    if not records:
        return "no implementation"
    labels = ", ".join(record.label for record in records)
    return f"{records[0].case['name']} {records[0].operation}, {labels}"
