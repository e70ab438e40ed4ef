"""Write by hand what JAX 0.11.2's Mosaic GPU does not offer on SM90.

Each entry ends with when it can go. Barrier 0 is the compiler's, 1 + w that of warpgroup w; the
next ones are free.
"""

from __future__ import annotations

import functools

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import (
    as_scalar,
    if_traced,
    linear_index,
    pointer_at,
    pointer_to,
)
from pallas_attn.kernels.explicit.registers import NUMBER, scalar
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils, vector
from twin_attention.targets import ptx

# ---- Mask. Can go when LLVM no longer packs the predicates of a select into words. ---------------


def hide(s, upper, lower):
    """Set numbers to -inf: those of columns above `upper` or below `lower`.

    Args:
        s: [64, columns] float32.
        upper, lower: [64, 8] int32, or None for no bound: of each row, minus a column's place among
            eight, so that a thread compares them with the same constants in each tile.
    """
    bounds = [x for x in (upper, lower) if x is not None]
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout,) * (1 + len(bounds)),
        return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, layout),
    )
    def select(_, s, *bounds):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        comparisons = [c for c, x in (("ge", upper), ("le", lower)) if x is not None]
        registers = np.empty_like(s.registers)
        for index, pair in np.ndenumerate(s.registers):
            # A register's row tile, column tile and row half are its indices 0, 1 and 4.
            of_rows = (index[0], 0, *index[2:])
            for parity in (0, 1):
                place = mgpu.c(parity, i32)
                x = llvm.extractelement(pair, place)
                for comparison, bound in zip(comparisons, bounds, strict=True):
                    limit = llvm.extractelement(bound.registers[of_rows], place)
                    text = (
                        f"{{ .reg .pred seen; setp.{comparison}.s32 seen, $1, {8 * index[1]}; "
                        "selp.f32 $0, $2, 0fFF800000, seen; }"
                    )
                    x = llvm.inline_asm(f32, [limit, x], text, "=f,r,f")
                pair = llvm.insertelement(pair, x, place)
            registers[index] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)

    return select(s, *bounds)


# ---- Cap scores. Can go when a kernel can branch where all lanes of a warp agree. ----------------


def cap(s, a, b, *, exact, exponential):
    """Return ``b * tanh(a * s)``, or 2 to the power of it: `twin_attention.targets.ptx.cap_scores`.

    Args:
        s: [64, columns] float32.
        a, b, exact, exponential: as there; a and b are numbers.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, layout)
    )
    def replace(_, s):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        places = [mgpu.c(i, i32) for i in (0, 1)]
        numbers = [llvm.extractelement(pair, i) for pair in s.registers.flat for i in places]
        count = len(numbers)
        text = ptx.cap_scores(count, exact=exact, exponential=exponential)
        operands = [*numbers, *[mgpu.c(a, f32)] * count, *[mgpu.c(b, f32)] * count]
        struct = llvm.StructType.get_literal([f32] * count)
        capped = llvm.inline_asm(struct, operands, text, ptx.cap_constraints(count))
        results = iter([llvm.extractvalue(f32, capped, [i]) for i in range(count)])
        registers = np.empty_like(s.registers)
        for index, pair in np.ndenumerate(s.registers):
            for place in places:
                pair = llvm.insertelement(pair, next(results), place)
            registers[index] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)

    return replace(s)


@plgpu.inline_mgpu()
def await_copies(_):
    """Wait until this thread's copies from shared memory are done."""
    text = "cp.async.bulk.wait_group 0;"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)


@plgpu.inline_mgpu()
def await_reads(_):
    """Wait until this thread's copies from shared memory have read it."""
    text = "cp.async.bulk.wait_group.read 0;"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)


# ---- Count the work that is taken. Can go when plgpu has atomic operations. ----------------------


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=NUMBER)
def take_item(_, counter):
    """Return how many items all programs have taken so far, and take one: in one warp."""
    i32 = ir.IntegerType.get_signless(32)
    lane = arith.remui(mgpu_utils.thread_idx(), mgpu.c(32, i32))
    text = (
        "{ .reg .pred p; .reg .b32 x; mov.b32 x, 0; setp.eq.s32 p, $2, 0; "
        "@p atom.relaxed.gpu.global.add.s32 x, [$1], 1; "
        "shfl.sync.idx.b32 $0, x, 0, 31, -1; }"
    )
    item = llvm.inline_asm(
        i32,
        [pointer_at(counter, [(0, mgpu.c(0, i32))]), lane],
        text,
        "=r,l,r",
        has_side_effects=True,
    )
    return mgpu.FragmentedArray.splat(item, (), is_signed=True)


