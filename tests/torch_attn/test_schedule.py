"""`tests/pallas_attn/test_schedule.py` is the twin."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from torch_attn.interpreter import interpreted
from torch_attn.kernels.library.schedule import longest_first


@triton.jit
def places_kernel(places_ptr, num_tiles, together):
    head, tile = longest_first(num_tiles, together)
    tl.store(places_ptr + tl.program_id(0), head)
    tl.store(places_ptr + tl.num_programs(0) + tl.program_id(0), tile)


@pytest.mark.parametrize(("num_heads", "together"), [(6, 2), (7, 3), (2, 5), (1, 1), (4, 4)])
def test_each_tile_once_and_the_last_heads_together(num_heads, together):
    num_tiles = 4
    places = torch.full((2, num_tiles * num_heads), -1, dtype=torch.int32)
    interpreted(places_kernel)[(places.shape[1],)](places, num_tiles, together)
    heads, tiles = places.tolist()
    assert {*zip(heads, tiles, strict=True)} == {*np.ndindex(num_heads, num_tiles)}
    last = min(together, num_heads)
    one_by_one = [3, 2, 1, 0] * (num_heads - last)
    assert tiles == one_by_one + [tile for tile in (3, 2, 1, 0) for _ in range(last)]
