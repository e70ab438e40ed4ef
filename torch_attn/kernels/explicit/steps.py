"""The order in which a work item's steps visit its tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.library.tiles import split_step


@gluon.jit
def step_start(
    step, begin, before, full, after, BLOCK: gl.constexpr, EDGES_LAST: gl.constexpr = False
):
    """Return the first row of the tile of a step: those at the edges first, then the full ones.

    EDGES_LAST: the full ones first. `begin` .. `after` are what `library.tiles.visible_tiles`
    returns.
    """
    if EDGES_LAST:
        edge = gl.where(step < before + full, step - full, step)
        tile = gl.where(step < full, step + before, edge)
    else:
        edge = gl.where(step < before, step, step + full)
        tile = gl.where(step < before + after, edge, step - after)
    return begin + tile * BLOCK


@gluon.jit
def group_step(step, begin, before, full, after, BLOCK: gl.constexpr, GROUP_SIZE: gl.constexpr):
    """Return the head of the group, and the first row of the tile, of a step over all its heads.

    The tiles at the edges of all heads go first, then the full ones.
    """
    edges = before + after
    is_edge = step < edges * GROUP_SIZE
    count = gl.where(is_edge, edges, full)
    member, index = split_step(
        gl.where(is_edge, step, step - edges * GROUP_SIZE), count, GROUP_SIZE
    )
    index = gl.where(is_edge, index, index + edges)
    return member, step_start(index, begin, before, full, after, BLOCK)
