from heapq import heapreplace
from random import Random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pallas_attn.kernels.library import schedule
from torch_attn.interpreter import interpreted
from torch_attn.kernels.library.schedule import longest_first
from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window
from twin_attention.targets.schedule import heads_together, programs_of_sm

NUM_SMS = 132
CAUSAL = Window(None, 0)


def problem(batch, seq, heads, window=CAUSAL):
    return AttentionSpec(batch, seq, seq, heads, heads, 128, 128, "float16", 0.125, window)


def busy_share(costs, heads, together, num_programs):
    order = [*costs[::-1]] * (heads - together)
    order += [cost for cost in costs[::-1] for _ in range(together)]
    ends = [0] * num_programs
    for cost in order:
        heapreplace(ends, ends[0] + cost)
    return sum(order) / (num_programs * max(ends))


def steps(seq, block):
    """Return the costs of a causal head's tiles of 64 keys, with what a program takes."""
    return [(first + block) // 64 + 2 for first in range(0, seq, block)]


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(
    ("batch", "seq", "heads"), [(32, 512, 16), (4, 4096, 16), (3, 4096, 12), (1, 16384, 16)]
)
def test_causal_programs_end_together(batch, seq, heads, block):
    programs = programs_of_sm(block, 128) * NUM_SMS
    costs = steps(seq, block)
    together = heads_together(problem(batch, seq, heads), len(costs), programs)
    ordered, head_by_head = (
        busy_share(costs, batch * heads, x, programs) for x in (together, 1)
    )  # fmt: skip
    assert ordered > 0.93
    assert ordered > head_by_head + 0.005


@pytest.mark.parametrize("seed", range(4))
def test_programs_of_packed_sequences_end_together(seed):
    rng = Random(seed)
    lengths = [max(1, round(rng.lognormvariate(6.4, 1.0))) for _ in range(16)]
    seq, heads, programs = sum(lengths), 16, 2 * NUM_SMS
    base = problem(1, seq, heads)
    spec = VarlenSpec(**vars(base), num_sequences=len(lengths))
    costs = [cost for length in lengths for cost in steps(length, 64)]
    together = heads_together(spec, len(costs), programs)
    share = busy_share(costs, heads, together, programs)
    assert share > 0.95 > busy_share(costs, heads, 1, programs)


@pytest.mark.parametrize("window", [Window(), Window(100, None), Window(100, 0)])
def test_tiles_of_one_length_are_taken_head_by_head(window):
    assert heads_together(problem(4, 4096, 16, window), 32, 2 * NUM_SMS) == 1


@pytest.mark.parametrize(("batch", "heads", "num_tiles"), [(1, 2, 4), (1, 1, 1000)])
def test_no_more_heads_than_there_are(batch, heads, num_tiles):
    together = heads_together(problem(batch, 512, heads), num_tiles, 2 * NUM_SMS)
    assert together == min(heads, 4 * NUM_SMS // num_tiles or 1)


@pytest.mark.parametrize(
    ("block", "sizes", "programs"),
    [(64, (64,), 4), (64, (128,), 4), (128, (128,), 2), (128, (256,), 1), (128, (128, 128), 1),
     (16, (32,), 4), (64, (96,), 4)],
)  # fmt: skip
def test_an_sm_has_programs_whose_sums_fill_half_of_its_registers(block, sizes, programs):
    assert programs_of_sm(block, *sizes) == programs


@pytest.mark.parametrize(
    ("batch", "seq", "heads_kv", "block", "together"),
    [
        (4, 3000, 4, 64, 16), (2, 8192, 4, 64, 8), (4, 4096, 8, 128, 32), (4, 4096, 8, 64, 8),
        (2, 4096, 16, 128, 16), (4, 1024, 16, 64, 33),
    ],
)  # fmt: skip
def test_all_heads_whose_sums_exceed_the_cache_start_together(
    batch, seq, heads_kv, block, together
):
    heads_q = 32 if heads_kv == 8 else 16
    num_tiles, programs = -(-seq // block), 2 * NUM_SMS
    found = heads_together(problem(batch, seq, heads_q), num_tiles, programs, batch * heads_kv)
    assert found == together


@triton.jit
def places_kernel(places_ptr, num_tiles, together):
    head, tile = longest_first(num_tiles, together)
    tl.store(places_ptr + tl.program_id(0), head)
    tl.store(places_ptr + tl.num_programs(0) + tl.program_id(0), tile)


@pytest.mark.parametrize(("num_heads", "together"), [(6, 2), (4, 3), (2, 5), (1, 1), (4, 4)])
def test_each_tile_once_and_the_last_heads_together(num_heads, together):
    places = torch.full((2, 4 * num_heads), -1, dtype=torch.int32)
    interpreted(places_kernel)[(4 * num_heads,)](places, 4, together)
    of_jax = schedule.longest_first(np.arange(4 * num_heads), 4, num_heads, together)
    last = min(together, num_heads)
    expected = [3, 2, 1, 0] * (num_heads - last) + [x for x in (3, 2, 1, 0) for _ in range(last)]
    for heads, tiles in (places.tolist(), (x.tolist() for x in of_jax)):
        assert {*zip(heads, tiles, strict=True)} == {*np.ndindex(num_heads, 4)}
        assert tiles == expected
