"""Call a kernel that multiplies with wgmma."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.aliases import of_batch, zeros_of_batch
from pallas_attn.kernels.explicit.lowering import AliasingParams, compiler_params
from pallas_attn.switches import in_32_bits
from pallas_attn.targets import note_config
from pallas_attn.varying import unvarying
from twin_attention.contract.spec import AttentionSpec, ScoreRule, VarlenSpec, Window
from twin_attention.contract.validate.errors import fail
from twin_attention.targets.kernels import KernelConfig
from twin_attention.targets.target import SHARED_MEMORY_LIMIT


class Problem(NamedTuple):
    """Numbers of a flash attention problem that all its tiles share."""

    seq_q: int
    seq_kv: int
    window: Window
    rule: ScoreRule
    packed: bool
    block_q: int
    block_kv: int


def launch(
    name: str,
    kernel: Callable[..., None],
    operands: Sequence[Any],
    schedule: np.ndarray | int,
    out_shape: Sequence[Any],
    memory: dict[str, Any],
    spec: AttentionSpec,
    config: KernelConfig,
    num_sums: int = 0,
    aliased: Sequence[Array] = (),
    kernel_name: str | None = None,
    **arguments: Any,
) -> Any:
    """Call a kernel whose programs work on one tile after the other; return its outputs.

    Args:
        name: the kernel's name in the configuration tables.
        operands: inputs, which may be tuples, as may outputs; for None, here and below, the kernel
            gets None.
        schedule: the tiles of each program, see `make_schedule`; or the number of programs of a
            kernel that finds its tiles itself and gets None.
        num_sums: how many of the last outputs, sums and counters, are 0 when the kernel starts.
        aliased: arrays whose memory the outputs before these reuse.
        kernel_name: the kernel's name in the code, if it differs.
    """
    problem = Problem(
        spec.seq_q, spec.seq_kv, spec.bounded_window, spec.scores, isinstance(spec, VarlenSpec),
        config.block_q, config.block_kv,
    )  # fmt: skip
    programs, tiles = schedule, None
    if not isinstance(schedule, int):
        programs, tiles = schedule.shape[0], jnp.asarray(schedule)
    return launch_programs(
        name, kernel, programs, (*operands, tiles), out_shape, memory, config, num_sums, aliased,
        kernel_name, problem=problem, **arguments,
    )  # fmt: skip


def launch_programs(
    name: str,
    kernel: Callable[..., None],
    programs: int,
    operands: Sequence[Any],
    out_shape: Sequence[Any],
    memory: dict[str, Any],
    config: KernelConfig,
    num_sums: int = 0,
    aliased: Sequence[Array] = (),
    kernel_name: str | None = None,
    **arguments: Any,
) -> Any:
    """Call `programs` programs of a kernel for any problem, as `launch`."""
    check_memory(name, memory, config)
    note_config(name, config, kernel_name)
    inputs, outputs = jax.tree.leaves(operands), tuple(jax.tree.leaves(out_shape))
    places = jax.tree.structure((operands, out_shape))
    sums = [zeros_of_batch(x.shape, x.dtype)(*inputs) for x in outputs[len(outputs) - num_sums :]]
    in_place = [*of_batch(tuple(aliased), *inputs), *sums]

    def body(*refs, **memory):
        refs = refs[: len(inputs)] + refs[len(inputs) + len(in_place) :]
        operands, out = jax.tree.unflatten(places, refs)
        kernel(*operands, *out, **memory, **arguments)

    call = plgpu.kernel(
        in_32_bits(body),
        out_type=unvarying(outputs),
        scratch_types=memory,
        grid=(programs,),
        grid_names=("program",),
        num_threads=config.num_warps // 4,
        thread_name="warpgroup",
        kernel_name=kernel_name or name,
        compiler_params=compiler_params(AliasingParams, len(in_place)),
    )
    return call(*inputs, *in_place)


def check_memory(name: str, memory: Any, config: KernelConfig) -> None:
    limit = SHARED_MEMORY_LIMIT["sm90"]
    if size_of(memory) > limit:
        expected = f"at most {limit} bytes of shared memory on sm90"
        fail(NotImplementedError, name, expected, f"{size_of(memory)} with {config}")


def size_of(memory: Any) -> int:
    """Return the bytes of a program's shared memory, without its mbarriers."""
    leaves = jax.tree.leaves(memory)
    return sum(
        np.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        for x in leaves
        if not isinstance(x, plgpu.Barrier)
    )
