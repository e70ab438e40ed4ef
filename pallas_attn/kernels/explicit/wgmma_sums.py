"""Add products of wgmma to float32 sums in global memory.

It can go when plgpu adds four floats at once, and by bulk copies.
"""

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import pointer_to
from pallas_attn.kernels.explicit.registers import make_pair, of_registers
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils


def add_to_sums(x, sums, batch, head, start):
    """Add a product of 64 rows to float32 sums of one head.

    The sums [B, H, S, columns] are stored in blocks of 64 rows and 8 columns. A block has the order
    in which a product's registers hold it (warp, row, column pair, row half, column), so that a
    thread adds 16 bytes, and the lanes of a warp add to neighbours. start: a multiple of 64.
    """
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, *[scalar] * 3))
    def add(_, sums, x, batch, head, start):
        pointer = pointer_to(sums, batch, head, start)
        _for_each_block(x, pointer, "red.relaxed.gpu.global.add.v4.f32")

    add(sums, x, batch, head, start)


def read_sums(sums, batch, head, start, shape):
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3),
        return_type=plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), layout),
    )
    def read(_, sums, batch, head, start):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(128, i32))
        base = pointer_to(sums, batch, head, start)
        base = mgpu_utils.getelementptr(base, [arith.muli(thread, mgpu.c(4, i32))], f32)
        x = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), shape, layout.to_mgpu())
        pairs, unit = x.registers.reshape(-1, 2), ir.VectorType.get((4,), f32)
        for i in range(len(pairs)):
            values = llvm.load(unit, mgpu_utils.getelementptr(base, [512 * i], f32))
            a, b, c, d = (llvm.extractelement(values, mgpu.c(j, i32)) for j in range(4))
            pairs[i] = make_pair(a, b), make_pair(c, d)
        return of_registers(x, pairs.flat)

    return read(sums, batch, head, start)


def write_dq(dq, buffer):
    """Write a product of 64 rows to shared memory, in the order of `add_to_sums`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def write(_, buffer, dq):
        _for_each_block(dq, mgpu_utils.memref_ptr(buffer), "st.shared.v4.f32")

    write(buffer, dq)


def _for_each_block(x, pointer, instruction):
    """Move x to memory in blocks of 64 rows and 8 columns, four floats a thread."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(128, i32))
    offset = arith.muli(thread, mgpu.c(4, i32))
    base = mgpu_utils.getelementptr(pointer, [offset], f32)
    kind = "l"
    if "shared" in instruction:
        kind, base = "r", llvm.ptrtoint(i32, base)  # a 32-bit address
    for i, halves in enumerate(x.registers.reshape(-1, 2)):
        values = [
            llvm.extractelement(pair, mgpu.c(column, i32)) for pair in halves for column in (0, 1)
        ]
        text = f"{instruction} [$0 + {2048 * i}], {{$1, $2, $3, $4}};"
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [base, *values], text, kind + ",f,f,f,f",
            has_side_effects=True,
        )  # fmt: skip


def add_dq(buffer, columns, sums, batch, head, start):
    """Start to add columns of `write_dq` by one copy, in one warp behind a barrier.

    The copying thread makes all threads' stores visible to the copy, so the others need not wait.
    """
    first, size = 64 * columns.start, 64 * (columns.stop - columns.start)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3))
    def add(_, buffer, sums, batch, head, start):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(32, i32))
        text = (
            "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p fence.proxy.async.shared::cta; "
            "@p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
            f"[$0], [$1], {4 * size}; @p cp.async.bulk.commit_group; }}"
        )
        places = (
            mgpu_utils.getelementptr(pointer_to(sums, batch, head, start), [first], f32),
            llvm.ptrtoint(i32, mgpu_utils.memref_ptr(buffer)),
        )
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [*places, thread], text, "l,r,r", has_side_effects=True
        )

    add(buffer, sums, batch, head, start)
