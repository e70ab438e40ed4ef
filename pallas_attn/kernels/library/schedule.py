"""The order in which programs take tiles."""

import jax.numpy as jnp

from pallas_attn.integers import quotient, remainder
from pallas_attn.targets import num_sms
from twin_attention.targets.schedule import heads_together, programs_of_sm


def longest_first(program, num_tiles, num_heads, together):
    place = num_tiles * num_heads - 1 - program  # counted from the end
    if together >= num_heads:
        return remainder(place, num_heads), quotient(place, num_heads)
    is_last = place < together * num_tiles
    head = jnp.where(is_last, remainder(place, together), quotient(place, num_tiles))
    tile = jnp.where(is_last, quotient(place, together), remainder(place, num_tiles))
    return head, tile


def last_heads(spec, backend, programs, summed_heads=None):
    """Return `together` for `longest_first`, as a function of a head's number of tiles."""
    at_a_time = programs * num_sms(backend.target)
    return lambda num_tiles: heads_together(spec, num_tiles, at_a_time, summed_heads)


def order_programs(spec, backend, block, *sizes):
    """Return the order of `longest_first` for `launch`; block: the rows of a tile, by name."""

    def order(grid, config):
        num_tiles, heads, batch = grid
        programs = programs_of_sm(getattr(config, block), *sizes)
        together = last_heads(spec, backend, programs)(num_tiles)

        def place(program):
            index, tile = longest_first(program, num_tiles, heads * batch, together)
            return tile, remainder(index, heads), quotient(index, heads)

        return place

    return order
