"""Write by hand what paged attention needs and JAX 0.11.2's Mosaic GPU does not offer.

Here each warp of a program has keys of its own, and all of them have the same query rows. An array
of the kernel has 16 rows a warp, as a product of four warps has them, so that one array holds what
the four warps know of the same rows. Numbers may differ among threads, though JAX takes them for
scalars.

Like `pallas_attn.kernels.sm80.workarounds`, this file builds MLIR. It can go when cp.async takes
indices and a size to fetch to L2, and a kernel can be written for a warp.
"""

from __future__ import annotations

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_attn.kernels.sm80.workarounds import _dot
from twin_attention.targets import ptx

Layout = plgpu.Layout
_SCALAR = Layout.WG_SPLAT
_NUMBER = plgpu.ShapeDtypeStruct((), np.dtype("int32"), _SCALAR)
SUMS = Layout.MMA_ACC(np.dtype("bfloat16"))
ROWS = SUMS.reduce(1)
WARPS = 4
THREADS = 32 * WARPS
UNIT = 8  # numbers that a thread loads or stores at a time
# L2 fetches 128 bytes: half of them are for another program, or the next key, where rows have 64.
# Those take 0.73 to 0.82 of the time so, longer ones the same. NVVM's cp.async has no such option.
_COPY = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"


# ---- Number threads. ----------------------------------------------------------------------------


@plgpu.inline_mgpu(return_type=_NUMBER)
def thread_index(_):
    """Return this thread's number in the program; it differs among threads."""
    return mgpu.FragmentedArray.splat(mgpu_utils.thread_idx(), (), is_signed=True)


def store_number(x, array, *index):
    """Store a number of each thread at ``array[*index]``, in global or in shared memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, *[_SCALAR] * len(index)))
    def store(_, array, x, *index):
        i64 = ir.IntegerType.get_signless(64)
        strides, _ = ir.MemRefType(array.type).get_strides_and_offset()
        offset = _dot([arith.extsi(i64, i.registers.item()) for i in index], strides)
        value = x.registers.item()
        pointer = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(array), [offset], value.type)
        llvm.store(value, pointer)

    store(array, x, *index)


def load_unit(array, index):
    """Return a list of `UNIT` numbers, those from ``array[*index]`` on in global memory."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), (_SCALAR,) * len(index)),
        return_type=[plgpu.ShapeDtypeStruct((), array.dtype, _SCALAR)] * UNIT,
    )
    def load(_, array, index):
        unit = ir.VectorType.get((UNIT,), ir.MemRefType(array.type).element_type)
        value = llvm.load(unit, _pointer_at(array, _indices(index)))
        places = [mgpu.c(i, ir.IntegerType.get_signless(32)) for i in range(UNIT)]
        return [mgpu.FragmentedArray.splat(llvm.extractelement(value, i), ()) for i in places]

    return load(array, tuple(index))


def store_unit(numbers, array, index):
    """Store `UNIT` numbers at ``array[*index]`` and what follows, in global memory.

    A store of single bytes would not do: ptxas 13 compiles that of the low byte of an int8 that
    `round_to` rounds to a conversion of the float that it rounds by.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), [_SCALAR] * UNIT, (_SCALAR,) * len(index)),
    )
    def store(_, array, numbers, index):
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        numbers = [x.registers.item() for x in numbers]
        if mgpu.bitwidth(numbers[0].type) == 8:  # LLVM has no such floats
            numbers = [mgpu_utils.bitcast(x, i8) for x in numbers]
        unit = llvm.mlir_undef(ir.VectorType.get((UNIT,), numbers[0].type))
        for i, x in enumerate(numbers):
            unit = llvm.insertelement(unit, x, mgpu.c(i, i32))
        llvm.store(unit, _pointer_at(array, _indices(index)))

    store(array, list(numbers), tuple(index))


def divide(x, y):
    """Return x / y of float32 numbers, rounded to nearest; `approx_math` divides faster."""

    @plgpu.inline_mgpu(
        arg_types=(_SCALAR,) * 2,
        return_type=plgpu.ShapeDtypeStruct((), np.dtype("float32"), _SCALAR),
    )
    def quotient(_, x, y):
        operands = [x.registers.item(), y.registers.item()]
        value = llvm.inline_asm(ir.F32Type.get(), operands, ptx.DIVIDE, ptx.DIVIDE_CONSTRAINTS)
        return mgpu.FragmentedArray.splat(value, ())

    return quotient(x, y)


# ---- Copy keys of a warp. -----------------------------------------------------------------------


def copy_keys(pool, tile, transforms, head, places):
    """Start to copy keys, or values, of one head to a warp's tile by cp.async, without a commit.

    Args:
        pool: [P, page_size, H, D] in global memory.
        tile: [keys, width] in shared memory, width at least D; its columns from D on become 0.
        transforms: the tile's.
        head: int32.
        places: int32, lane i's is the place of key i among those of the pool; below 0 for a key
            that does not exist, whose row becomes 0.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(transforms), _SCALAR, _SCALAR),
    )
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
        source = _pointer_at(pool, [(2, head.registers.item()), (3, column)])
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
            byte = _dot([row, unit], [block_bytes, 16])
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
    """Start to copy `size` bytes, 0 to 16, to shared memory; the rest of the 16 become 0."""
    target = llvm.ptrtoint(ir.IntegerType.get_signless(32), target)
    void, constraints = ir.Type.parse("!llvm.void"), "r,l,r,~{memory}"
    llvm.inline_asm(void, [target, source, size], _COPY, constraints, has_side_effects=True)


