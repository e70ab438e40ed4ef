"""Tiles in shared memory that cp.async fills, and stores from them.

A tile holds rows of one head, padded with zeros to a multiple of 16 columns, in blocks of 8 rows
and at most 64 columns. Units of 16 bytes are swizzled by the row's number, so that cp.async writes
and ldmatrix reads eight rows without a bank conflict.
"""

from typing import NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import as_scalar, if_traced, linear_index, pointer_to
from pallas_attn.kernels.explicit.barriers import program_barrier
from pallas_attn.kernels.explicit.registers import SCALAR
from pallas_attn.private import arith, fragmented_array, ir, llvm, mgpu, mgpu_utils, nvvm


class Head(NamedTuple):
    matrix: object
    batch: object
    head: object
    num_rows: object


def fills_tiles(num_rows, block: int) -> bool:
    """Return True if the last tile is known to have all rows."""
    return isinstance(num_rows, int) and num_rows % block == 0


def padded_columns(size: int) -> int:
    return -(-size // 16) * 16


def block_columns(size: int) -> int:
    return next(columns for columns in (64, 32, 16) if padded_columns(size) % columns == 0)


def tile_transforms(size: int, block: int | None = None):
    """Return the layout in shared memory of a tile of 16-bit rows of `size` elements."""
    columns = block or block_columns(size)
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)


def allocate_tile(dtype, count, rows, size, block=None):
    shape = (count, rows, padded_columns(size))
    return plgpu.SMEM(shape, dtype, transforms=tile_transforms(size, block))


def fetch_tile(source, tile, start, rows, warpgroup=0, warpgroups=1, all_exist=False):
    """Copy this warpgroup's share of rows to a tile; the caller commits."""
    share = rows // warpgroups
    first = warpgroup * share
    copy_rows(
        source.matrix,
        tile.at[pl.ds(first, share)],
        tile_transforms(source.matrix.shape[3]),
        source.batch,
        source.head,
        start + first,
        None if all_exist else source.num_rows,
    )


def wait(pending, warpgroups=1):
    """Wait for all but the last `pending` groups of copies, and for all threads of the program.

    `plgpu.wait_gmem_to_smem` uses a separate barrier for each warpgroup.
    """

    @plgpu.inline_mgpu()
    def await_copies(_):
        nvvm.cp_async_wait_group(pending)

    await_copies()
    program_barrier(warpgroups)


# Can go when `copy_gmem_to_smem` takes OOBFillMode.ZEROS.
def copy_rows(matrix, tile, transforms, batch, head, start, num_rows):
    """Start to copy a head's rows start .. < num_rows, uncommitted; the tile's rest becomes 0."""
    scalars = batch, head, start, *if_traced(num_rows)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(transforms), *[SCALAR] * len(scalars))
    )
    def copy(_, matrix, tile, batch, head, start, end=num_rows):
        for exists, source, destination, size in _units(
            matrix, tile, transforms, batch, head, start, end
        ):
            i32 = ir.IntegerType.get_signless(32)
            read = None
            if exists is not None:
                read = arith.select(exists, mgpu.c(size, i32), mgpu.c(0, i32))
            modifiers = nvvm.LoadCacheModifierKind.CA, nvvm.LoadCacheModifierKind.CG
            modifier = modifiers[size == 16]
            nvvm.cp_async_shared_global(destination, source, size, modifier, cp_size=read)

    copy(matrix, tile, *scalars)


@plgpu.inline_mgpu()
def commit(_):
    nvvm.cp_async_commit_group()


# Can go when stores take a mask.
def store_rows(tile, transforms, matrix, batch, head, start, num_rows):
    scalars = batch, head, start, *if_traced(num_rows)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(transforms), *[SCALAR] * len(scalars))
    )
    def store(_, matrix, tile, batch, head, start, end=num_rows):
        for exists, destination, source, size in _units(
            matrix, tile, transforms, batch, head, start, end
        ):
            unit = ir.VectorType.get((size // 4,), ir.IntegerType.get_signless(32))
            x = llvm.load(unit, source)
            if exists is None:
                llvm.store(x, destination)
            else:
                with mgpu.when(exists):
                    llvm.store(x, destination)

    store(matrix, tile, *scalars)


def _units(matrix, tile, transforms, batch, head, start, num_rows):
    """Yield each transfer of this thread: (exists or None, from, to in shared memory, bytes)."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    swizzle = transforms[1].swizzle
    _, _, _, size = ir.MemRefType(matrix.type).shape
    tile_type = ir.MemRefType(tile.type)
    element = tile_type.element_type
    row_tiles, column_tiles, tile_rows, tile_columns = tile_type.shape
    shape = row_tiles * tile_rows, column_tiles * tile_columns
    (_, stride, _, _), _ = ir.MemRefType(matrix.type).get_strides_and_offset()
    layout = fragmented_array.tiled_copy_smem_gmem_layout(
        row_tiles, column_tiles, swizzle, mgpu.bitwidth(element)
    )
    place = [
        arith.addi(
            linear_index(layout.lane_indices(), strides),
            linear_index(layout.warp_indices(), strides),
        )
        for strides in (layout.tiling.tile_strides(axis)[2:] for axis in ((1, 0), (0, 1)))
    ]
    row, column = place
    offset = arith.addi(
        arith.muli(arith.extui(i64, row), mgpu.c(stride, i64)), arith.extui(i64, column)
    )
    base = mgpu_utils.getelementptr(pointer_to(matrix, batch, start, head), [offset], element)
    left = None
    if num_rows is not None:
        left = arith.subi(arith.subi(as_scalar(num_rows), start.registers.item()), row)
    less = arith.CmpIPredicate.slt
    transfers = mgpu.FragmentedArray.transfer_tiled(tile, swizzle, layout, shape, optimized=False)
    columns_apart = layout.base_tile_shape[1]
    for _get, _update, base_index, pointer in transfers:
        row_offset, column_offset = base_index()
        exists = None
        if left is not None:
            exists = arith.cmpi(less, mgpu.c(row_offset, i32), left)
        if column_offset + columns_apart > size:
            inside = arith.cmpi(less, column, mgpu.c(size - column_offset, i32))
            exists = inside if exists is None else arith.andi(exists, inside)
        there = mgpu_utils.getelementptr(
            base, [mgpu.c(row_offset * stride + column_offset, i64)], element
        )
        yield exists, there, pointer, layout.vector_length * mgpu.bitwidth(element) // 8
