"""The order in which programs take tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def longest_first(num_tiles, together):
    """Return the head and the tile of a program, for heads whose later tiles take longer.

    A GPU starts programs in order, each when another ends. Sections of `together` heads follow each
    other, and within a section the last tiles of all its heads come first. Tiles are counted from
    the grid's end, so that the last section is a whole one, see `heads_together`.
    """
    num_heads = gl.num_programs(0) // num_tiles
    place = gl.num_programs(0) - 1 - gl.program_id(0)
    section = place // (together * num_tiles)
    first = section * together
    heads = gl.minimum(together, num_heads - first)
    rest = place - first * num_tiles
    return first + rest % heads, rest // heads
