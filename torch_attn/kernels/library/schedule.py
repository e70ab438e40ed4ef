"""The order in which programs take tiles."""

from typing import Any

import triton
import triton.language as tl

from torch_attn.launch import KernelCall
from torch_attn.targets import num_sms
from twin_attention.targets.schedule import heads_together


@triton.jit
def longest_first(num_tiles, together):
    """Return a program's head and tile, for heads whose later tiles take longer.

    GPUs start programs in order. One head follows another, last tile first. The last `together`
    heads (`heads_together`) are interleaved: the grid ends with the shortest tiles.
    """
    place = tl.num_programs(0) - 1 - tl.program_id(0)  # counted from the end
    together = tl.minimum(together, tl.num_programs(0) // num_tiles)
    is_last = place < together * num_tiles
    head = tl.where(is_last, place % together, place // num_tiles)
    tile = tl.where(is_last, place // together, place % num_tiles)
    return head, tile


def order_argument(
    call: KernelCall, num_tiles: int, programs_of_sm: int, summed_heads: int | None = None
) -> dict[str, Any]:
    """Return `together`, from the programs that an SM holds."""
    programs = programs_of_sm * num_sms(call.device, call.target)
    return {"together": heads_together(call.spec, num_tiles, programs, summed_heads)}
