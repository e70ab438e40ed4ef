"""Find uniform registers that a miscompiled kernel reads before it writes them.

They hold the addresses of wgmma and TMA. A wrong one is an illegal access, or silently wrong
numbers.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([^;]*?)\s*;")
_WRITES = re.compile("U(?!I?SETP|PLOP)|R2UR|C?S2UR|REDUX|VOTEU")
_REGISTER = re.compile(r"(g?desc)?\[?\bUR(\d+)")
# ptxas may keep a uniform register in a general one, written or not.
_COPY = re.compile(r"(?:MOV|R2UR) (U?)R(\d+), (U?)R(\d+)")
# An instruction, perhaps after a predicate, that names its first result in a general register.
RESULT = re.compile(r"(?!BAR|BRX|R2P)(\S+) (?:U?P\w+, )?R(\d+)\b")
_GENERAL = 64  # the bit of the first general register, behind those of uniform registers


def unwritten(sass: str) -> list[str]:
    """Return the instructions that read a register some path left unwritten; by cuobjdump."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+[^;]*;", sass)
    instructions = [_INSTRUCTION.match(line) for line in lines]
    places = {int(x[1], 16): i for i, x in enumerate(instructions) if x}
    reads, writes = zip(*(_registers(x[2]) for x in instructions if x), strict=True)
    copies = [_copy(x[2]) for x in instructions if x]
    known: dict[int, int] = {}  # registers that every path to an instruction writes, as bits
    waiting = [(0, (1 << 256) - 1 << _GENERAL)]
    while waiting:
        i, written = waiting.pop()
        while i < len(lines) and known.get(i, -1) & written != known.get(i):
            known[i] = written = known.get(i, -1) & written
            written |= writes[i]
            if copy := copies[i]:
                result, source = copy
                written = written | result if written & source else written & ~result
            branch = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", lines[i])
            if branch and int(branch[1], 16) in places:
                waiting.append((places[int(branch[1], 16)], written))
            if re.search(r"\*/\s+(?:BRA 0x|EXIT)", lines[i]):
                break
            i += 1
    return [lines[i] for i in sorted(known) if reads[i] & ~known[i]]


def _copy(instruction: str) -> tuple[int, int] | None:
    """Return the bits of the registers between which an instruction copies, if it does."""
    found = _COPY.fullmatch(instruction)
    if not found or found[1] == found[3]:
        return None
    result, source = (
        1 << int(number) + (0 if is_uniform else _GENERAL)
        for is_uniform, number in ((found[1], found[2]), (found[3], found[4]))
    )
    return result, source


def _registers(instruction: str) -> tuple[int, int]:
    """Return the registers that an instruction reads and writes, as bits.

    Reads are of uniform registers, writes also of general ones. A copy has neither.
    """
    if _copy(instruction):
        return 0, 0
    name, _, rest = instruction.partition(" ")
    operands = rest.split(", ")
    reads = writes = 0
    if general := RESULT.match(instruction):
        writes |= (1 << _count_results(name)) - 1 << _GENERAL + int(general[2])
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


def _count_results(name: str) -> int:
    if "MMA" in name:
        return 128
    if re.search(r"\.128|LDSM", name):
        return 4
    return 2 if re.search(r"\.64|WIDE", name) else 1
