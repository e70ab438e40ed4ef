"""Barriers: mbarriers, at which tiles arrive, and named barriers, at which warps meet.

mbarriers tell that a tile has arrived. Named barriers tell that it has been read: there a
warpgroup arrives in one instruction, where Gluon synchronizes it before it arrives at an mbarrier.
"""

from itertools import accumulate

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Triton 3.9 has another name for it than 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

NAMED_BARRIERS = 16  # of a program


def number_barriers(first: int, *counts: int) -> tuple[gl.constexpr, ...]:
    """Return the first number of each range of named barriers; ranges follow each other.

    Args:
        first: the first number that Triton leaves free.
        counts: how many barriers each range has.
    """
    *starts, end = accumulate(counts, initial=first)
    if end > NAMED_BARRIERS:
        raise ValueError(f"a program has {NAMED_BARRIERS} named barriers, not {end}")
    return tuple(map(gl.constexpr, starts))


# The named barriers of all SM90 kernels; a range has one for each consumer or for each stage.
# Where queries stay: a consumer has the turn; a tile of keys, and of values, has been read.
MAX_STAGES = gl.constexpr(3)
TURN, K_READ, V_READ = number_barriers(6, 3, MAX_STAGES.value, MAX_STAGES.value)
# Where keys stay: a tile of queries, and of dout, has been read. The kernels of large heads, which
# have three stages of dout, use no others.
MAX_Q_STAGES, MAX_DO_STAGES, MAX_LARGE_DO_STAGES = map(gl.constexpr, (3, 2, 3))
Q_READ, DO_READ = number_barriers(5, MAX_Q_STAGES.value, MAX_LARGE_DO_STAGES.value)
# Then: ds is written; each consumer's part of dq is written, and is free; the bias has been read.
# Triton reserves the first for a fifth partition, which has one warp and so never uses it.
_, _, DS_WRITTEN, DQ_WRITTEN, DQ_FREE, BIAS_READ = number_barriers(
    5, MAX_Q_STAGES.value, MAX_DO_STAGES.value, 1, 2, 2, 1
)
# Threads that meet at a barrier of a backward: those of both consumers and of the producer.
READERS = gl.constexpr(2 * 128 + 32)


@triton.constexpr_function
def _barrier_instruction(instruction, num_threads):
    return f"bar.{instruction} $1, {num_threads}; mov.u32 $0, 0;"


@gluon.jit
def _named_barrier(index, INSTRUCTION: gl.constexpr, NUM_THREADS: gl.constexpr):
    """Run an instruction on a named barrier, which Gluon does not offer."""
    gl.inline_asm_elementwise(
        _barrier_instruction(INSTRUCTION, NUM_THREADS), "=r,r,~{memory}", [index],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive(index, NUM_THREADS: gl.constexpr):
    """Arrive at a named barrier of NUM_THREADS threads without waiting."""
    _named_barrier(index, "arrive", NUM_THREADS)


@triton.constexpr_function
def _arrive_instructions(first, count, num_threads):
    code = "".join(
        f"setp.eq.u32 here, $1, {i}; @here bar.arrive {first + i}, {num_threads}; "
        for i in range(count)
    )
    return "{ .reg .pred here; " + code + "mov.u32 $0, 0; }"


@gluon.jit
def arrive_at_slot(slot, FIRST: gl.constexpr, COUNT: gl.constexpr, NUM_THREADS: gl.constexpr):
    """Arrive without waiting at the barrier of a slot; FIRST is that of the first of COUNT slots.

    Behind `fence_async_shared` a number must be a constant. A barrier reads one in a register late,
    and ptxas 12.8 may overwrite it before (`tuning/static/barriers.py`). Elsewhere `arrive` takes
    fewer instructions, with which forwards take 1 to 4 % less time.
    """
    gl.inline_asm_elementwise(
        _arrive_instructions(FIRST, COUNT, NUM_THREADS), "=r,r,~{memory}", [slot],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_all(index, NUM_THREADS: gl.constexpr):
    """Arrive at a named barrier of NUM_THREADS threads and wait for all of them."""
    _named_barrier(index, "sync", NUM_THREADS)


@gluon.jit
def take_turn(CONSUMER: gl.constexpr):
    """Wait until the previous consumer has passed the turn."""
    wait_for_all(TURN + CONSUMER, 256)


@gluon.jit
def pass_turn(CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    """Give the turn to the next consumer."""
    arrive(TURN + (CONSUMER + 1) % NUM_CONSUMERS, 256)


@gluon.jit
def wait_for_step(full, step):
    """Wait until a step's tile is full; there is an mbarrier for each slot, which take turns."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)


@gluon.jit
def meet_in_warp():
    """Wait for all threads of a partition of one warp."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r,~{memory}", [gl.program_id(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr):
    """Allocate mbarriers at which one thread arrives."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers
