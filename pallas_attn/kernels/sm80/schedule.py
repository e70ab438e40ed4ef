"""The order in which programs take tiles."""

import jax.numpy as jnp

from pallas_attn.targets import num_sms
from twin_attention.targets.sm80 import heads_together


def longest_first(program, num_tiles, num_heads, together):
    """Return the head and the tile of a program, for heads whose later tiles take longer.

    A GPU starts programs in order, each when another ends. Sections of `together` heads follow each
    other, and within a section the last tiles of all its heads come first. Tiles are counted from
    the grid's end, so that the last section is a whole one, see `heads_together`.
    """
    place = num_tiles * num_heads - 1 - program
    first = place // (together * num_tiles) * together
    heads = jnp.minimum(together, num_heads - first) if num_heads % together else together
    rest = place - first * num_tiles
    return first + rest % heads, rest // heads


def sections(spec, backend):
    """Return the heads of a section for `longest_first`, as a function of a head's tiles."""
    return lambda num_tiles: heads_together(spec, num_tiles, num_sms(backend.target))
