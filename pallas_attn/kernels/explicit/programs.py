"""Divide a program's work: what each warpgroup does, tile after tile, step after step."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.library.tiles import maximum

# Registers of a thread of a consumer and of the producer, by the number of consumer warpgroups.
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}


def run_warpgroups(warpgroups, consume, *parts):
    """Run consume(w) in each consumer warpgroup, and each of `parts` in a warp of the last one."""
    warpgroup = lax.axis_index("warpgroup")
    for_consumer, for_producer = REGISTERS[warpgroups]
    for w in range(warpgroups):

        @pl.when(warpgroup == w)
        def _(w=w):
            plgpu.set_max_registers(for_consumer, action="increase")
            consume(w)

    @pl.when(warpgroup == warpgroups)
    def _():
        plgpu.set_max_registers(for_producer, action="decrease")

        @plgpu.warp_map
        def _(warp):
            for i, part in enumerate(parts):
                pl.when(warp == i)(part)


def for_each_tile(schedule_ref, program, body):
    """Call body(tile, steps before) for each tile of this program; return how many steps it has.

    body returns its steps and those before.
    """

    def visit(i, step):
        return body(schedule_ref[program, i], step)

    return lax.fori_loop(1, schedule_ref[program, 0] + 1, visit, jnp.int32(0))


def count_steps(before, full, after):
    """Return the number of masked steps, and of all: one, which hides all, where none is seen."""
    masked, steps = before + after, jnp.maximum(before + full + after, 1)
    is_static = isinstance(masked, int)
    return masked if is_static else jnp.where(full == 0, steps, masked), steps


def step_ranges(masked_steps, steps, first=0):
    """Return (masked, lower, upper) of the steps at edges, and of the others, from `first` on."""
    if isinstance(masked_steps, int) and masked_steps == 0:
        return ((False, first, steps),)
    end_masked = maximum(masked_steps, first)
    return ((True, first, end_masked), (False, end_masked, steps))


def step_start(step, begin, before, full, after, block):
    """Return the first row of the tile of a step: masked ones, before and after, then full ones."""
    masked = before + after
    tile = jnp.where(step < before, step, jnp.where(step < masked, step + full, step - after))
    return begin + lax.convert_element_type(tile, jnp.int32) * block


def tile_start(step, begin, before, full, after, block, last_start):
    """Return the first row of the tile of a step: masked ones, before and after, then full ones.

    A program that sees nothing visits one tile all the same, which exists.
    """
    masked = before + after
    tile = jnp.where(step < before, step, jnp.where(step < masked, step + full, step - after))
    start = begin + lax.convert_element_type(tile, jnp.int32) * block
    return jnp.clip(start, 0, last_start)
