"""Rows in global memory, some of which may not exist.

The loads and stores here can go when plgpu's take a mask.
"""

import functools

import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import (
    as_scalar,
    if_traced,
    linear_index,
    pointer_at,
    pointer_to,
)
from pallas_attn.kernels.explicit.cp_async import store_rows, tile_transforms
from pallas_attn.kernels.explicit.registers import SCALAR, scalar
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils, vector


def load_vector(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def load_row_values(vector, batch, head, start, num_rows, other):
    """Load float32 for each row of a product from [B, H, S]; `other` from num_rows on."""
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
            # Rows that do not exist read the last row.
            row = arith.minsi(row, arith.subi(left, mgpu.c(1, i32)))
            x = llvm.load(f32, mgpu_utils.getelementptr(base, [row], f32))
            return arith.select(exists, x, value)

        others = mgpu.FragmentedArray.splat(mgpu.c(other, f32), shape, layout.to_mgpu())
        return others.foreach(load_one, create_array=True)

    return load(vector, *scalars)


def dot_loaded_rows(a, b, batch, head, start, num_rows):
    """Multiply rows of two matrices element by element, and sum each row: [64] float32.

    Four threads share a row and read 16 bytes each, so D is a multiple of 8.
    """
    layout = plgpu.Layout.WGMMA
    shape = (64, 8)
    scalars = batch, head, start, *if_traced(num_rows)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(scalars)),
        return_type=plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), layout),
    )
    def multiply(_, a, b, batch, head, start, end=num_rows):
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
            if end is not None:
                left = arith.subi(as_scalar(end), start)
                exists = arith.cmpi(less, place, left)
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

    return multiply(a, b, *scalars).sum(axis=1)


def store_row_values(x, vector, batch, head, start, num_rows, layout):
    """Store one number for each row before `num_rows` in a vector [B, H, S]."""
    scalars = batch, head, start, *if_traced(num_rows)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *[SCALAR] * len(scalars)))
    def store(_, vector, x, batch, head, start, end=num_rows):
        f32 = ir.F32Type.get()
        i32 = ir.IntegerType.get_signless(32)
        base = pointer_to(vector, batch, head, start)
        left = None
        if end is not None:
            left = arith.subi(as_scalar(end), start.registers.item())

        def store_one(value, index):
            row = arith.index_cast(i32, index[0])
            pointer = mgpu_utils.getelementptr(base, [row], f32)
            if left is None:
                llvm.store(value, pointer)
            else:
                exists = arith.cmpi(arith.CmpIPredicate.slt, row, left)
                with mgpu.when(exists):
                    llvm.store(value, pointer)

        x.foreach(store_one)

    store(vector, x, *scalars)


def store_rows_of_tile(x, tile, matrix, batch, head, start, num_rows):
    """Store x through a tile of cp.async that no thread reads any more, as far as `num_rows`."""
    tile[...] = x.astype(tile.dtype)
    plgpu.commit_smem()
    store_rows(tile, tile_transforms(matrix.shape[3]), matrix, batch, head, start, num_rows)


def store_rows_of_pieces(x, tile, matrix, batch, head, start, num_rows):
    """Store x as `store_rows_of_tile`, through `Tiles` of one tile, in pieces."""
    for piece, columns in zip(tile.multiplied, tile.columns, strict=True):
        piece[...] = x[:, columns].astype(piece.dtype)
    plgpu.commit_smem()
    for piece, columns in zip(tile.multiplied, tile.columns, strict=True):
        width = min(columns.stop, matrix.shape[3]) - columns.start
        if width > 0:
            part = matrix.at[:, :, :, pl.ds(columns.start, width)]
            transforms = tile_transforms(piece.shape[1])
            store_rows(piece, transforms, part, batch, head, start, num_rows)


def store_rows_of_heads(x, lse, out_ref, lse_ref, token, head, left, group_size):
    """Store rows before `left`: row r is token r // group_size of head r % group_size."""
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
