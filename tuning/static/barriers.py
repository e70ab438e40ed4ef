"""Find named barriers whose register a miscompiled kernel overwrites before it is read.

A barrier may read its number from a register some cycles after issue. Until then it counts in a
scoreboard, for which the register's next write must wait. ptxas 12.8 omits that wait in some
kernels: an illegal instruction, or a hang.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tuning.static.uniform import RESULT

# An instruction and its predicate, then the upper half of its encoding.
_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([^;]*?)\s*;.*\n.*/\* 0x([0-9a-f]{16}) \*/"
)
_BARRIER = re.compile(r"BAR\.[\w.]+ R(\d+)\b")
_NO_SCOREBOARD = 7


class Instruction(NamedTuple):
    """An instruction without its predicate.

    control: from bit 0 on: 4 bits of stall, 1 of yield, 3 of the scoreboard of late results, 3 of
        that of late reads, and a bit for each scoreboard to wait for.
    """

    text: str
    has_predicate: bool
    control: int


def overwritten(sass: str) -> list[str]:
    """Return the barriers of SM90's ``cuobjdump -sass`` whose register some path overwrites too
    early.

    A load writes its result late, and may follow.
    """
    lines = _LINE.findall(sass)
    places = {int(address, 16): i for i, (address, *_) in enumerate(lines)}
    instructions = [
        Instruction(text, bool(predicate), int(upper, 16) >> 41)
        for _, predicate, text, upper in lines
    ]
    found = []
    for i, (text, _, control) in enumerate(instructions):
        barrier, scoreboard = _BARRIER.match(text), control >> 8 & 7
        if not barrier or scoreboard == _NO_SCOREBOARD:
            continue
        if _is_overwritten(instructions, places, i + 1, int(barrier[1]), scoreboard):
            found.append(text)
    return found


def _is_overwritten(
    instructions: list[Instruction],
    places: dict[int, int],
    begin: int,
    register: int,
    scoreboard: int,
) -> bool:
    """Return whether a path writes a register before it waits for a scoreboard."""
    seen, waiting = set(), [begin]
    while waiting:
        i = waiting.pop()
        while i < len(instructions) and i not in seen:
            seen.add(i)
            text, has_predicate, control = instructions[i]
            if control >> 11 + scoreboard & 1:
                break
            is_late = control >> 5 & 7 != _NO_SCOREBOARD
            if not is_late and register in _written(text):
                return True
            branch = re.match(r"BRA\b.*\b0x([0-9a-f]+)", text)
            if branch and int(branch[1], 16) in places:
                waiting.append(places[int(branch[1], 16)])
            if not has_predicate and re.match(r"BRA 0x|EXIT|BRX", text):
                break
            i += 1
    return False


def _written(text: str) -> range:
    result = RESULT.match(text)
    if not result:
        return range(0)
    first, count = int(result[2]), 2 if re.search(r"\.64|WIDE", result[1]) else 1
    return range(first, first + count)
