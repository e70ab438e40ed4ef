"""Read the resources of a compiled kernel from its machine code and its PTX."""

from __future__ import annotations

import re
import subprocess
import tempfile
from bisect import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuning.static.barriers import overwritten
from tuning.static.bounds import fixed_bounds
from tuning.static.uniform import unwritten

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from tuning.static.mosaic_aot import Compiled

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
    "tma": r"\bcp\.async\.bulk\.tensor\.",
    "ldmatrix": r"\bldmatrix\.",
    "ex2": r"\bex2\.approx",
}
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel.

    Attributes:
        spill_stores, spill_loads: bytes of a thread's spill instructions, as in ``ptxas -v``.
        loop_spills: both in a step of the main loop, the largest of all warps' loops: the last
            innermost loop with tensor-core products, which has no mask. Not for portable wgmma.
        serialized: the compiler waits for each wgmma though the PTX does not (ptxas C7512).
        unwritten: reads of uniform registers that nothing wrote, with wgmma.
        overwritten: named barriers whose number is overwritten before it is read, with wgmma.
        mma, wgmma, cp_async, tma, ldmatrix, ex2: instructions in the PTX.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    loop_spills: int
    stack: int
    shared: int
    warps: int
    occupancy: int
    serialized: bool
    unwritten: int
    overwritten: int
    fixed_bounds: int
    mma: int
    wgmma: int
    cp_async: int
    tma: int
    ldmatrix: int
    ex2: int


def measure(compiled: CompiledKernel | Compiled, target: str) -> Resources:
    cubin = compiled.asm["cubin"]
    usage = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump(cubin, "-res-usage"))
    assert usage is not None
    registers, stack = map(int, usage.groups())
    ptx = compiled.asm["ptx"]
    # Slow, so skipped where it cannot matter: nothing spills without a stack, and only wgmma needs
    # uniform registers.
    sass = _cuobjdump(cubin, "-sass") if stack or "wgmma" in ptx else ""
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    return Resources(
        registers=registers,
        spill_stores=_bytes_moved("STL", sass),
        spill_loads=_bytes_moved("LDL", sass),
        loop_spills=max(map(_spills, _main_loops(sass)), default=0),
        stack=stack,
        shared=shared,
        warps=warps,
        occupancy=occupancy(target, registers, shared, warps),
        serialized=sass.count("WARPGROUP.DEPBAR") > ptx.count("wgmma.wait_group"),
        unwritten=len(unwritten(sass)) if "wgmma" in ptx else 0,
        overwritten=len(overwritten(sass)) if "wgmma" in ptx else 0,
        fixed_bounds=fixed_bounds(compiled.asm["ttir"], compiled.asm["ttgir"])
        if "ttir" in compiled.asm
        else 0,
        **{name: len(re.findall(p, ptx)) for name, p in _INSTRUCTIONS.items()},
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
    widths = (
        next((_BITS[part] for part in modifiers.split(".") if part in _BITS), 32)
        for modifiers in re.findall(rf"\b{opcode}((?:\.\w+)*) ", sass)
    )
    return sum(widths) // 8


def _spills(sass: str) -> int:
    return _bytes_moved("STL", sass) + _bytes_moved("LDL", sass)


def _main_loops(sass: str) -> list[str]:
    """Return the instructions of each consumer's last innermost loop with products.

    Warps of different work begin by setting their registers. A loop lies between a branch and its
    earlier target. Code that begins in a loop and ends behind it is none: that branch returns from
    polling a barrier.
    """
    instructions = [
        (int(address, 16), text)
        for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*;)", sass)
    ]
    loops = []
    for end, text in instructions:
        target = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if target is None or int(target[1], 16) >= end:
            continue
        begin = int(target[1], 16)
        loop = "\n".join(text for address, text in instructions if begin <= address <= end)
        if re.search("HG?MMA", loop):
            loops.append((begin, end, loop))
    starts = [address for address, text in instructions if "USETMAXREG" in text]
    main = {}
    for begin, end, loop in loops:
        if not any(
            (begin <= start and stop < end) or start < begin <= stop < end
            for start, stop, _ in loops
        ):
            main[bisect(starts, begin)] = loop
    return list(main.values())


def _cuobjdump(cubin: bytes, option: str) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
