"""The order in which the backward's programs take their work items."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.launch import KernelCall, Prepared, flash_arguments
from torch_attn.targets import num_sms


@gluon.jit
def place(item, turn, alternate, num_tiles):
    """Return the head of a work item, and which of the head's tiles it is, the longest being 0.

    Programs take items at a constant distance. A program that got tiles of one length only would
    finish late or early, so every other head (`alternate` 0), or every other turn of the programs
    (1), goes through a head's tiles in reverse. The first is right where the distance is no
    multiple of a head's tiles.
    """
    index = item // num_tiles
    tile = item % num_tiles
    reverse = gl.where(alternate == 0, index, turn) & 1
    return index, gl.where(reverse == 1, num_tiles - 1 - tile, tile)


def persistent(call: KernelCall, tiles: int, items: int, arguments: dict[str, Any]) -> Prepared:
    """Return the grid of a kernel whose programs take work items in turn, and its arguments."""
    programs = min(items, num_sms(call.device, call.target))
    schedule = {"num_items": items, "alternate": int(programs % tiles == 0)}
    return (programs,), flash_arguments(call.spec) | schedule | arguments
