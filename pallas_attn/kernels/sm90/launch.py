"""Call a kernel of this family: its programs, the tiles that each works on, and its memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.portable.tiles import visible_tiles
from pallas_attn.launch import flash_arguments
from pallas_attn.targets import num_sms
from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.contract.validate import fail
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import KernelConfig
from twin_attention.targets.target import SHARED_MEMORY_LIMIT

# Registers of a thread of a consumer and of the producer, by the number of consumer warpgroups.
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}
# Keys and values of heads that are worked on at the same time fit the L2 cache.
L2_BYTES = 32 * 2**20
# Time that a tile of queries takes beside its steps, in steps.
TILE_OVERHEAD = 1.5


def launch(
    name: str,
    kernel: Callable[..., None],
    operands: FlashOperands[Array],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    scratch: Callable[[Any, bool], dict[str, Any]],
    spec: AttentionSpec,
    backend: Backend,
) -> Any:
    """Call a kernel whose programs work on one tile of queries after the other.

    Args:
        name: the kernel's name in the configuration tables.
        kernel: the function over references to the operands, the schedule and the outputs, and
            keyword arguments.
        operands: inputs; for None the kernel gets None.
        out_shape: the outputs.
        scratch: what a program has in shared memory, from the configuration, and from whether the
            tiles of q and of the output share memory.
        spec: the problem, which chooses the configuration.
        backend: the target to compile for.

    Returns:
        The outputs.

    Raises:
        NotImplementedError: the configuration does not fit the device's shared memory.
    """
    config = backend.configs(spec)[name]
    shares_memory = _size(scratch(config, False)) > SHARED_MEMORY_LIMIT["sm90"]
    memory = scratch(config, shares_memory)
    check_memory(name, memory, config)
    arguments = flash_arguments(spec) | vars(config) | {"group_size": spec.group_size}
    schedule = make_schedule(spec, config.block_q, config.block_kv, num_sms(backend.target))
    inputs = [x for x in operands if x is not None]

    def body(*refs, **memory):
        rest = iter(refs)
        kernel(
            *(None if x is None else next(rest) for x in operands),
            *rest,
            shares_memory=shares_memory,
            **memory,
            **arguments,
        )

    return plgpu.kernel(
        body,
        out_type=tuple(out_shape),
        scratch_types=memory,
        grid=(schedule.shape[0],),
        grid_names=("program",),
        num_threads=config.num_warps // 4,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Every barrier is placed by hand.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )(*inputs, jnp.asarray(schedule))


def check_memory(name: str, memory: Any, config: KernelConfig) -> None:
    """Refuse what does not fit a program's shared memory.

    Args:
        name: the kernel's.
        memory: types of what a program has there.
        config: the kernel's configuration.

    Raises:
        NotImplementedError: the memory is too large.
    """
    limit = SHARED_MEMORY_LIMIT["sm90"]
    if _size(memory) > limit:
        expected = f"at most {limit} bytes of shared memory on sm90"
        fail(NotImplementedError, name, expected, f"{_size(memory)} with {config}")


def _size(memory: Any) -> int:
    """Return the bytes of what a program has in shared memory, without its barriers."""
    leaves = jax.tree.leaves(memory)
    return sum(
        np.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        for x in leaves
        if not isinstance(x, plgpu.Barrier)
    )


@cache
def make_schedule(spec: AttentionSpec, block_q: int, block_kv: int, most: int) -> np.ndarray:
    """Return which tiles of queries each program works on, in order.

    A tile goes to the program that is free first, the longest tiles first, for the heads whose keys
    and values fit the L2 cache together.

    Args:
        spec: the problem.
        block_q, block_kv: rows of a tile of q, and of k and v.
        most: programs at most.

    Returns:
        int32 [programs, 1 + most tiles]: the number of tiles, and their numbers; tile t of head h
        of batch element b has the number (b · heads + h) · tiles + t.
    """
    window = spec.bounded_window
    num_tiles = -(-spec.seq_q // block_q)
    costs = []
    for start in range(0, num_tiles * block_q, block_q):
        _, before, full, after = visible_tiles(
            start, spec.seq_q, spec.seq_kv, spec.diagonal, window.left, window.right, block_q,
            block_kv,
        )  # fmt: skip
        costs.append(max(before + full + after, 1) + TILE_OVERHEAD)
    heads = spec.batch * spec.heads_q
    together = 1
    if min(costs) < max(costs):
        bytes_of_head = spec.seq_kv * (spec.head_dim + spec.head_dim_v) * 2
        together = max(L2_BYTES // bytes_of_head, 1) * spec.group_size
    longest_first = sorted(range(num_tiles), key=lambda tile: (-costs[tile], -tile))
    order = [
        (head, tile)
        for first in range(0, heads, together)
        for tile in longest_first
        for head in range(first, min(first + together, heads))
    ]
    programs = min(len(order), most)
    free = [(0.0, program) for program in range(programs)]
    tiles: list[list[int]] = [[] for _ in range(programs)]
    for head, tile in order:
        time, program = heapq.heappop(free)
        tiles[program].append(head * num_tiles + tile)
        heapq.heappush(free, (time + costs[tile], program))
    schedule = np.zeros((programs, 1 + max(map(len, tiles))), np.int32)
    for program, own in enumerate(tiles):
        schedule[program, : 1 + len(own)] = len(own), *own
    return schedule
