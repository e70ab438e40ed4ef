"""Call a kernel of this family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.sm80.workarounds import SM80Params


def launch(
    name: str,
    kernel: Callable[..., None],
    programs: int,
    num_warps: int,
    operands: Sequence[Array | None],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    tiles: Sequence[Any],
    arguments: dict[str, Any],
) -> Any:
    """Call a kernel.

    Args:
        name: the kernel's name.
        kernel: the function over references to the operands, the outputs and the tiles.
        programs: how many to launch.
        num_warps: warps of a program, 4 or a multiple; four make a warpgroup.
        operands: inputs; the kernel gets None for None.
        out_shape: the outputs.
        tiles: what a program has in shared memory.
        arguments: the kernel's keyword arguments.

    Returns:
        The outputs.
    """

    def body(*refs):
        rest = iter(refs)
        kernel(*(None if x is None else next(rest) for x in operands), *rest, **arguments)

    warpgroups = num_warps // 4
    threads: dict[str, Any] = {}
    if warpgroups > 1:
        threads = {"num_threads": warpgroups, "thread_name": "warpgroup"}
    return plgpu.kernel(
        body,
        out_type=tuple(out_shape),
        scratch_types=tuple(tiles),
        grid=(programs,),
        grid_names=("program",),
        kernel_name=name,
        compiler_params=SM80Params(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Every barrier is placed by hand.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        **threads,
    )(*(x for x in operands if x is not None))
