"""`tests/torch_attn/test_schedule.py` is the twin."""

import numpy as np
import pytest

from pallas_attn.kernels.library.schedule import longest_first


@pytest.mark.parametrize(("num_heads", "together"), [(6, 2), (7, 3), (2, 5), (1, 1), (4, 4)])
def test_each_tile_once_and_the_last_heads_together(num_heads, together):
    num_tiles = 4
    places = longest_first(np.arange(num_tiles * num_heads), num_tiles, num_heads, together)
    heads, tiles = (x.tolist() for x in places)
    assert {*zip(heads, tiles, strict=True)} == {*np.ndindex(num_heads, num_tiles)}
    last = min(together, num_heads)
    one_by_one = [3, 2, 1, 0] * (num_heads - last)
    assert tiles == one_by_one + [tile for tile in (3, 2, 1, 0) for _ in range(last)]
