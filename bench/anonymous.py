"""Remove from records what tells who made them."""

from __future__ import annotations

import getpass
import gzip
import json
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.records import Record

# Absolute paths, serial numbers and addresses, as in libraries' errors.
_PATH = re.compile(r"(?<![\w.:/])~?(?:/[^\s/:'\",;()<>]+){2,}/?|file://\S+")
_NUMBERS = re.compile(
    r"(?:GPU-|MIG-)?\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"  # UUID
    r"|\b(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]\b"  # PCI bus
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b",  # IP
    re.IGNORECASE,
)


def to_bytes(records: Iterable[Record]) -> bytes:
    """Return records as compressed lines of JSON, without names of users, hosts, files or cards."""
    names = _names()
    lines = (json.dumps(_cleaned(asdict(record), names)) + "\n" for record in records)
    return gzip.compress("".join(lines).encode(), mtime=0)


def _cleaned(fields: dict[str, Any], names: re.Pattern[str] | None) -> dict[str, Any]:
    versions = {name: clean(text, names) for name, text in fields["versions"].items()}
    changed = {"versions": versions, "commit": clean(fields["commit"], names)}
    if fields["message"] is not None:
        changed["message"] = clean(fields["message"], names)
    return fields | changed


def clean(text: str, names: re.Pattern[str] | None = None) -> str:
    """Return a text without private parts, as in the example.

    >>> clean("no /home/jo/lib/libcuda.so for GPU-01234567-89ab-cdef-0123-456789abcdef")
    'no [path] for [number]'
    """
    text = _NUMBERS.sub("[number]", _PATH.sub("[path]", text))
    return text if names is None else names.sub("[name]", text)


def _names() -> re.Pattern[str] | None:
    host = socket.gethostname()
    found = {host, host.partition(".")[0], Path.home().name}
    with suppress(KeyError, OSError):  # a user without a name
        found.add(getpass.getuser())
    words = sorted((re.escape(name) for name in found if len(name) > 1), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", re.IGNORECASE) if words else None
