"""Divide a program's work: the role of each warpgroup, tile after tile."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Registers a thread has in a consumer and in the producer, by the number of consumer warpgroups.
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}


def run_warpgroups(warpgroups, consume, *parts, alike=False):
    """Run consume(w) in each consumer, and `parts` in warps of the last one; alike: w is traced."""
    warpgroup = lax.axis_index("warpgroup")
    for_consumer, for_producer = REGISTERS[warpgroups]

    def run(w):
        plgpu.set_max_registers(for_consumer, action="increase")
        consume(w)

    if alike:
        pl.when(warpgroup < warpgroups)(lambda: run(warpgroup))
    else:
        for w in range(warpgroups):
            pl.when(warpgroup == w)(functools.partial(run, w))

    @pl.when(warpgroup == warpgroups)
    def _():
        plgpu.set_max_registers(for_producer, action="decrease")

        @plgpu.warp_map
        def _(warp):
            for i, part in enumerate(parts):
                pl.when(warp == i)(part)


def for_each_tile(schedule_ref, program, body):
    """Call body as `Queue.give` does for each tile of this program; return all its steps."""

    def visit(i, step):
        return body(schedule_ref[program, i], step, i - 1)

    return lax.fori_loop(1, schedule_ref[program, 0] + 1, visit, jnp.int32(0))
