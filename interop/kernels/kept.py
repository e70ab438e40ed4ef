"""Answers kept on disk for later processes, in a folder of Triton's cache.

An answer's file is named by a hash of its question and of all that answers depend on besides: the
sources of the kernels and of what prepares them, the versions of PyTorch and Triton, and Triton's
environment variables.
"""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

# Where Triton's files are, which changes no answer.
_PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR")


def load(question: Any) -> Any:
    """Return the answer to a question, which its `repr` identifies; None if none is kept."""
    with suppress(Exception):  # a file that another version wrote, or that is cut off
        return pickle.loads(_file_of(question).read_bytes())
    return None


def save(question: Any, answer: Any) -> None:
    """Keep an answer, if the folder can be written."""
    file = _file_of(question)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, delete=False) as written:
            written.write(pickle.dumps(answer))
        os.replace(written.name, file)


def _file_of(question: Any) -> Path:
    home = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home) / "twin-attention"
    return folder / sha256(f"{question!r} {_state()}".encode()).hexdigest()


@cache
def _state() -> str:
    found = sha256()
    for x in ("torch", "triton"):
        found.update(version(x).encode())
    for name, value in sorted(os.environ.items()):
        if name.startswith("TRITON_") and name not in _PLACES:
            found.update(f"{name}={value}".encode())
    packages = "torch_attn", "twin_attention.contract", "twin_attention.targets", __package__
    for name in packages:
        (folder,) = find_spec(name).submodule_search_locations  # type: ignore[union-attr]
        for file in sorted(Path(folder).rglob("*")):
            if file.suffix != ".pyc" and file.is_file():
                found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()