# ---- Load rows that may not exist. Can go when loads take a mask. --------------------------------


def load_row_values(vector, batch, head, start, num_rows, other):
    """Load a number of each row of a product; for rows from `num_rows` on it is `other`.

    Args:
        vector: [B, H, S] float32 in global memory.
        batch, head, start: int32 scalars.
        num_rows: a number or an int32 scalar; None where all of the rows exist. One of them does.
        other: a number.

    Returns:
        [64] float32.
    """
    layout = plgpu.Layout.WGMMA.reduce(1)
    shape = (64,)
    scalars = batch, head, start, *if_traced(num_rows)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(scalars)),
        return_type=plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), layout),
    )
    def load(_, vector, batch, head, start, end=num_rows):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        base = pointer_to(vector, batch, head, start)

        def load_one(value, index):
            row = arith.index_cast(i32, index[0])
            if end is None:
                return llvm.load(f32, mgpu_utils.getelementptr(base, [row], f32))
            left = arith.subi(as_scalar(end), start.registers.item())
            exists = arith.cmpi(arith.CmpIPredicate.slt, row, left)
            # The last row, which exists, for those that do not.
            row = arith.minsi(row, arith.subi(left, mgpu.c(1, i32)))
            x = llvm.load(f32, mgpu_utils.getelementptr(base, [row], f32))
            return arith.select(exists, x, value)

        others = mgpu.FragmentedArray.splat(mgpu.c(other, f32), shape, layout.to_mgpu())
        return others.foreach(load_one, create_array=True)

    return load(vector, *scalars)


# ---- Multiply rows in global memory. Can go when loads take a mask. -----------------------------


def dot_loaded_rows(a, b, batch, head, start, num_rows):
    """Multiply rows start .. of two matrices, element by element, and add up a row.

    The four threads that share a row of a product read 16 bytes each at a time.

    Args:
        a, b: [B, S, H, D] in global memory, D a multiple of 8.
        batch, head, start: int32 scalars.
        num_rows: a number; rows from this one on give 0. None where all of the rows exist.

    Returns:
        [64] float32.
    """
    layout = plgpu.Layout.WGMMA
    shape = (64, 8)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3),
        return_type=plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), layout),
    )
    def multiply(_, a, b, batch, head, start):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        batch, head, start = (x.registers.item() for x in (batch, head, start))
        size = ir.MemRefType(a.type).shape[3]
        unit = ir.VectorType.get((8,), ir.MemRefType(a.type).element_type)
        wide = ir.VectorType.get((8,), f32)
        less = arith.CmpIPredicate.slt
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(128, i32))
        warp, lane = (f(thread, mgpu.c(32, i32)) for f in (arith.divui, arith.remui))
        row, quad = (f(lane, mgpu.c(4, i32)) for f in (arith.divui, arith.remui))
        row = linear_index([warp, row], [16, 1])
        none = vector.broadcast(wide, mgpu.c(0.0, f32))
        halves = []
        for half in (0, 8):
            place, exists = arith.addi(row, mgpu.c(half, i32)), None
            if num_rows is not None:
                left = arith.subi(mgpu.c(num_rows, i32), start)
                exists = arith.cmpi(less, place, left)
                # The last row, which exists, for those that do not.
                place = arith.minsi(place, arith.subi(left, mgpu.c(1, i32)))
            place = [(0, batch), (1, arith.addi(start, place)), (2, head)]
            sums = none
            for first in range(0, size, 32):
                column = linear_index([quad, mgpu.c(1, i32)], [8, first])
                inside = exists
                if first + 32 > size:
                    is_column = arith.cmpi(less, column, mgpu.c(size, i32))
                    inside = is_column if exists is None else arith.andi(exists, is_column)
                    column = arith.minsi(column, mgpu.c(size - 8, i32))
                x, y = (
                    arith.extf(wide, llvm.load(unit, pointer_at(z, [*place, (3, column)])))
                    for z in (a, b)
                )
                product = arith.mulf(x, y)
                if inside is not None:
                    product = arith.select(inside, product, none)
                sums = arith.addf(sums, product)
            halves.append(sums)
        registers = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), shape, layout.to_mgpu()).registers
        for i, sums in enumerate(halves):
            parts = [llvm.extractelement(sums, mgpu.c(j, i32)) for j in range(8)]
            pair = [functools.reduce(arith.addf, parts[j::2]) for j in (0, 1)]
            register = registers.flat[i]
            for j, total in enumerate(pair):
                register = llvm.insertelement(register, total, mgpu.c(j, i32))
            registers.flat[i] = register
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return multiply(a, b, batch, head, start).sum(axis=1)


