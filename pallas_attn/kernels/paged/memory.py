"""Load, copy and store the data of paged attention.

Each warp has its own keys, and all warps have the same query rows. An array of the kernel has 16
rows a warp, as in a product of four warps: it holds what the four warps know of the same rows. It
can go when cp.async takes indices and a size to fetch to L2, and a kernel can be written for a
warp.
"""

from __future__ import annotations

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import linear_index, pointer_at, pointer_to
from pallas_attn.kernels.explicit.registers import (
    ROWS,
    SCALAR,
    Layout,
    as_register,
    column_of_thread,
    make_pair,
    of_registers,
    place_of,
    row_number,
    scalar,
)
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils, nvvm

UNIT = 8  # numbers that a thread loads or stores at a time
# L2 fetches 128 bytes. If rows have 64, half of these are for another program, or the next key.
# NVVM lacks the option.
_COPY = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"


def store_number(x, array, *index):
    """Store a number of each thread at ``array[*index]``, in global or in shared memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, *[SCALAR] * len(index)))
    def store(_, array, x, *index):
        i64 = ir.IntegerType.get_signless(64)
        strides, _ = ir.MemRefType(array.type).get_strides_and_offset()
        offset = linear_index([arith.extsi(i64, i.registers.item()) for i in index], strides)
        value = x.registers.item()
        pointer = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(array), [offset], value.type)
        llvm.store(value, pointer)

    store(array, x, *index)


def load_unit(array, index):

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), (SCALAR,) * len(index)),
        return_type=[plgpu.ShapeDtypeStruct((), array.dtype, SCALAR)] * UNIT,
    )
    def load(_, array, index):
        unit = ir.VectorType.get((UNIT,), ir.MemRefType(array.type).element_type)
        value = llvm.load(unit, pointer_to(array, *index))
        places = [mgpu.c(i, ir.IntegerType.get_signless(32)) for i in range(UNIT)]
        return [mgpu.FragmentedArray.splat(llvm.extractelement(value, i), ()) for i in places]

    return load(array, tuple(index))


def store_unit(numbers, array, index):
    """Store `UNIT` numbers at once: ptxas 13 stores a single byte of `round_to` wrongly."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [SCALAR] * UNIT, (SCALAR,) * len(index)))
    def store(_, array, numbers, index):
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        numbers = [x.registers.item() for x in numbers]
        if mgpu.bitwidth(numbers[0].type) == 8:  # LLVM has no such floats
            numbers = [mgpu_utils.bitcast(x, i8) for x in numbers]
        unit = llvm.mlir_undef(ir.VectorType.get((UNIT,), numbers[0].type))
        for i, x in enumerate(numbers):
            unit = llvm.insertelement(unit, x, mgpu.c(i, i32))
        llvm.store(unit, pointer_to(array, *index))

    store(array, list(numbers), tuple(index))


