from dataclasses import replace

import pytest

from twin_attention.interop.parity.cases import DecodeCase, PagedCase
from twin_attention.targets.kernels import DecodeConfig
from twin_attention.targets.splits import cascade_tile, choose_splits

CONFIG = DecodeConfig(max_rows=32, block_kv=64, num_warps=2, num_stages=3)


def decode(capacity, **changes):
    base = DecodeCase("splits", heads_q=32, heads_kv=32, head_dim=128, page_size=1, lengths=(1,))
    return replace(base, max_pages=capacity, **changes).spec


def test_splits_fill_the_sms_and_none_is_without_a_tile():
    assert choose_splits(decode(1 << 20), CONFIG, 132) == 12  # 3 programs of 32 heads each
    assert choose_splits(decode(1 << 20, head_dim=64), CONFIG, 132) == 24  # 6 of smaller heads
    assert choose_splits(decode(1 << 20, lengths=(1,) * 16), CONFIG, 132) == 1
    assert choose_splits(decode(512), CONFIG, 132) == 8  # a tile each
    assert choose_splits(decode(1024), CONFIG, 132) == 8  # two tiles each: 13 would leave 5 idle
    assert choose_splits(decode(1 << 20, num_splits=200), CONFIG, 132) == 200
    assert choose_splits(decode(1 << 20, heads_q=1, heads_kv=1), CONFIG, 132) == 256
    deep = replace(CONFIG, num_stages=5)
    assert choose_splits(decode(1 << 20), deep, 132) == 8  # 2 programs, each two tiles ahead
    many = {"tokens": 16, "heads_q": 128}
    rows = replace(deep, max_rows=64)
    assert choose_splits(decode(1 << 20, **many), rows, 132) == 4  # 1 program of many query rows
    assert choose_splits(decode(1 << 20, head_dim=64, **many), rows, 132) == 16


def test_chunks_are_split_until_each_sm_has_a_program():
    case = PagedCase(
        "splits", (9,), new_tokens=(512,), heads_q=32, heads_kv=8, head_dim=128, max_pages=2048
    )
    config = DecodeConfig(max_rows=128, block_kv=64, num_warps=8, num_stages=3)
    assert choose_splits(case.spec, config, 132) == 1  # 16 tiles of each kv head
    half = replace(case, new_tokens=(200,), padding=56)
    assert choose_splits(half.spec, config, 132) == 2
    single = replace(case, new_tokens=(1,))
    assert choose_splits(single.spec, CONFIG, 132) == choose_splits(
        single.spec.sequence(1), CONFIG, 132
    )


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 8),  # 64 rows
        ({"heads_q": 4}, 16), ({"heads_q": 32}, 4), ({"tokens": 4}, 8),
        ({"heads_q": 6, "lengths": (9,) * 2}, 2), ({"heads_q": 4, "lengths": (9,) * 6}, 8),
        ({"heads_q": 66}, None), ({"lengths": (9,)}, None), ({"lengths": (9,) * 1025}, None),
        ({"window_size": (5, None)}, None), ({"cascade": False}, None),
    ],
)  # fmt: skip
def test_the_shapes_say_how_many_sequences_share_a_tile(options, tokens):
    case = DecodeCase("", (9,) * 40, heads_q=16, heads_kv=2, cascade=True)
    tile = cascade_tile(replace(case, **options).spec)
    assert (None if tile is None else tile.tokens) == tokens
