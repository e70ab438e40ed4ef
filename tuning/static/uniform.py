"""Find uniform registers that a miscompiled kernel reads before it writes them.

Uniform registers hold the addresses that wgmma and TMA take. A wrong one is an illegal access, or
wrong numbers without one, and only for the problems that reach it.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([^;]*?)\s*;")
_WRITES = re.compile("U(?!I?SETP|PLOP)|R2UR|C?S2UR|REDUX|VOTEU")
_REGISTER = re.compile(r"(g?desc)?\[?\bUR(\d+)")


def unwritten(sass: str) -> list[str]:
    """Return the instructions of a kernel that read a register which some path left unwritten.

    Args:
        sass: as ``cuobjdump -sass`` prints it.
    """
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+[^;]*;", sass)
    instructions = [_INSTRUCTION.match(line) for line in lines]
    places = {int(x[1], 16): i for i, x in enumerate(instructions) if x}
    reads, writes = zip(*(_registers(x[2]) for x in instructions if x), strict=True)
    known: dict[int, int] = {}  # registers that every path to an instruction writes, as bits
    waiting = [(0, 0)]
    while waiting:
        i, written = waiting.pop()
        while i < len(lines) and known.get(i, -1) & written != known.get(i):
            known[i] = written = known.get(i, -1) & written
            written |= writes[i]
            branch = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", lines[i])
            if branch and int(branch[1], 16) in places:
                waiting.append((places[int(branch[1], 16)], written))
            if re.search(r"\*/\s+(?:BRA 0x|EXIT)", lines[i]):
                break
            i += 1
    return [lines[i] for i in sorted(known) if reads[i] & ~known[i]]


def _registers(instruction: str) -> tuple[int, int]:
    """Return the uniform registers that an instruction reads and writes, as bits."""
    name, _, rest = instruction.partition(" ")
    operands = rest.split(", ")
    reads = writes = 0
    result = 1 if re.match("U?P", operands[0]) else 0  # a predicate may come first
    for index, operand in enumerate(operands):
        for kind, number in _REGISTER.findall(operand):
            register = int(number)
            if index == result and not kind and _WRITES.match(name):
                writes |= (3 if re.search(r"\.64|\.WIDE", name) else 1) << register
            elif kind == "gdesc":  # two matrices, the first in registers or in shared memory
                in_registers = re.match(r"R\d", operands[1])
                reads |= (0b1100 if in_registers else 0b1111) << register
            else:
                is_pair = kind or (name.endswith(".64") and "[" not in operand)
                reads |= (0b11 if is_pair else 1) << register
    return reads, writes