def copy_keys(pool, tile, transforms, head, places):
    """Start to copy keys, or values, of one head to a warp's tile by cp.async, without a commit.

    Args:
        tile: [keys, width] in shared memory, at least as wide as a key; its other columns become 0.
        places: int32; lane i holds the place of key i in the pool, below 0 for a key that does not
            exist, whose row becomes 0.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), SCALAR, SCALAR))
    def copy(_, pool, tile, head, places):
        i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))
        places = places.registers.item()
        tile_type = ir.MemRefType(tile.type)
        row_blocks, column_blocks, block_rows, block_columns = tile_type.shape
        bits = mgpu.bitwidth(tile_type.element_type)
        strides, _ = tile_type.get_strides_and_offset()
        row_stride, column_stride = (stride * bits // 8 for stride in strides[:2])
        *_, size = ir.MemRefType(pool.type).shape
        pool_strides, _ = ir.MemRefType(pool.type).get_strides_and_offset()
        unit_elements = 128 // bits
        block_bytes = block_columns * bits // 8
        units = block_bytes // 16
        lane = arith.remui(mgpu_utils.thread_idx(), mgpu.c(32, i32))
        first, unit = (f(lane, mgpu.c(units, i32)) for f in (arith.divui, arith.remui))
        column = arith.muli(unit, mgpu.c(unit_elements, i32))
        source = pointer_at(pool, [(2, head.registers.item()), (3, column)])
        target = mgpu_utils.memref_ptr(tile)
        zero = mgpu.c(0, i32)
        for start in range(0, row_blocks * block_rows, 32 // units):
            row = arith.addi(first, mgpu.c(start, i32))
            place = nvvm.shfl_sync(
                mgpu.c(0xFFFFFFFF, i32), places, row, mgpu.c(0x1F, i32), nvvm.ShflKind.idx
            )
            exists = arith.cmpi(arith.CmpIPredicate.sge, place, zero)
            place = arith.extui(i64, arith.maxsi(place, zero))
            offset = arith.muli(place, mgpu.c(pool_strides[1], i64))
            there = mgpu_utils.getelementptr(
                source, [offset], ir.MemRefType(pool.type).element_type
            )
            # Units of 16 bytes are permuted with the row.
            block, row = (f(row, mgpu.c(8, i32)) for f in (arith.divui, arith.remui))
            byte = linear_index([row, unit], [block_bytes, 16])
            swizzle = arith.andi(arith.shrui(byte, mgpu.c(3, i32)), mgpu.c(block_bytes - 16, i32))
            byte = arith.addi(arith.xori(byte, swizzle), arith.muli(block, mgpu.c(row_stride, i32)))
            here = mgpu_utils.getelementptr(target, [byte], i8)
            for block in range(column_blocks):
                reads = exists
                if (block + 1) * block_columns > size:
                    left = mgpu.c(size - block * block_columns, i32)
                    inside = arith.cmpi(arith.CmpIPredicate.slt, column, left)
                    reads = arith.andi(exists, inside)
                _copy_16_bytes(
                    mgpu_utils.getelementptr(here, [block * column_stride], i8),
                    mgpu_utils.getelementptr(
                        there, [block * block_columns], ir.MemRefType(pool.type).element_type
                    ),
                    arith.select(reads, mgpu.c(16, i32), zero),
                )

    copy(pool, tile, head, places)


def _copy_16_bytes(target, source, size):
    target = llvm.ptrtoint(ir.IntegerType.get_signless(32), target)
    void, constraints = ir.Type.parse("!llvm.void"), "r,l,r,~{memory}"
    llvm.inline_asm(void, [target, source, size], _COPY, constraints, has_side_effects=True)


def wait_of_warp(pending):
    """Wait for all but the last `pending` groups of this warp's copies."""

    @plgpu.inline_mgpu()
    def wait(_):
        nvvm.cp_async_wait_group(pending)
        mgpu_utils.warp_barrier()

    wait()


def load_queries(q, batch, head, rows, total, group_size, width):
    """Load rows of the query heads of a GQA group as a left operand.

    Args:
        head: the first query head.
        rows: [16 · WARPS · n] int32, in `ROWS`: row r is token r // group_size of head
            head + r % group_size.
        total: rows from this one on become 0.
        width: columns of the operand; those past q's are 0.
    """
    shape = (*rows.shape, width)
    layout = Layout.MMA_LHS(q.dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR, ROWS),
        return_type=plgpu.ShapeDtypeStruct(shape, q.dtype, layout),
    )
    def load(_, q, batch, head, rows):
        registers = np.empty(layout.to_mgpu().registers_shape(shape), object)
        for index, x in _query_registers(q, batch, head, rows, total, group_size, registers, 1):
            registers[index] = x
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return load(q, batch, head, rows)


