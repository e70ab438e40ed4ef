from dataclasses import replace

import pytest

from tuning.static.bound import Tile, bound, count
from twin_attention.contract.paged_spec import DecodeSpec, PagedCache
from twin_attention.contract.spec import AttentionSpec
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
    ("kernel", "spec", "tile"),
    [
        # s = q·kᵀ and p·v, 2 operations a multiply-add; 64 rows of k (128) and v (64), 2 bytes each
        ("flash_fwd", FLASH, Tile(2 * 128 * 64 * (128 + 64), 128 * 64, 64 * 192 * 2, "L2")),
        # s, dp, dv, dk; 128 rows of q, dout and two float32
        ("flash_bwd_dkdv", FLASH,
         Tile(2 * 128 * 64 * 2 * (128 + 64), 128 * 64, 128 * (192 * 2 + 8), "L2")),
        # dout and out of 128 rows, three float32
        ("flash_bwd_preprocess", FLASH,
         Tile(2 * 128 * 64, 0, 128 * (2 * 64 * 2 + 12), "device memory")),
        # padding is multiplied but not loaded
        ("flash_fwd", replace(FLASH, head_dim=120, head_dim_v=56),
         Tile(2 * 128 * 64 * (128 + 64), 128 * 64, 64 * (120 + 56) * 2, "L2")),
        # 3 tokens of 8 heads a group are 32 rows; 64 keys and values of 128 bytes
        ("paged_decode", DECODE, Tile(2 * 32 * 64 * 256, 32 * 64, 64 * 256, "device memory")),
        # 64 parts of 128 float32 and their lse
        ("combine", DECODE, Tile(2 * 64 * 128, 64, 64 * 129 * 4, "L2")),
        # 128 heads of a key and a value, read in 2 bytes and written in 1
        ("append_kv", DECODE, Tile(0, 0, 128 * 256 * 3, "device memory")),
    ],
)  # fmt: skip
def test_tile(kernel, spec, tile):
    assert count(kernel, spec, config(kernel)) == tile


TF32 = replace(FLASH, dtype="float32", precision="tf32")


@pytest.mark.parametrize(
    ("kernel", "spec", "config", "target", "cycles", "limit"),
    [
        # 128·64·192 multiply-adds at 1024; 128·64 exponentials at 16; 24 KiB at 5120 / 108
        ("flash_fwd", FLASH, TILES, "sm80",
         {"tensor cores": 1536, "special functions": 512, "L2": 518.4}, "tensor cores"),
        # at 2048; at 16; at 5120 / 132
        ("flash_fwd", FLASH, TILES, "sm90",
         {"tensor cores": 768, "special functions": 512, "L2": 633.6}, "tensor cores"),
        ("flash_fwd", replace(FLASH, softcap=30.0), TILES, "sm90", {"special functions": 1536},
         "special functions"),
        ("flash_fwd", TF32, TILES, "sm80", {"tensor cores, TF32": 3072}, "tensor cores, TF32"),
        ("flash_fwd", replace(FLASH, dtype="float32"), TILES, "sm80",
         {"FMA units": 128 * 64 * 192 / 64}, "FMA units"),
        ("paged_decode", DECODE, CONFIGS[DecodeConfig], "sm80",
         {"device memory": 16384 * 108 / (2039 / 1.41), "tensor cores": 32 * 64 * 256 / 1024},
         "device memory"),
        ("paged_decode", DECODE, CONFIGS[DecodeConfig], "sm90",
         {"device memory": 16384 * 132 / (4800 / 1.83), "tensor cores": 32 * 64 * 256 / 2048},
         "device memory"),
    ],
)  # fmt: skip
def test_cycles_and_bound(kernel, spec, config, target, cycles, limit):
    found = bound(kernel, spec, config, target)
    if spec.softcap is not None:  # by a quotient of polynomials
        special = bound(kernel, spec, config, target, cap_functions=1).cycles["special functions"]
        assert special == 2 / 3 * cycles["special functions"]
    assert {name: found.cycles[name] for name in cycles} == pytest.approx(cycles)
    assert found.limit == limit
    assert found.intensity == found.tile.flops / found.tile.bytes
