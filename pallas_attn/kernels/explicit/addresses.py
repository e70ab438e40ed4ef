"""Addresses in memory, in MLIR."""

from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils


def if_traced(num_rows):
    """Return a number of rows as scalar arguments of an MLIR function: none unless traced."""
    return () if num_rows is None or isinstance(num_rows, int) else (num_rows,)


def as_scalar(num_rows):
    if isinstance(num_rows, int):
        return mgpu.c(num_rows, ir.IntegerType.get_signless(32))
    return num_rows.registers.item()


def pointer_to(array, *indices):
    """Return the 64-bit address of ``array[*indices]``; further indices are 0."""
    return pointer_at(array, [(axis, x.registers.item()) for axis, x in enumerate(indices)])


def linear_index(indices, strides):
    total = None
    for index, stride in zip(indices, strides, strict=True):
        product = arith.muli(index, mgpu.c(stride, index.type))
        total = product if total is None else arith.addi(total, product)
    return total


def pointer_at(array, indices):
    """Return the 64-bit address at some (axis, index) of an array; other indices are 0."""
    i64 = ir.IntegerType.get_signless(64)
    array_type = ir.MemRefType(array.type)
    strides, _ = array_type.get_strides_and_offset()
    offset = linear_index(
        [arith.extsi(i64, index) for _, index in indices], [strides[axis] for axis, _ in indices]
    )
    pointer = llvm.addrspacecast(llvm.PointerType.get(1), mgpu_utils.memref_ptr(array))
    element = array_type.element_type
    if mgpu.bitwidth(element) == 8:  # LLVM has no 8-bit floats
        element = ir.IntegerType.get_signless(8)
    return mgpu_utils.getelementptr(pointer, [offset], element)
