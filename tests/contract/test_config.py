"""Tables of configurations: how they are read, and how a problem finds its row."""

from dataclasses import replace

import pytest

from interop.contract.cases import DecodeCase
from interop.contract.config import KernelConfig, find_configs, load_table, padded_head_dim
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
            (16, 64, ""): KernelConfig(block_q=128, block_kv=64, num_warps=4, num_stages=3),
            (32, 64, ""): KernelConfig(block_q=64, block_kv=32, num_warps=8, num_stages=2),
        },
        "flash_bwd_dq": {
            (16, 16, ""): KernelConfig(block_q=32, block_kv=16, num_warps=2, num_stages=1)
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


SPEC = AttentionSpec(
    batch=1, seq_q=1, seq_kv=1, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=24,
    dtype="bfloat16", scale=1.0,
)  # fmt: skip
KERNEL = """
[[flash_fwd]]
dtype_bits = {bits}
head_dim = {head_dim}
{extra}
block_q = {block_q}
block_kv = 16
num_warps = 4
num_stages = 1
"""


def test_the_row_of_a_problem(tmp_path):
    path = tmp_path / "sm80.toml"
    rows = [(16, 64, "", 1), (16, 128, "", 2), (32, 64, "", 3), (16, 64, "softcap = true", 4)]
    path.write_text(
        "".join(
            KERNEL.format(bits=bits, head_dim=head_dim, extra=extra, block_q=block_q)
            for bits, head_dim, extra, block_q in rows
        )
    )

    def block_q(**changes):
        return find_configs(path, replace(SPEC, **changes))["flash_fwd"].block_q

    assert block_q() == 1
    assert block_q(dtype="float16", head_dim=40, head_dim_v=64) == 1
    assert block_q(head_dim_v=80) == 2
    assert block_q(head_dim_v=80, softcap=1.0) == 2
    assert block_q(dtype="float32") == 3
    assert block_q(softcap=1.0) == 4


def test_the_row_of_many_query_rows(tmp_path):
    path = tmp_path / "sm80.toml"
    rows = [(16, 64, "", 16), (16, 128, "", 32), (16, 64, "wide = true", 64)]
    path.write_text(
        "".join(
            KERNEL.replace("flash_fwd", "paged_decode").format(
                bits=bits, head_dim=head_dim, extra=extra, block_q=block_q
            )
            for bits, head_dim, extra, block_q in rows
        )
    )

    def block_q(**changes):
        case = replace(DecodeCase("rows", heads_q=8, heads_kv=1, head_dim=64), **changes)
        return find_configs(path, case.spec)["paged_decode"].block_q

    assert block_q(tokens=4) == 16
    assert block_q(tokens=5) == 64
    assert block_q(tokens=5, softcap=1.0) == 64
    assert block_q(tokens=5, head_dim=128) == 32