def wait_of_warp(pending):
    """Wait for all but the last `pending` groups of copies of this warp."""

    @plgpu.inline_mgpu()
    def wait(_):
        nvvm.cp_async_wait_group(pending)
        mgpu_utils.warp_barrier()

    wait()


# ---- Load queries. ------------------------------------------------------------------------------


def load_queries(q, batch, head, rows, total, group_size, width):
    """Load rows of the query heads of a kv head as a left operand.

    Args:
        q: [B, T, Hq, D] in global memory.
        batch, head: int32; head is the first query head.
        rows: [16 · WARPS · n] int32, in `ROWS`: row r is token r // group_size of head
            head + r % group_size.
        total: rows from this one on become 0.
        group_size: query heads of the kv head.
        width: columns of the operand; those from D on are 0.
    """
    shape = (*rows.shape, width)
    layout = Layout.MMA_LHS(q.dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, ROWS),
        return_type=plgpu.ShapeDtypeStruct(shape, q.dtype, layout),
    )
    def load(_, q, batch, head, rows):
        registers = np.empty(layout.to_mgpu().registers_shape(shape), object)
        for index, x in _query_registers(q, batch, head, rows, total, group_size, registers, 1):
            registers[index] = x
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return load(q, batch, head, rows)


def load_split_queries(q, batch, head, rows, total, group_size, width):
    """Load rows as `load_queries` does, in float16: (even columns, odd columns, factor).

    A row of bfloat16 may exceed float16's range: it is divided by the factor, a power of two that
    brings its largest element to 2^13 .. 2^14 (`pallas_attn.kernels.portable.quantized`).

    Args:
        width: columns of each operand.
    """
    shape = (*rows.shape, width)
    layout = Layout.MMA_LHS(np.dtype("float16"))
    operand = plgpu.ShapeDtypeStruct(shape, np.dtype("float16"), layout)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, ROWS),
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
            even[index], odd[index] = _pair(*numbers[::2]), _pair(*numbers[1::2])
        factor = [
            _as_register(factors[i // 2, i % 2], register)
            for i, register in enumerate(rows.registers.flat)
        ]
        operands = [
            mgpu.FragmentedArray(_registers=x, _layout=layout.to_mgpu(), _is_signed=None)
            for x in (even, odd)
        ]
        return *operands, _of_registers(rows, factor)

    return load(q, batch, head, rows)


def _query_registers(q, batch, head, rows, total, group_size, registers, step):
    """Yield each register of a left operand: its index, and 2 · step columns of a row of q."""
    q_type = ir.MemRefType(q.type)
    size, element = q_type.shape[3], q_type.element_type
    bits = ir.IntegerType.get_signless(32 * step)
    columns = ir.VectorType.get((2 * step,), element)
    zero = mgpu.c(0, bits)
    column = arith.muli(_column_of_thread(), mgpu.c(step, ir.IntegerType.get_signless(32)))
    pointers = {}
    for tile, half in np.ndindex(rows.registers.shape[0], 2):
        exists, place = _place(_row_number(rows, tile, half), total, group_size, head)
        index = [(0, batch.registers.item()), (1, place[0]), (2, place[1]), (3, column)]
        pointers[tile, half] = exists, _pointer_at(q, index)
    for index in np.ndindex(registers.shape):
        tile, k_step, column_half, half = index[0], index[1], index[3], index[4]
        start = (16 * k_step + 8 * column_half) * step
        exists, pointer = pointers[tile, half]
        x = zero
        if start < size:
            x = llvm.load(bits, mgpu_utils.getelementptr(pointer, [start], element))
            x = arith.select(exists, x, zero)
        yield index, mgpu_utils.bitcast(x, columns)


# ---- Upcast. ------------------------------------------------------------------------------------


def upcast_pairs(x, code):
    """Return one byte of each packed pair as float16; see `twin_attention.targets.ptx.Upcast`.

    Args:
        x: int16, in the layout of a right operand.
        code: PTX.
    """
    layout = Layout.MMA_RHS(np.dtype("int16"))

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, np.dtype("float16"), layout),
    )
    def convert(_, x):
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        registers = np.empty_like(x.registers)
        for index, register in np.ndenumerate(x.registers):
            value = mgpu_utils.bitcast(register, i32)
            value = llvm.inline_asm(i32, [value], code, ptx.UPCAST_CONSTRAINTS)
            registers[index] = mgpu_utils.bitcast(value, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return convert(x)


# ---- Load numbers of rows. ----------------------------------------------------------------------


def gather(vector, index):
    """Return ``vector[index]``, float32; index is int32, in `ROWS`, and within the vector."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ROWS),
        return_type=plgpu.ShapeDtypeStruct(index.shape, np.dtype("float32"), ROWS),
    )
    def load(_, vector, index):
        f32 = ir.F32Type.get()
        registers = [
            _as_register(llvm.load(f32, _pointer_at(vector, [(0, _scalar(x))])), x)
            for x in index.registers.flat
        ]
        return _of_registers(index, registers)

    return load(vector, index)


# ---- Merge what the warps have. -----------------------------------------------------------------


def merge_rows(x, scratch, add):
    """Return the largest, or the sum, of the numbers that the warps have of each row.

    Args:
        x: [16 · WARPS · n] float32, in `ROWS`.
        scratch: as many numbers in shared memory.
        add: return the sum.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ROWS),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, ROWS),
    )
    def merge(_, scratch, x):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        warp, lane = _warp_and_lane()
        row = arith.divui(lane, mgpu.c(4, i32))
        base = mgpu_utils.memref_ptr(scratch)
        rows_of_warp = x.shape[0] // WARPS
        own = _dot([warp, row], [rows_of_warp, 1])
        flat = list(enumerate(x.registers.flat))  # 8 rows apart
        for i, register in flat:
            place = arith.addi(own, mgpu.c(8 * i, i32))
            llvm.store(_scalar(register), mgpu_utils.getelementptr(base, [place], f32))
        mgpu.warpgroup_barrier()
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
            merged.append(_as_register(total, register))
        return _of_registers(x, merged)

    return merge(scratch, x)


