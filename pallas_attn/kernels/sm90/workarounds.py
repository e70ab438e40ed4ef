"""Write by hand what JAX 0.11.2's Mosaic GPU does not offer on SM90.

Each entry ends with when it can go. Barrier 0 is the compiler's, 1 + w that of warpgroup w; the
next ones are free.
"""

from __future__ import annotations

import jax.experimental.mosaic.gpu.utils as mgpu_utils
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_attn.kernels.sm80.workarounds import _pointer

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


# ---- Share what another warpgroup reads. Can go when plgpu has named barriers. -------------------


def exchange_barrier(warpgroups: int) -> None:
    """Wait for the other consumer warpgroups; what they stored to shared memory is seen then."""
    text = f"bar.sync {2 * warpgroups + 2}, {128 * warpgroups};"

    @plgpu.inline_mgpu()
    def barrier(_):
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)

    barrier()


@plgpu.inline_mgpu()
def fence_async(_):
    """Make this thread's stores to shared memory visible to wgmma and TMA, after a barrier."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


# ---- Add to global memory. Can go when plgpu has atomic additions of four floats. ----------------


def add_to_sums(x, sums, batch, head, place):
    """Add a product of 64 rows to float32 sums of one head.

    The sums lie in blocks of 64 rows and 8 columns, a block in the order in which a product's
    registers hold it (warp, row, column pair, row half, column), so that a thread adds 16 bytes,
    and the lanes of a warp add to neighbours.

    Args:
        x: [64, columns] float32.
        sums: [B, H, size] in global memory.
        batch, head, place: int32 scalars; place is that of the first block.
    """
    columns = x.shape[1]
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, *[scalar] * 3))
    def add(_, sums, x, batch, head, place):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(128, i32))
        offset = arith.muli(thread, mgpu.c(4, i32))
        base = mgpu_utils.getelementptr(_pointer(sums, batch, head, place), [offset], f32)
        for i, halves in enumerate(x.registers.reshape(columns // 8, 2)):
            values = [
                llvm.extractelement(pair, mgpu.c(column, i32))
                for pair in halves
                for column in (0, 1)
            ]
            text = f"red.relaxed.gpu.global.add.v4.f32 [$0 + {2048 * i}], {{$1, $2, $3, $4}};"
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [base, *values], text, "l,f,f,f,f",
                has_side_effects=True,
            )  # fmt: skip

    add(sums, x, batch, head, place)
