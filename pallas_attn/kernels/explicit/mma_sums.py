"""Add products of mma.sync to float32 sums in global memory."""

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import linear_index, pointer_to
from pallas_attn.kernels.explicit.registers import SCALAR, Layout
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils


def add_to_sums(x, sums, batch, head, start):
    """Add rows start .. of a product, two warps sharing rows, to float32 sums of one head.

    The sums lie in blocks of 16 rows and 8 columns, a block in the order in which a product's
    registers hold it (row half, column parity, 8 rows, 4 column pairs), so that the lanes of a warp
    add to 32 neighbours.

    Args:
        x: [rows, columns] float32.
        sums: [B, H, S, columns] in global memory.
        batch, head, start: int32 scalars; start is a multiple of 16.
    """
    rows, columns = x.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), Layout.MMA_ACC(np.dtype("bfloat16"), m_warps=2), *[SCALAR] * 3)
    )
    def add(_, sums, x, batch, head, first):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(128, i32))
        warp, lane = (f(thread, mgpu.c(32, i32)) for f in (arith.divui, arith.remui))
        row_warp, column_warp = (f(warp, mgpu.c(2, i32)) for f in (arith.divui, arith.remui))
        offset = arith.addi(linear_index([row_warp, column_warp], [columns * 16, 128]), lane)
        base = mgpu_utils.getelementptr(pointer_to(sums, batch, head, first), [offset], f32)
        registers = x.registers.reshape(rows // 32, columns // 16, 2)
        for (i, j, half), pair in np.ndenumerate(registers):
            for parity in range(2):
                place = i * columns * 32 + j * 256 + half * 64 + parity * 32
                value = llvm.extractelement(pair, mgpu.c(parity, i32))
                text = f"red.relaxed.gpu.global.add.f32 [$0 + {4 * place}], $1;"
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"), [base, value], text, "l,f", has_side_effects=True
                )

    add(sums, x, batch, head, start)
