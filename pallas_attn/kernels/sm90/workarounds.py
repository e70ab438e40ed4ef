"""Write by hand what JAX 0.11.2's Mosaic GPU does not offer on SM90.

Each entry ends with when it can go. Barrier 0 is the compiler's, 1 + w that of warpgroup w; the
next ones are free.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import (
    pointer_at,
)
from pallas_attn.kernels.explicit.registers import NUMBER
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils

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
