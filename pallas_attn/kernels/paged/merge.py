"""Merge the results of a program's warps; `memory.py` says when this can go."""

from __future__ import annotations

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import linear_index, pointer_at
from pallas_attn.kernels.explicit.barriers import synchronize_warpgroup
from pallas_attn.kernels.explicit.registers import (
    ROWS,
    SCALAR,
    SUMS,
    THREADS,
    WARPS,
    as_register,
    column_of_thread,
    of_registers,
    place_of,
    row_number,
    scalar,
    warp_and_lane,
)
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils


def merge_rows(x, scratch, add):
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ROWS),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, ROWS),
    )
    def merge(_, scratch, x):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        warp, lane = warp_and_lane()
        row = arith.divui(lane, mgpu.c(4, i32))
        base = mgpu_utils.memref_ptr(scratch)
        rows_of_warp = x.shape[0] // WARPS
        own = linear_index([warp, row], [rows_of_warp, 1])
        flat = list(enumerate(x.registers.flat))  # 8 rows apart
        for i, register in flat:
            place = arith.addi(own, mgpu.c(8 * i, i32))
            llvm.store(scalar(register), mgpu_utils.getelementptr(base, [place], f32))
        synchronize_warpgroup()
        merged = []
        for i, register in flat:
            total = None
            for other in range(WARPS):
                place = arith.addi(row, mgpu.c(8 * i + other * rows_of_warp, i32))
                value = llvm.load(f32, mgpu_utils.getelementptr(base, [place], f32))
                if total is None:
                    total = value
                else:
                    total = (arith.addf if add else arith.maximumf)(total, value)
            merged.append(as_register(total, register))
        return of_registers(x, merged)

    return merge(scratch, x)


def share_sums(arrays, scratch):
    """Write the sums of this warp, in `SUMS`, to shared memory for `store_merged`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [SUMS] * len(arrays)))
    def share(_, scratch, arrays):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.muli(mgpu_utils.thread_idx(), mgpu.c(2, i32))
        pointer = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(scratch), [thread], f32)
        registers = [x for array in arrays for x in array.registers.flat]
        for i, register in enumerate(registers):
            llvm.store(register, mgpu_utils.getelementptr(pointer, [i * 2 * THREADS], f32))
        synchronize_warpgroup()

    share(scratch, list(arrays))


def store_merged(scratch, factor, out, index, rows, total, group_size, columns, parts):
    """Store the sum of what the warps have shared; each warp stores some of the columns.

    Args:
        factor: of each row, float32 in `ROWS`.
        out: [N, T, Hq, Dv] in global memory.
        index: (n, head): which of N, and the first query head.
        rows, total, group_size: see `load_queries`; rows from `total` on are not stored.
        columns, parts: column c of array i, of `columns` each, is column parts · c + i of out.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR, ROWS, ROWS))
    def store(_, scratch, out, batch, head, rows, factor):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        out_type = ir.MemRefType(out.type)
        size, element = out_type.shape[3], out_type.element_type
        pair = ir.VectorType.get((2,), f32)
        warp, lane = warp_and_lane()
        blocks, tiles = columns // 8, rows.registers.shape[0]
        last = size // parts // 8 - 1
        # The pair of a thread in warp w of (array, row tile, column block, row half) is at
        # ((((array · tiles + tile) · blocks + block) · 2 + half) · THREADS + 32 w + lane) · 2.
        base = mgpu_utils.memref_ptr(scratch)
        base = mgpu_utils.getelementptr(base, [arith.muli(lane, mgpu.c(2, i32))], f32)
        column = arith.muli(column_of_thread(), mgpu.c(parts, i32))
        for tile, half in np.ndindex(tiles, 2):
            exists, place = place_of(row_number(rows, tile, half), total, group_size, head)
            scale = scalar(factor.registers.reshape(tiles, 2)[tile, half])
            pointer = pointer_at(
                out, [(0, batch.registers.item()), (1, place[0]), (2, place[1]), (3, column)]
            )
            for first in range(0, last + 1, WARPS):
                block = arith.addi(warp, mgpu.c(first, i32))
                stores = exists
                if first + WARPS - 1 > last:
                    inside = arith.cmpi(arith.CmpIPredicate.sle, block, mgpu.c(last, i32))
                    stores = arith.andi(exists, inside)
                with mgpu.when(stores):
                    numbers = []
                    for part in range(parts):
                        at = (part * tiles + tile) * blocks * 2 + half
                        offset = linear_index([block, mgpu.c(at, i32)], [4 * THREADS, 2 * THREADS])
                        there = mgpu_utils.getelementptr(base, [offset], f32)
                        value = None
                        for other in range(WARPS):
                            x = llvm.load(pair, mgpu_utils.getelementptr(there, [64 * other], f32))
                            value = x if value is None else arith.addf(value, x)
                        numbers.append(
                            [
                                arith.mulf(llvm.extractelement(value, mgpu.c(i, i32)), scale)
                                for i in range(2)
                            ]
                        )
                    value = llvm.mlir_undef(ir.VectorType.get((2 * parts,), f32))
                    for i in range(2 * parts):
                        number = numbers[i % parts][i // parts]
                        value = llvm.insertelement(value, number, mgpu.c(i, i32))
                    if element != f32:
                        value = arith.truncf(ir.VectorType.get((2 * parts,), element), value)
                    offset = arith.muli(block, mgpu.c(8 * parts, i32))
                    llvm.store(value, mgpu_utils.getelementptr(pointer, [offset], element))

    store(scratch, out, *index, rows, factor)


def store_rows_of_heads(x, out, index, rows, total, group_size):
    """Store a number of each row, which all warps have, in out [N, Hq, T]; see `store_merged`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, ROWS, ROWS))
    def store(_, out, batch, head, rows, x):
        i32 = ir.IntegerType.get_signless(32)
        thread = mgpu_utils.thread_idx()
        zero, equal = mgpu.c(0, i32), arith.CmpIPredicate.eq
        # The first lane of each quad of the first warp.
        is_first = arith.cmpi(equal, arith.andi(thread, mgpu.c(0x63, i32)), zero)
        for tile, half in np.ndindex(rows.registers.shape[0], 2):
            exists, place = place_of(row_number(rows, tile, half), total, group_size, head)
            pointer = pointer_at(out, [(0, batch.registers.item()), (1, place[1]), (2, place[0])])
            value = scalar(x.registers.reshape(-1, 2)[tile, half])
            with mgpu.when(arith.andi(exists, is_first)):
                llvm.store(value, pointer)

    store(out, *index, rows, x)
