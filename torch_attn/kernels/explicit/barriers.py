"""mbarriers tell that a tile has arrived, named barriers that it has been read.

At a named barrier a warpgroup arrives in one instruction; before an mbarrier Gluon synchronizes it.
"""

from itertools import accumulate

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

barrier = getattr(gl, "barrier", None) or gl.thread_barrier

NAMED_BARRIERS = 16  # of a program


def number_barriers(first: int, *counts: int) -> tuple[gl.constexpr, ...]:
    """Return where ranges of `counts` barriers begin; Triton leaves those from `first` on free."""
    *starts, end = accumulate(counts, initial=first)
    if end > NAMED_BARRIERS:
        raise ValueError(f"a program has {NAMED_BARRIERS} named barriers, not {end}")
    return tuple(map(gl.constexpr, starts))


# Named barriers of the SM90 kernels, one for each consumer or stage.
# Where queries stay: a consumer has the turn; a tile of keys, and of values, has been read.
MAX_STAGES = gl.constexpr(3)
TURN, K_READ, V_READ = number_barriers(6, 3, MAX_STAGES.value, MAX_STAGES.value)
# Where keys stay: a tile of queries, and of dout, has been read. Large heads, with three stages
# of dout, use no others.
MAX_Q_STAGES, MAX_DO_STAGES, MAX_LARGE_DO_STAGES = map(gl.constexpr, (3, 2, 3))
Q_READ, DO_READ = number_barriers(5, MAX_Q_STAGES.value, MAX_LARGE_DO_STAGES.value)
# Then: ds is written; a consumer's part of dq is written, and is free; the bias has been read.
# Triton reserves the first for a fifth partition, which has one warp and never uses it.
_, _, DS_WRITTEN, DQ_WRITTEN, DQ_FREE, BIAS_READ = number_barriers(
    5, MAX_Q_STAGES.value, MAX_DO_STAGES.value, 1, 2, 2, 1
)
# Where a second consumer has some of the columns, with two stages at most: p is written, was read.
P_WRITTEN, P_READ = map(gl.constexpr, (11, 14))
# Where values are columns of keys, two stages of which have three parts: the first consumer has
# read the columns behind the values (there are no turns), and the first values; the second has
# read the other values.
REST_READ, FIRST_READ, OTHER_READ = TURN, K_READ, V_READ
# Both consumers of a backward and the producer.
READERS = gl.constexpr(2 * 128 + 32)


@triton.constexpr_function
def _barrier_instruction(instruction, num_threads):
    return f"bar.{instruction} $1, {num_threads}; mov.u32 $0, 0;"


@gluon.jit
def _named_barrier(index, INSTRUCTION: gl.constexpr, NUM_THREADS: gl.constexpr):
    gl.inline_asm_elementwise(
        _barrier_instruction(INSTRUCTION, NUM_THREADS), "=r,r,~{memory}", [index],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive(index, NUM_THREADS: gl.constexpr):
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
    """Arrive at the barrier of a slot; FIRST is that of the first of COUNT slots.

    Behind `fence_async_shared` a number must be a constant: a barrier reads a register late, and
    ptxas 12.8 may overwrite it before (`tuning/static/barriers.py`). Elsewhere `arrive` takes fewer
    instructions.
    """
    gl.inline_asm_elementwise(
        _arrive_instructions(FIRST, COUNT, NUM_THREADS), "=r,r,~{memory}", [slot],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_all(index, NUM_THREADS: gl.constexpr):
    _named_barrier(index, "sync", NUM_THREADS)


@gluon.jit
def take_turn(CONSUMER: gl.constexpr):
    wait_for_all(TURN + CONSUMER, 256)


@gluon.jit
def pass_turn(CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    arrive(TURN + (CONSUMER + 1) % NUM_CONSUMERS, 256)


@gluon.jit
def wait_for_step(full, step):
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)


@gluon.jit
def meet_in_warp():
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r,~{memory}", [gl.program_id(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers
