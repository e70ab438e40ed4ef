"""Call a kernel that multiplies with mma.sync."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.aliases import of_batch
from pallas_attn.kernels.explicit.lowering import SM80Params, compiler_params
from pallas_attn.launch import flash_arguments
from pallas_attn.switches import in_32_bits
from pallas_attn.targets import note_config, shared_memory
from pallas_attn.varying import unvarying
from twin_attention.contract.validate.errors import fail
from twin_attention.targets.family import Backend


def launch(
    name: str,
    kernel: Callable[..., None],
    programs: Callable[[Any], int],
    operands: Sequence[Any],
    out_shape: Sequence[jax.ShapeDtypeStruct | None],
    tiles: Callable[[Any], Sequence[Any]],
    spec: Any,
    backend: Backend,
    problem: dict[str, Any] | None = None,
    aliased: Sequence[Array] = (),
) -> Any:
    """Call a kernel; return its outputs.

    Args:
        name: the kernel's name in the configuration tables.
        operands: inputs, which may be tuples; for None, here and below, the kernel gets None.
        programs, tiles: how many programs, and one's shared memory, from the configuration.
        problem: the kernel's keyword arguments except the configuration; None for those of flash
            attention.
        aliased: arrays whose memory the last outputs reuse.
    """
    config = fitting_config(name, tiles, spec, backend)
    scratch = tiles(config)
    if problem is None:
        problem = flash_arguments(spec) | {"group_size": spec.group_size}
    takes = inspect.signature(kernel).parameters
    arguments = vars(config) | problem
    arguments = {key: value for key, value in arguments.items() if key in takes}
    inputs = jax.tree.leaves(operands)
    places = jax.tree.structure((operands, out_shape, scratch))
    outputs = tuple(x for x in out_shape if x is not None)
    in_place = of_batch(tuple(aliased), *inputs)

    def body(*refs):
        refs = refs[: len(inputs)] + refs[len(inputs) + len(in_place) :]
        operands, out, scratch = jax.tree.unflatten(places, refs)
        kernel(*operands, *out, *scratch, **arguments)

    warpgroups = config.num_warps // 4
    threads: dict[str, Any] = {}
    if warpgroups > 1:
        threads = {"num_threads": warpgroups, "thread_name": "warpgroup"}
    call = plgpu.kernel(
        in_32_bits(body),
        out_type=unvarying(outputs),
        scratch_types=tuple(jax.tree.leaves(scratch)),
        grid=(programs(config),),
        grid_names=("program",),
        kernel_name=name,
        compiler_params=compiler_params(SM80Params, len(in_place)),
        **threads,
    )
    return call(*inputs, *in_place)


def fitting_config(
    name: str, tiles: Callable[[Any], Sequence[Any]], spec: Any, backend: Backend
) -> Any:
    """Return the table's configuration, or the next one whose tiles fit this process's devices."""
    config = backend.configs(spec)[name]
    limit = shared_memory("sm80")
    candidates = (config, *backend.smaller_configs(spec, name, config))
    sizes = [sum(map(_size, jax.tree.leaves(tiles(x)))) for x in candidates]
    for candidate, size in zip(candidates, sizes, strict=True):
        if size <= limit:
            note_config(name, candidate)
            return candidate
    expected = f"at most {limit} bytes of shared memory on {backend.target}"
    return fail(NotImplementedError, name, expected, f"{sizes[-1]} with {candidates[-1]}")


def _size(tile: Any) -> int:
    if isinstance(tile, plgpu.RefUnion):
        return max(map(_size, tile.refs))
    return math.prod(tile.shape) * jnp.dtype(tile.dtype).itemsize
