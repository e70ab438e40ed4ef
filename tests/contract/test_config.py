"""Tables of configurations: how they are read, and how a problem finds its row."""

from dataclasses import replace

import pytest

from interop.contract.config import KernelConfig, config_key, load_table, padded_head_dim
from interop.contract.spec import AttentionSpec

TABLE = """
[[flash_fwd]]
dtype_bits = 16
head_dim = 64
block_q = 128
block_kv = 64
num_warps = 4
num_stages = 3

[[flash_fwd]]
dtype_bits = 32
head_dim = 64
block_q = 64
block_kv = 32
num_warps = 8
num_stages = 2

[[flash_bwd_dq]]
dtype_bits = 16
head_dim = 16
block_q = 32
block_kv = 16
num_warps = 2
num_stages = 1
"""


def test_a_table_maps_kernel_and_key_to_configuration(tmp_path):
    path = tmp_path / "sm80.toml"
    path.write_text(TABLE)
    assert load_table(path) == {
        "flash_fwd": {
            (16, 64): KernelConfig(block_q=128, block_kv=64, num_warps=4, num_stages=3),
            (32, 64): KernelConfig(block_q=64, block_kv=32, num_warps=8, num_stages=2),
        },
        "flash_bwd_dq": {
            (16, 16): KernelConfig(block_q=32, block_kv=16, num_warps=2, num_stages=1)
        },
    }


@pytest.mark.parametrize("line", ["dtype_bits = 32\n", "block_q = 32\n"])
def test_a_row_that_lacks_a_field_is_an_error(tmp_path, line):
    path = tmp_path / "broken.toml"
    path.write_text(TABLE.replace(line, ""))
    with pytest.raises((KeyError, TypeError), match=line.split()[0]):
        load_table(path)


def test_a_misspelt_field_is_an_error(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text(TABLE.replace("num_warps", "num_warp"))
    with pytest.raises(TypeError, match="num_warp"):
        load_table(path)


@pytest.mark.parametrize(
    ("head_dim", "padded"),
    [
        (16, 16),
        (24, 32),
        (32, 32),
        (40, 64),
        (64, 64),
        (72, 128),
        (128, 128),
        (136, 256),
        (256, 256),
    ],
)
def test_padded_head_dim(head_dim, padded):
    assert padded_head_dim(head_dim) == padded


def test_config_key():
    spec = AttentionSpec(
        batch=1, seq_q=1, seq_kv=1, heads_q=1, heads_kv=1, head_dim=80, head_dim_v=24,
        dtype="bfloat16", scale=1.0,
    )  # fmt: skip
    assert config_key(spec) == (16, 128)
    assert config_key(replace(spec, dtype="float16", head_dim=24, head_dim_v=80)) == (16, 128)
    assert config_key(replace(spec, dtype="float32", head_dim=16)) == (32, 32)
