"""The bound of a tile, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from tuning.static.bound import Tile, bound, count
from twin_attention.contract.spec import AttentionSpec, DecodeSpec, PagedCache
from twin_attention.targets.kernels import (
    KERNELS,
    AppendConfig,
    CombineConfig,
    DecodeConfig,
    FlashConfig,
    PreprocessConfig,
)

FLASH = AttentionSpec(
    batch=2, seq_q=1024, seq_kv=1024, heads_q=4, heads_kv=2,
    head_dim=128, head_dim_v=64, dtype="bfloat16", scale=0.1,
)  # fmt: skip
DECODE = DecodeSpec(
    batch=4, tokens=3, heads_q=16, dtype="float16", scale=0.1,
    cache=PagedCache(
        num_pages=256, page_size=16, max_pages=64, heads=2,
        head_dim=128, head_dim_v=128, dtype="int8",
    ),
)  # fmt: skip
TILES = FlashConfig(block_q=128, block_kv=64, num_warps=8, num_stages=3)
CONFIGS = {
    FlashConfig: TILES,
    PreprocessConfig: PreprocessConfig(block_q=128, num_warps=8),
    DecodeConfig: DecodeConfig(max_rows=128, block_kv=64, num_warps=8, num_stages=3),
    CombineConfig: CombineConfig(block_states=64, num_warps=8, num_stages=3),
    AppendConfig: AppendConfig(block_heads=128, num_warps=8),
}


def config(kernel):
    return CONFIGS[KERNELS[kernel].config]


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        # s = q·kᵀ and p·v, 2 operations a multiply-add; 64 rows of k (128) and v (64), 2 bytes each
        ("flash_fwd", Tile(2 * 128 * 64 * (128 + 64), 128 * 64, 64 * 192 * 2, "L2")),
        # s over D, dp over Dv, dq over D
        ("flash_bwd_dq", Tile(2 * 128 * 64 * (128 + 64 + 128), 128 * 64, 64 * 192 * 2, "L2")),
        # s, dp, dv, dk; 128 rows of q, dout and two float32
        (
            "flash_bwd_dkdv",
            Tile(2 * 128 * 64 * (128 + 64 + 64 + 128), 128 * 64, 128 * (192 * 2 + 8), "L2"),
        ),
        # dout and out of 128 rows, three float32
        (
            "flash_bwd_preprocess",
            Tile(2 * 128 * 64, 0, 128 * (2 * 64 * 2 + 12), "device memory"),
        ),
    ],
)
def test_tile_of_flash_attention(kernel, tile):
    assert count(kernel, FLASH, config(kernel)) == tile


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        # 3 tokens of 8 heads a group are 32 rows; 64 keys and values of 128 bytes
        ("paged_decode", Tile(2 * 32 * 64 * 256, 32 * 64, 64 * 256, "device memory")),
        # 64 parts of 128 float32 and their lse
        ("combine", Tile(2 * 64 * 128, 64, 64 * 129 * 4, "L2")),
        # 128 heads of a key and a value, read in 2 bytes and written in 1
        ("append_kv", Tile(0, 0, 128 * 256 * 3, "device memory")),
    ],
)
def test_tile_of_decode(kernel, tile):
    assert count(kernel, DECODE, config(kernel)) == tile


@pytest.mark.parametrize("cap_functions", [1, 2])
def test_a_softcap_takes_further_special_functions_a_score(cap_functions):
    plain, capped = (
        count("flash_fwd", replace(FLASH, softcap=cap), TILES, cap_functions=cap_functions)
        for cap in (None, 30.0)
    )
    assert capped == replace(plain, special=(1 + cap_functions) * plain.special)


def test_padding_is_multiplied_but_not_loaded():
    tile = count("flash_fwd", replace(FLASH, head_dim=120, head_dim_v=56), TILES)
    assert (tile.flops, tile.bytes) == (2 * 128 * 64 * (128 + 64), 64 * (120 + 56) * 2)


@pytest.mark.parametrize(
    ("target", "multiply", "special", "load", "limit"),
    [
        # 128·64·192 multiply-adds at 1024; 128·64 exponentials at 16; 24 KiB at 5120 / 108
        ("sm80", 1536, 512, 518.4, "tensor cores"),
        # at 2048; at 16; at 5120 / 132
        ("sm90", 768, 512, 633.6, "tensor cores"),
    ],
)
def test_cycles_and_bound(target, multiply, special, load, limit):
    found = bound("flash_fwd", FLASH, TILES, target)
    assert found.cycles == pytest.approx(
        {"tensor cores": multiply, "special functions": special, "L2": load}
    )
    assert found.limit == limit
    assert found.intensity == 128  # 2·128·64·192 operations, 64·192·2 bytes


def test_a_softcap_is_bound_by_special_functions():
    found = bound("flash_fwd", replace(FLASH, softcap=30.0), TILES, "sm90")
    assert (found.limit, found.cycles[found.limit]) == ("special functions", 1536)


def test_few_rows_are_bound_by_l2():
    found = bound("flash_fwd", FLASH, replace(TILES, block_q=64), "sm90")
    assert found.limit == "L2"
    assert found.cycles["tensor cores"] == 384


def test_tf32_is_multiplied_by_tensor_cores_at_half_the_rate():
    spec = replace(FLASH, dtype="float32", precision="tf32")
    cycles = bound("flash_fwd", spec, TILES, "sm80").cycles
    of_16_bits = bound("flash_fwd", FLASH, TILES, "sm80").cycles["tensor cores"]
    assert cycles["tensor cores, TF32"] == 2 * of_16_bits


def test_float32_is_multiplied_by_fma_units():
    found = bound("flash_fwd", replace(FLASH, dtype="float32"), TILES, "sm80")
    assert (found.limit, found.cycles[found.limit]) == ("FMA units", 128 * 64 * 192 / 64)


@pytest.mark.parametrize(
    ("target", "load"),
    [
        ("sm80", 16384 * 108 / (2039 / 1.41)),
        ("sm90", 16384 * 132 / (4800 / 1.83)),
    ],
)
def test_a_decode_is_bound_by_device_memory(target, load):
    found = bound("paged_decode", DECODE, config("paged_decode"), target)
    assert found.limit == "device memory"
    assert found.cycles["device memory"] == pytest.approx(load)
    assert found.cycles["tensor cores"] == 32 * 64 * 256 / {"sm80": 1024, "sm90": 2048}[target]
