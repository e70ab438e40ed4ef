"""Barriers of a warpgroup, of a program, and between warpgroups.

Barrier 0 is the compiler's, 1 + w that of warpgroup w. These can go when plgpu has named barriers,
and barriers of one and of all warpgroups on SM80.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.registers import SCALAR
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils, nvvm

NAMED_BARRIERS = 16  # of a program


class Numbers(NamedTuple):
    """The first named barrier of each range of an SM90 kernel: one barrier for each consumer.

    At the single `exchange` all consumers meet; a consumer's part of dq is written, or is free.
    """

    turn: int
    exchange: int
    dq_written: int
    dq_free: int


def number_barriers(consumers: int) -> Numbers:
    counts = (consumers, 1, consumers, consumers)
    *starts, end = accumulate(counts, initial=consumers + 2)
    assert end <= NAMED_BARRIERS
    return Numbers(*starts)


def synchronize(text: str, operands: Sequence[Any] = ()) -> None:
    """Issue PTX with 32-bit operands; the clobber keeps LLVM from sinking loads below it."""
    constraints = ",".join(["r"] * len(operands) + ["~{memory}"])
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(operands), text, constraints, has_side_effects=True)


def synchronize_warpgroup() -> None:
    i32 = ir.IntegerType.get_signless(32)
    warpgroup = arith.shrui(mgpu_utils.thread_idx(), mgpu.c(7, i32))
    synchronize("bar.sync $0, 128;", [arith.addi(warpgroup, mgpu.c(1, i32))])


@plgpu.inline_mgpu()
def warpgroup_barrier(_):
    """Wait for this warpgroup's threads; their stores to shared memory are then visible."""
    synchronize_warpgroup()


def program_barrier(warpgroups: int) -> None:
    """Wait for the program's other threads: two thread counts on one barrier are illegal."""
    if warpgroups == 1:
        warpgroup_barrier()
        return

    @plgpu.inline_mgpu()
    def barrier(_):
        synchronize(f"bar.sync {warpgroups + 1}, {128 * warpgroups};")

    barrier()


def take_turn(warpgroup: int, warpgroups: int) -> None:
    named_barrier("sync", number_barriers(warpgroups).turn + warpgroup, 256)


def pass_turn(warpgroup: int, warpgroups: int) -> None:
    following = (warpgroup + 1) % warpgroups
    named_barrier("arrive", number_barriers(warpgroups).turn + following, 256)


def named_barrier(operation: str, number: Any, threads: int) -> None:
    """Arrive at a named barrier of `threads` threads; with "sync", not "arrive", wait too."""
    text = f"bar.{operation} $0, {threads};"

    @plgpu.inline_mgpu(arg_types=(SCALAR,))
    def barrier(_, n):
        synchronize(text, [n.registers.item()])

    barrier(jnp.int32(number))


def exchange_barrier(warpgroups: int) -> None:
    """Wait for the other consumers; their stores to shared memory are then visible."""
    named_barrier("sync", number_barriers(warpgroups).exchange, 128 * warpgroups)


@plgpu.inline_mgpu()
def fence_async(_):
    """Make this thread's stores to shared memory visible to wgmma and TMA, after a barrier."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
