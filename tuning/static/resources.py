"""Read the resources of a compiled kernel from its machine code and its PTX."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

# Of one SM: compute capability 8.0 and 9.0, CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability".
SHARED_MEMORY = {"sm80": 164 * 1024, "sm90": 228 * 1024}
RESERVED_SHARED_MEMORY = 1024  # of each block
REGISTERS, WARPS, BLOCKS = 64 * 1024, 64, 32
REGISTER_UNIT = 256  # registers are allocated to a warp in multiples of this

_INSTRUCTIONS = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "cp_async": r"\bcp\.async\.c[ag]\.",
    "ldmatrix": r"\bldmatrix\.",
    "ex2": r"\bex2\.approx",
}
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel.

    Attributes:
        registers: 32-bit registers per thread.
        spill_stores, spill_loads: bytes that a thread's spill instructions move, each counted once
            (as ``ptxas -v`` counts them).
        loop_spills: the same, stores and loads together, of one step of the main loop: the last
            one that multiplies on tensor cores with mma.sync, which is the one without a mask.
        stack: bytes of a thread's stack frame.
        shared: bytes of shared memory per block.
        warps: warps per block.
        occupancy: blocks resident on an SM.
        mma, wgmma, cp_async, ldmatrix, ex2: instructions in the PTX.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    loop_spills: int
    stack: int
    shared: int
    warps: int
    occupancy: int
    mma: int
    wgmma: int
    cp_async: int
    ldmatrix: int
    ex2: int


def measure(compiled: CompiledKernel, target: str) -> Resources:
    """Read a kernel that Triton compiled for `target`."""
    cubin = compiled.asm["cubin"]
    usage = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump(cubin, "-res-usage"))
    assert usage is not None
    registers, stack = map(int, usage.groups())
    sass = _cuobjdump(cubin, "-sass") if stack else ""  # takes seconds; no stack means no spills
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    return Resources(
        registers=registers,
        spill_stores=_bytes_moved("STL", sass),
        spill_loads=_bytes_moved("LDL", sass),
        loop_spills=sum(_bytes_moved(opcode, _main_loop(sass)) for opcode in ("STL", "LDL")),
        stack=stack,
        shared=shared,
        warps=warps,
        occupancy=occupancy(target, registers, shared, warps),
        **{name: len(re.findall(p, compiled.asm["ptx"])) for name, p in _INSTRUCTIONS.items()},
    )


def occupancy(target: str, registers: int, shared: int, warps: int) -> int:
    """Return the blocks of `warps` warps resident on an SM; 0 if not even one fits."""
    warp_registers = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        BLOCKS,
        WARPS // warps,
        REGISTERS // warp_registers // warps,
        SHARED_MEMORY[target] // (shared + RESERVED_SHARED_MEMORY),
    )


def _bytes_moved(opcode: str, sass: str) -> int:
    """Return the bytes of all instructions with an opcode; ".64" and the like give widths."""
    widths = (
        next((_BITS[part] for part in modifiers.split(".") if part in _BITS), 32)
        for modifiers in re.findall(rf"\b{opcode}((?:\.\w+)*) ", sass)
    )
    return sum(widths) // 8


def _main_loop(sass: str) -> str:
    """Return the instructions of the last loop with products; none if there is no such loop.

    A loop is what lies between a branch and the place before it where the branch leads.
    """
    instructions = [
        (int(address, 16), text)
        for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*;)", sass)
    ]
    main = ""
    for end, text in instructions:
        target = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if target is None or int(target[1], 16) >= end:
            continue
        begin = int(target[1], 16)
        loop = "\n".join(text for address, text in instructions if begin <= address <= end)
        main = loop if "HMMA" in loop else main
    return main


def _cuobjdump(cubin: bytes, option: str) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
