"""Add boxes of shared memory to global memory by TMA.

Triton 3.6 has the instruction only in its builder, and `tma.async_atomic_add` came later. No other
module uses private parts of Triton.
"""

from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_atomic_add"):
    add_box = tma.async_atomic_add
else:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def add_box(tensor_desc, coord, src, _semantic=None):
        """Start to add a box to the tensor at `coord`; `tma.store_wait` waits."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        add = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)
