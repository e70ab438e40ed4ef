"""Continue after an implementation crashes the process.

`supervise` runs a command in another process, which keeps a `Journal`. After a signal in `CRASHES`
a new process continues; after SIGTERM, what ran is named.
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
    """Records of a run that outlive its process, if there is a folder.

    suspects: keys of what ran together when a process ended.
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
        if self.folder is not None:
            (self.folder / _RUNNING).unlink(missing_ok=True)
            append(self.folder / _RUNNING, records)

    def end(self, records: Iterable[Record]) -> None:
        if self.folder is not None:
            append(self.folder / _MEASURED, records)
            (self.folder / _RUNNING).unlink(missing_ok=True)

    def _load(self, name: str) -> list[Record]:
        if self.folder is None or not (self.folder / name).exists():
            return []
        return load(self.folder / name)


def start_of_run() -> float:
    return float(os.environ.get(STARTED, time.monotonic()))


def supervise(arguments: Sequence[str]) -> int:
    """Run ``python -m bench`` in another process, again after each crash; return the exit code."""
    started = str(time.monotonic())
    handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
    with TemporaryDirectory() as folder:
        try:
            while True:
                process = subprocess.Popen(
                    [*_COMMAND, *arguments], env=os.environ | {VARIABLE: folder, STARTED: started}
                )
                # A terminal sends Ctrl-C to that process as well.
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
    records = load(running) if running.exists() else []
    if not records:
        return "no implementation"
    labels = ", ".join(record.label for record in records)
    return f"{records[0].case['name']} {records[0].operation}, {labels}"