# ---- Clear rows in shared memory. Can go when stores take a mask. --------------------------------


def clear_rows(piece, count, block_rows):
    """Set rows `count` .. of a piece of a tile to 0, a row a thread.

    Args:
        piece: [rows, width] in shared memory, as wgmma sees it.
        count: int32 scalar.
        block_rows: rows of its blocks.
    """
    rows, width = piece.shape
    block = min(width, 64)
    transforms = plgpu.TilingTransform((block_rows, block)), plgpu.SwizzleTransform(2 * block)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT))
    def clear(_, piece, count):
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(128, i32))
        less, at_least = arith.CmpIPredicate.slt, arith.CmpIPredicate.sge
        is_cleared = arith.andi(
            arith.cmpi(less, thread, mgpu.c(rows, i32)),
            arith.cmpi(at_least, thread, count.registers.item()),
        )
        strides, _ = ir.MemRefType(piece.type).get_strides_and_offset()
        row_block, row = (f(thread, mgpu.c(block_rows, i32)) for f in (arith.divui, arith.remui))
        offset = arith.addi(
            arith.muli(row_block, mgpu.c(2 * strides[0], i32)),
            arith.muli(row, mgpu.c(2 * strides[2], i32)),
        )
        pointer = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(piece), [offset], i8)
        unit = ir.VectorType.get((4,), i32)
        zeros = mgpu_utils.bitcast(mgpu.c(0, ir.IntegerType.get_signless(128)), unit)
        with mgpu.when(is_cleared):
            for column_block in range(width // block):
                for byte in range(0, 2 * block, 16):
                    place = column_block * 2 * strides[1] + byte
                    llvm.store(zeros, mgpu_utils.getelementptr(pointer, [place], i8))

    clear(piece, count)


# ---- Store rows of several heads, those that exist. Can go when stores take a mask. --------------


def store_rows_of_heads(x, lse, out_ref, lse_ref, token, head, left, group_size):
    """Store rows of a product: row r is token r // group_size of head r % group_size of a group.

    Args:
        x: [64, columns] float32.
        lse: [64] float32.
        out_ref, lse_ref: [Tq, Hq, Dv] and [Hq, Tq] in global memory.
        token, head: int32 scalars, of the first row.
        left: int32 scalar; rows from this one on are not stored.
        group_size: query heads of a group.
    """
    layout = plgpu.Layout.WGMMA
    scalars = [plgpu.Layout.WG_SPLAT] * 3

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), layout, layout.reduce(1), *scalars)
    )
    def store(_, out, lses, x, lse, token, head, left):
        i32 = ir.IntegerType.get_signless(32)
        token, head, left = (x.registers.item() for x in (token, head, left))
        out_type = ir.MemRefType(out.type)
        size, element = out_type.shape[2], out_type.element_type
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(128, i32))
        warp, lane = (f(thread, mgpu.c(32, i32)) for f in (arith.divui, arith.remui))
        first, quad = (f(lane, mgpu.c(4, i32)) for f in (arith.divui, arith.remui))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, quad, mgpu.c(0, i32))
        column = arith.muli(quad, mgpu.c(2, i32))
        pairs = x.registers.reshape(-1, 2)
        for half in range(2):
            row = linear_index([warp, first, mgpu.c(1, i32)], [16, 1, 8 * half])
            exists = arith.cmpi(arith.CmpIPredicate.slt, row, left)
            of_token, of_head = (
                f(row, mgpu.c(group_size, i32)) for f in (arith.divui, arith.remui)
            )
            place = arith.addi(token, of_token), arith.addi(head, of_head)
            with mgpu.when(exists):
                pointer = pointer_at(out, [(0, place[0]), (1, place[1]), (2, column)])
                for i in range(size // 8):
                    value = arith.truncf(ir.VectorType.get((2,), element), pairs[i, half])
                    llvm.store(value, mgpu_utils.getelementptr(pointer, [8 * i], element))
            with mgpu.when(arith.andi(exists, is_first)):
                pointer = pointer_at(lses, [(0, place[1]), (1, place[0])])
                llvm.store(scalar(lse.registers.flat[half]), pointer)

    store(out_ref, lse_ref, x, lse, token, head, left)
