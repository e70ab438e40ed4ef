"""Add products of mma.sync to float32 sums in global memory."""

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import linear_index, pointer_to
from pallas_attn.kernels.explicit.registers import SCALAR, Layout, make_pair, of_registers
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils

# Two warps share rows.
PRODUCT = Layout.MMA_ACC(np.dtype("bfloat16"), m_warps=2)


def add_to_sums(x, sums, batch, head, start, first_column=0):
    """Add rows start .. of a product, two warps sharing rows, to float32 sums of one head.

    The sums [B, H, S, columns] are stored in blocks of 16 rows and 8 columns. A block has the order
    in which a product's registers hold it (row half, column parity, 8 rows, 4 column pairs), so
    that the lanes of a warp add to 32 neighbours. x begins at multiples of 16.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PRODUCT, *[SCALAR] * 3))
    def add(_, sums, x, batch, head, first):
        base, places = _places(sums, x.shape, batch, head, first, first_column)
        for place, pair in zip(places, x.registers.flat, strict=True):
            for parity in range(2):
                value = llvm.extractelement(pair, mgpu.c(parity, ir.IntegerType.get_signless(32)))
                address = f"[$0 + {4 * (place + 32 * parity)}]"
                text = f"red.relaxed.gpu.global.add.f32 {address}, $1;"
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"), [base, value], text, "l,f", has_side_effects=True
                )

    add(sums, x, batch, head, start)


def read_sums(sums, batch, head, start, shape):

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[SCALAR] * 3),
        return_type=plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), PRODUCT),
    )
    def read(_, sums, batch, head, first):
        f32 = ir.F32Type.get()
        base, places = _places(sums, shape, batch, head, first, 0)
        x = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), shape, PRODUCT.to_mgpu())

        def load(place):
            return llvm.load(f32, mgpu_utils.getelementptr(base, [place], f32))

        return of_registers(x, [make_pair(load(place), load(place + 32)) for place in places])

    return read(sums, batch, head, start)


def _places(sums, shape, batch, head, first, first_column):
    """Return where a thread's first number is, and the distances to its register pairs."""
    columns = ir.MemRefType(sums.type).shape[3]
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(128, i32))
    warp, lane = (f(thread, mgpu.c(32, i32)) for f in (arith.divui, arith.remui))
    row_warp, column_warp = (f(warp, mgpu.c(2, i32)) for f in (arith.divui, arith.remui))
    offset = arith.addi(linear_index([row_warp, column_warp], [columns * 16, 128]), lane)
    base = mgpu_utils.getelementptr(pointer_to(sums, batch, head, first), [offset], f32)
    pairs = np.ndindex(shape[0] // 32, shape[1] // 16, 2)
    first = first_column * 16
    return base, [first + i * columns * 32 + j * 256 + half * 64 for i, j, half in pairs]
