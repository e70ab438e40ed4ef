"""A record for each implementation on each case, kept as JSON lines."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

Status = Literal[
    "planned", "ok", "failed", "absent", "out of memory", "refused by parity", "skipped"
]

# Fields of cases that earlier records lack, and their defaults.
LATER_FIELDS = {
    "sinks": False, "deterministic": False, "segments": "", "precision": "ieee", "tree": "",
    "depths": False, "cascade": False, "common_pages": 0, "relative": None,
    "terms_in_q_dtype": False, "alibi": "", "bias": None, "dropout_rate": 0.0, "row_max": False,
    "latent": False, "ranges": "",
}  # fmt: skip
# Ends of names of our forward with another softmax, in earlier records.
ABLATIONS = ("without softmax", "with barriers")
# Of packed sequences: the dense kernel on a problem of as many FLOPs (`bench.suites.packed`).
YARDSTICKS = {"torch triton": "torch triton dense", "jax triton": "jax triton dense"}
# Of patterns: flash attention of all pairs (`bench.suites.patterns`).
DENSE = ("torch dense", "jax dense")
_OUT_OF_MEMORY = re.compile("out of memory|failed to allocate", re.IGNORECASE)


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call.

    median: over the calls of a round, then over rounds.
    fastest, slowest: medians of the fastest and of the slowest round.
    p20, p80: over all calls; None if they were not kept.
    """

    median: float
    fastest: float
    slowest: float
    p20: float | None = None
    p80: float | None = None

    @property
    def spread(self) -> float:
        return (self.slowest - self.fastest) / self.median

    @property
    def range(self) -> tuple[float, float]:
        """The fastest round or the 20th percentile, and the slowest or the 80th."""
        bounds = [self.fastest, self.slowest, self.p20, self.p80]
        kept = [bound for bound in bounds if bound is not None]
        return min(kept), max(kept)


@dataclass(frozen=True)
class Record:
    """One implementation on one case; what is measured is None unless the status is "ok".

    operation: "forward", "backward", "both", "jvp", "decode" or "append"; of training also
    "optimizer" and "step" (all three), of models "generate"; "peak" is a rate of the device.
    target: None for a peer.
    status: "planned" until it is measured; "absent" if the peer does not do the case.
    message: the error behind the status.
    span, host, kernels: as in `bench.timing.Timing`.
    events: milliseconds by CUDA events, a cross-check of `span`.
    tflops: of the pairs that the mask keeps.
    bytes_per_second, reads, writes: least traffic.
    error: the worst error over its budget.
    memory: bytes that a call adds at its peak; of training, all bytes.
    held: bytes of a forward's output and saved activations.
    steps: milliseconds of each training step; the first compiles.
    timeline: bytes by category over a training step.
    """

    suite: str
    case: dict[str, Any]
    operation: str
    implementation: str
    target: str | None
    device: str
    versions: dict[str, str]
    commit: str
    date: str
    status: Status = "planned"
    message: str | None = None
    times: Times | None = None
    span: Times | None = None
    host: Times | None = None
    events: float | None = None
    kernels: tuple[str, ...] = ()
    tflops: float | None = None
    bytes_per_second: float | None = None
    reads: int | None = None
    writes: int | None = None
    error: float | None = None
    memory: int | None = None
    held: int | None = None
    judged: float | None = None
    gpu: dict[str, Any] | None = None
    steps: tuple[float, ...] = ()
    timeline: dict[str, list] | None = None
    card: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise ValueError(f"status: expected one of {get_args(Status)}, got {self.status!r}")
        if (self.times is not None) != (self.status == "ok"):
            raise ValueError(f"times: expected only with status 'ok', got {self.status!r}")

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.implementation, self.target)))

    @property
    def framework(self) -> str:
        return self.implementation.split()[0]

    @property
    def is_peer(self) -> bool:
        return self.target is None

    @property
    def is_yardstick(self) -> bool:
        """Return True if it waits or computes something else, and so compares with no peer."""
        name = self.implementation
        return name.endswith(ABLATIONS) or name in (*YARDSTICKS.values(), *DENSE)

    @property
    def run(self) -> str:
        shared = [self.device, self.card, self.versions, self.commit]
        return json.dumps(shared, sort_keys=True)

    @property
    def measurement(self) -> str:
        case = LATER_FIELDS | self.case
        measured = [self.suite, case, self.operation, self.implementation, self.target]
        return json.dumps(measured, sort_keys=True)

    @property
    def key(self) -> str:
        """A text shared by records of the same measurement in one run."""
        return json.dumps([self.measurement, self.run])


def origin(suite: str, facts: dict[str, str], card: dict[str, Any] | None = None) -> dict[str, Any]:
    apart = ("device", "commit", "date")
    versions = {name: value for name, value in facts.items() if name not in apart}
    shared = {"suite": suite, "versions": versions, "card": card}
    return shared | {name: facts[name] for name in apart}


def failed(record: Record, error: Exception) -> Record:
    message = f"{type(error).__name__}: {error}".strip()
    status = "out of memory" if _OUT_OF_MEMORY.search(message) else "failed"
    return replace(record, status=status, message=message.splitlines()[0])


def stem(path: Path) -> str:
    """Return the name of a file of records without its endings.

    >>> stem(Path("results/h100.jsonl.gz"))
    'h100'
    """
    return Path(path.name.removesuffix(".gz")).stem


def append(path: Path, records: Iterable[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(asdict(record)) + "\n")


def drop_unfinished_line(path: Path) -> bool:
    """Drop a partial last line, which a killed run may leave; return True if there was one."""
    content = path.read_bytes()
    whole, newline, last = content.rpartition(b"\n")
    if not last:
        return False
    try:
        json.loads(last)
    except ValueError:
        path.write_bytes(whole + newline)
        return True
    path.write_bytes(content + b"\n")
    return False


def load(path: Path) -> list[Record]:
    """Read what `append` wrote, perhaps compressed (".gz").

    Raises:
        ValueError: a line is no record; the message gives file and line.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected lines of JSON, got {error!r}") from error
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            fields = json.loads(line)
            for name in ("times", "span", "host"):
                fields[name] = None if fields[name] is None else Times(**fields[name])
            for name in ("kernels", "steps"):
                fields[name] = tuple(fields.get(name, ()))
            records.append(Record(**fields))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: expected a record, got {error!r}") from error
    return records
