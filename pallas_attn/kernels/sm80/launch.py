"""Call a kernel of this family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.sm80.workarounds import SM80Params


def launch(
    name: str,
    kernel: Callable[..., None],
    programs: int,
    num_warps: int,
    operands: Sequence[Array | None],
    out_shape: Sequence[jax.ShapeDtypeStruct | None],
    tiles: Sequence[Any],
    arguments: dict[str, Any],
    num_sums: int = 0,
) -> Any:
    """Call a kernel.

    Args:
        name: the kernel's name.
        kernel: the function over references to the operands, the outputs and the tiles.
        programs: how many to launch.
        num_warps: warps of a program, 4 or a multiple; four make a warpgroup.
        operands: inputs; for None, here and below, the kernel gets None.
        out_shape: the outputs.
        tiles: what a program has in shared memory.
        arguments: the kernel's keyword arguments.
        num_sums: the last outputs, float32, that are 0 when the kernel starts.

    Returns:
        The outputs.
    """

    inputs = [x for x in operands if x is not None]
    outputs = tuple(x for x in out_shape if x is not None)
    sums = [zeros_of_batch(x.shape)(*inputs) for x in outputs[len(outputs) - num_sums :]]

    def body(*refs):
        rest = iter(refs[: len(inputs)] + refs[len(inputs) + num_sums :])
        kernel(
            *(None if x is None else next(rest) for x in (*operands, *out_shape, *tiles)),
            **arguments,
        )

    warpgroups = num_warps // 4
    threads: dict[str, Any] = {}
    if warpgroups > 1:
        threads = {"num_threads": warpgroups, "thread_name": "warpgroup"}
    return plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=tuple(x for x in tiles if x is not None),
        grid=(programs,),
        grid_names=("program",),
        kernel_name=name,
        compiler_params=SM80Params(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Every barrier is placed by hand.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            num_sums=num_sums,
        ),
        **threads,
    )(*inputs, *sums)


def zeros_of_batch(shape: tuple[int, ...]) -> Callable[..., Array]:
    """Return a function that gives float32 zeros; under `vmap` a batch of them, not one for all."""

    @jax.custom_batching.custom_vmap
    def zeros(*_):
        return jnp.zeros(shape, jnp.float32)

    @zeros.def_vmap
    def _(axis_size, in_batched, *operands):
        return zeros_of_batch((axis_size, *shape))(*operands), True

    return zeros
