"""Write by hand what JAX 0.11.2's Mosaic GPU does not offer on SM90.

Each entry ends with when it can go. Barrier 0 is the compiler's, 1 + w that of warpgroup w; the
next ones are free.
"""

from __future__ import annotations

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import (
    pointer_at,
)
from pallas_attn.kernels.explicit.registers import NUMBER
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils
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