def load_split_queries(q, batch, head, rows, total, group_size, width):
    """Load rows in float16: (even columns, odd columns, the power of two that divided them)."""
    shape = (*rows.shape, width)
    layout = Layout.MMA_LHS(np.dtype("float16"))
    operand = plgpu.ShapeDtypeStruct(shape, np.dtype("float16"), layout)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR, ROWS),
        return_type=(
            operand,
            operand,
            plgpu.ShapeDtypeStruct(rows.shape, np.dtype("float32"), ROWS),
        ),
    )
    def load(_, q, batch, head, rows):
        i32, f32, f16 = ir.IntegerType.get_signless(32), ir.F32Type.get(), ir.F16Type.get()
        even = np.empty(layout.to_mgpu().registers_shape(shape), object)
        odd = np.empty_like(even)
        four = ir.VectorType.get((4,), f32)
        loaded, largest = {}, {}
        for index, x in _query_registers(q, batch, head, rows, total, group_size, even, 2):
            loaded[index] = x = arith.extf(four, x)
            place = index[0], index[4]
            for i in range(4):
                bits = mgpu_utils.bitcast(llvm.extractelement(x, mgpu.c(i, i32)), i32)
                size = arith.andi(bits, mgpu.c(0x7FFFFFFF, i32))  # of |x|, in the same order
                others = largest.get(place)
                largest[place] = size if others is None else arith.maxsi(others, size)
        factors, inverses = {}, {}
        for place, size in largest.items():
            if ir.MemRefType(q.type).element_type == f16:
                factors[place] = inverses[place] = mgpu.c(1.0, f32)
                continue
            for distance in (1, 2):  # the lanes of a quad
                size = arith.maxsi(size, mgpu_utils.shfl_bfly(size, distance))
            exponent = arith.shrui(size, mgpu.c(23, i32))
            exponent = arith.minsi(arith.maxsi(exponent, mgpu.c(14, i32)), mgpu.c(253, i32))
            for found, power in (
                (factors, arith.subi(exponent, mgpu.c(13, i32))),
                (inverses, arith.subi(mgpu.c(267, i32), exponent)),
            ):
                found[place] = mgpu_utils.bitcast(arith.shli(power, mgpu.c(23, i32)), f32)
        for index, x in loaded.items():
            inverse = inverses[index[0], index[4]]
            numbers = [
                arith.truncf(f16, arith.mulf(llvm.extractelement(x, mgpu.c(i, i32)), inverse))
                for i in range(4)
            ]
            even[index], odd[index] = make_pair(*numbers[::2]), make_pair(*numbers[1::2])
        factor = [
            as_register(factors[i // 2, i % 2], register)
            for i, register in enumerate(rows.registers.flat)
        ]
        operands = [
            mgpu.FragmentedArray(_registers=x, _layout=layout.to_mgpu(), _is_signed=None)
            for x in (even, odd)
        ]
        return *operands, of_registers(rows, factor)

    return load(q, batch, head, rows)


def _query_registers(q, batch, head, rows, total, group_size, registers, step):
    """Yield each register of a left operand: its index, and 2 · step columns of a row of q."""
    q_type = ir.MemRefType(q.type)
    size, element = q_type.shape[3], q_type.element_type
    bits = ir.IntegerType.get_signless(32 * step)
    columns = ir.VectorType.get((2 * step,), element)
    zero = mgpu.c(0, bits)
    column = arith.muli(column_of_thread(), mgpu.c(step, ir.IntegerType.get_signless(32)))
    pointers = {}
    for tile, half in np.ndindex(rows.registers.shape[0], 2):
        exists, place = place_of(row_number(rows, tile, half), total, group_size, head)
        index = [(0, batch.registers.item()), (1, place[0]), (2, place[1]), (3, column)]
        pointers[tile, half] = exists, pointer_at(q, index)
    for index in np.ndindex(registers.shape):
        tile, k_step, column_half, half = index[0], index[1], index[3], index[4]
        start = (16 * k_step + 8 * column_half) * step
        exists, pointer = pointers[tile, half]
        x = zero
        if start < size:
            x = llvm.load(bits, mgpu_utils.getelementptr(pointer, [start], element))
            x = arith.select(exists, x, zero)
        yield index, mgpu_utils.bitcast(x, columns)


def gather(vector, index):
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ROWS),
        return_type=plgpu.ShapeDtypeStruct(index.shape, np.dtype("float32"), ROWS),
    )
    def load(_, vector, index):
        f32 = ir.F32Type.get()
        registers = [
            as_register(llvm.load(f32, pointer_at(vector, [(0, scalar(x))])), x)
            for x in index.registers.flat
        ]
        return of_registers(index, registers)

    return load(vector, index)