def share_sums(arrays, scratch):
    """Write the sums of this warp to shared memory for `store_merged`.

    Args:
        arrays: [16 · WARPS · n, columns] float32 each, in `SUMS`.
        scratch: as many numbers in shared memory.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [SUMS] * len(arrays)))
    def share(_, scratch, arrays):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.muli(mgpu_utils.thread_idx(), mgpu.c(2, i32))
        pointer = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(scratch), [thread], f32)
        registers = [x for array in arrays for x in array.registers.flat]
        for i, register in enumerate(registers):
            llvm.store(register, mgpu_utils.getelementptr(pointer, [i * 2 * THREADS], f32))
        mgpu.warpgroup_barrier()

    share(scratch, list(arrays))


def store_merged(scratch, factor, out, index, rows, total, group_size, columns, parts):
    """Store the sum of what the warps have shared, each warp some of the columns.

    Args:
        scratch: what `share_sums` wrote.
        factor: float32 in `ROWS`, of each row.
        out: [N, T, Hq, Dv] in global memory.
        index: (n, head), int32: which of N, and the first query head.
        rows, total, group_size: see `load_queries`; rows from `total` on are not stored.
        columns: of an array of sums.
        parts: how many arrays were shared; column c of array i is column parts · c + i of out.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR, ROWS, ROWS))
    def store(_, scratch, out, batch, head, rows, factor):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        out_type = ir.MemRefType(out.type)
        size, element = out_type.shape[3], out_type.element_type
        pair = ir.VectorType.get((2,), f32)
        warp, lane = _warp_and_lane()
        blocks, tiles = columns // 8, rows.registers.shape[0]
        last = size // parts // 8 - 1
        # The pair of a thread in warp w of (array, row tile, column block, row half) is at
        # ((((array · tiles + tile) · blocks + block) · 2 + half) · THREADS + 32 w + lane) · 2.
        base = mgpu_utils.memref_ptr(scratch)
        base = mgpu_utils.getelementptr(base, [arith.muli(lane, mgpu.c(2, i32))], f32)
        column = arith.muli(_column_of_thread(), mgpu.c(parts, i32))
        for tile, half in np.ndindex(tiles, 2):
            exists, place = _place(_row_number(rows, tile, half), total, group_size, head)
            scale = _scalar(factor.registers.reshape(tiles, 2)[tile, half])
            pointer = _pointer_at(
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
                        offset = _dot([block, mgpu.c(at, i32)], [4 * THREADS, 2 * THREADS])
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
    """Store a number a row, which all warps have.

    Args:
        x: float32, in `ROWS`.
        out: [N, Hq, T] in global memory.
        index, rows, total, group_size: see `store_merged`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, ROWS, ROWS))
    def store(_, out, batch, head, rows, x):
        i32 = ir.IntegerType.get_signless(32)
        thread = mgpu_utils.thread_idx()
        zero, equal = mgpu.c(0, i32), arith.CmpIPredicate.eq
        # The first lane of each quad of the first warp.
        is_first = arith.cmpi(equal, arith.andi(thread, mgpu.c(0x63, i32)), zero)
        for tile, half in np.ndindex(rows.registers.shape[0], 2):
            exists, place = _place(_row_number(rows, tile, half), total, group_size, head)
            pointer = _pointer_at(out, [(0, batch.registers.item()), (1, place[1]), (2, place[0])])
            value = _scalar(x.registers.reshape(-1, 2)[tile, half])
            with mgpu.when(arith.andi(exists, is_first)):
                llvm.store(value, pointer)

    store(out, *index, rows, x)


# ---- Registers and addresses. -------------------------------------------------------------------


def _warp_and_lane():
    i32 = ir.IntegerType.get_signless(32)
    thread = mgpu_utils.thread_idx()
    return [f(thread, mgpu.c(32, i32)) for f in (arith.divui, arith.remui)]


def _column_of_thread():
    """Return the first of a thread's two columns in a block of 8."""
    i32 = ir.IntegerType.get_signless(32)
    quad = arith.remui(mgpu_utils.thread_idx(), mgpu.c(4, i32))
    return arith.muli(quad, mgpu.c(2, i32))


def _row_number(rows, tile, half):
    return _scalar(rows.registers.reshape(-1, 2)[tile, half])


def _place(row, total, group_size, head):
    """Return whether a row exists, and its token and query head, or those of the last row."""
    i32 = ir.IntegerType.get_signless(32)
    exists = arith.cmpi(arith.CmpIPredicate.slt, row, mgpu.c(total, i32))
    row = arith.minsi(row, mgpu.c(total - 1, i32))
    token, of_group = (f(row, mgpu.c(group_size, i32)) for f in (arith.divui, arith.remui))
    return exists, (token, arith.addi(head.registers.item(), of_group))


def _of_registers(like, registers):
    """Return an array of floats of other registers in the layout and shape of an array."""
    shaped = np.empty(like.registers.shape, object)
    shaped.flat = registers
    return mgpu.FragmentedArray(_registers=shaped, _layout=like.layout, _is_signed=None)


def _scalar(register):
    """Return the one number of a register."""
    if isinstance(register.type, ir.VectorType):
        return llvm.extractelement(register, mgpu.c(0, ir.IntegerType.get_signless(32)))
    return register


def _as_register(value, like):
    if not isinstance(like.type, ir.VectorType):
        return value
    vector = llvm.mlir_undef(ir.VectorType.get((1,), value.type))
    return llvm.insertelement(vector, value, mgpu.c(0, ir.IntegerType.get_signless(32)))


def _pair(low, high):
    i32 = ir.IntegerType.get_signless(32)
    pair = llvm.mlir_undef(ir.VectorType.get((2,), low.type))
    pair = llvm.insertelement(pair, low, mgpu.c(0, i32))
    return llvm.insertelement(pair, high, mgpu.c(1, i32))


def _indices(index):
    """Return (axis, index) of numbers of the kernel."""
    return list(enumerate(x.registers.item() for x in index))


def _pointer_at(array, indices):
    """Return the address, in 64 bits, at some (axis, index) of an array; the others are 0."""
    i64 = ir.IntegerType.get_signless(64)
    array_type = ir.MemRefType(array.type)
    strides, _ = array_type.get_strides_and_offset()
    offset = _dot(
        [arith.extsi(i64, index) for _, index in indices], [strides[axis] for axis, _ in indices]
    )
    pointer = llvm.addrspacecast(llvm.PointerType.get(1), mgpu_utils.memref_ptr(array))
    element = array_type.element_type
    if mgpu.bitwidth(element) == 8:  # LLVM has no such floats
        element = ir.IntegerType.get_signless(8)
    return mgpu_utils.getelementptr(pointer, [offset], element)
