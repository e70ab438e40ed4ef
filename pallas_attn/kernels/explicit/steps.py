"""The order in which a program visits the tiles of its steps."""

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.library.tiles import maximum


def count_steps(visible):
    """Return the number of masked steps, and of all; if no tile is seen, one masked step."""
    _begin, before, full, after = visible
    masked, steps = before + after, jnp.maximum(before + full + after, 1)
    is_static = isinstance(masked, int)
    return masked if is_static else jnp.where(full == 0, steps, masked), steps


def step_ranges(masked_steps, steps, first=0):
    """Return (masked, lower, upper) of the edge steps, and of the others, from `first` on."""
    if isinstance(masked_steps, int) and masked_steps == 0:
        return ((False, first, steps),)
    end_masked = maximum(masked_steps, first)
    return ((True, first, end_masked), (False, end_masked, steps))


def step_start(step, visible, block):
    """Return the first row of the tile of a step: masked ones, before and after, then full ones."""
    begin, before, full, after = visible
    masked = before + after
    tile = jnp.where(step < before, step, jnp.where(step < masked, step + full, step - after))
    return begin + lax.convert_element_type(tile, jnp.int32) * block


def tile_start(step, visible, block, last_start):
    """Return `step_start` within 0 .. last_start, as a program may see no tile but visit one."""
    return jnp.clip(step_start(step, visible, block), 0, last_start)
