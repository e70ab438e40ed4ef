"""Write by hand what JAX 0.11.2's Mosaic GPU does not offer on SM90.

Each entry ends with when it can go. Barrier 0 is the compiler's, 1 + w that of warpgroup w; the
next ones are free.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

# ---- Take turns. Can go when plgpu has named barriers. -------------------------------------------


def take_turn(warpgroup: int, warpgroups: int) -> None:
    """Wait until the warpgroup before passed the turn."""
    _named_barrier("sync", warpgroup, warpgroups)


def pass_turn(warpgroup: int, warpgroups: int) -> None:
    """Give the turn to the next warpgroup."""
    _named_barrier("arrive", (warpgroup + 1) % warpgroups, warpgroups)


def _named_barrier(operation: str, warpgroup: int, warpgroups: int) -> None:
    text = f"bar.{operation} {warpgroups + 2 + warpgroup}, 256;"

    @plgpu.inline_mgpu()
    def barrier(_):
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)

    barrier()
