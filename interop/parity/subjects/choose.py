"""Choose subjects by name."""

from __future__ import annotations

from collections.abc import Sequence

from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.parity.subjects.libraries import LIBRARIES
from twin_attention.interop.parity.subjects.library import Library
from twin_attention.interop.parity.subjects.subject import Subject


def choose_subjects(
    names: Sequence[str], ours: Sequence[Sequence[Subject]], device: str
) -> list[list[Subject]]:
    """Return a group for each name; "all" stands for the libraries that run on the device.

    Raises:
        ValueError: a name that is none, or of a library that does not run.
    """
    own = {subject.label: subject for group in ours for subject in group}
    chosen: list[list[Subject]] = []
    for name in dict.fromkeys(names):
        if name == "all":
            chosen += [[x] for x in available(device) if x.label not in names]
        elif name in own:
            chosen.append([own[name]])
        elif name in LIBRARIES:
            try:
                chosen.append([LIBRARIES[name].on(device)])
            except Absent as reason:
                raise ValueError(f"--subject {name!r}: {reason}") from None
        else:
            known = ", ".join([*own, *LIBRARIES])
            raise ValueError(f"--subject: expected all or some of {known}, got {name!r}")
    return chosen


def available(device: str) -> list[Subject]:
    return [x for x in _on(device).values() if not isinstance(x, str)]


def list_subjects(device: str) -> None:
    for name, found in _on(device).items():
        text = found if isinstance(found, str) else f"{found.package} {found.version}"
        print(f"{name:22} {text}")


def _on(device: str) -> dict[str, Library | str]:
    found: dict[str, Library | str] = {}
    for name, library in LIBRARIES.items():
        try:
            found[name] = library.on(device)
        except Absent as reason:
            found[name] = str(reason)
    return found
