"""Tables of configurations: how they are read, and how a problem finds its row."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from interop.parity.cases import DecodeCase
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import (
    KernelConfig,
    choose_splits,
    compile_to_fit,
    find_configs,
    load_table,
    padded_head_dim,
)

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


def decode(capacity, **changes):
    """A problem of one sequence, 32 kv heads."""
    base = DecodeCase("splits", heads_q=32, heads_kv=32, head_dim=128, page_size=1, lengths=(1,))
    return replace(base, max_pages=capacity, **changes).spec


def test_few_keys_are_not_split_and_have_a_row_of_their_own():
    config = KernelConfig(block_q=32, block_kv=64, num_warps=2, num_stages=3)
    assert choose_splits(decode(256), config, 132) == 1
    assert choose_splits(decode(257), config, 132) > 1
    assert decode(256).variant == "short"
    assert decode(256, lengths=(1,) * 3).variant == "short"
    for other in (
        decode(257),
        decode(256, num_splits=1),  # bitwise the same whatever the tables' width
        decode(256, lengths=(1,) * 4),  # more programs than an A100 has multiprocessors
    ):
        assert other.variant == ""
    assert decode(1 << 20, window_size=(200, 0)).variant == "short"


def test_splits_fill_the_multiprocessors_and_none_has_nothing_to_do():
    config = KernelConfig(block_q=32, block_kv=64, num_warps=2, num_stages=3)
    assert choose_splits(decode(1 << 20), config, 132) == 12  # 3 programs of 32 heads each
    assert choose_splits(decode(1 << 20, head_dim=64), config, 132) == 24  # 6 of smaller heads
    assert choose_splits(decode(1 << 20, lengths=(1,) * 16), config, 132) == 1
    assert choose_splits(decode(512), config, 132) == 8  # a tile each
    assert choose_splits(decode(1024), config, 132) == 8  # two tiles each: 13 would leave 5 idle
    assert choose_splits(decode(1 << 20, num_splits=200), config, 132) == 200
    assert choose_splits(decode(1 << 20, heads_q=1, heads_kv=1), config, 132) == 256
    deep = replace(config, num_stages=5)
    assert choose_splits(decode(1 << 20), deep, 132) == 8  # 2 programs, of two tiles on their way
    many = {"tokens": 16, "heads_q": 128}
    rows = replace(deep, block_q=64)
    assert choose_splits(decode(1 << 20, **many), rows, 132) == 4  # 1 program of many query rows
    assert choose_splits(decode(1 << 20, head_dim=64, **many), rows, 132) == 16


@pytest.mark.parametrize(
    ("sequences", "changes", "variant"),
    [
        (12, {}, ""),
        (13, {}, "crowded"),
        (20, {}, "crowded"),
        (21, {}, ""),
        (16, {"num_splits": 1}, ""),  # bitwise the same whatever the batch
        (21, {"tokens": 16}, ""),
        (21, {"tokens": 16, "heads_q": 64}, "crowded"),
        (12, {"tokens": 16, "heads_q": 64}, ""),
        (16, {"tokens": 16, "heads_q": 96}, "wide"),
        (20, {"kv_dtype": "int8"}, ""),
        (21, {"kv_dtype": "int8"}, "crowded"),
        (64, {"kv_dtype": "int8"}, "crowded"),
        (65, {"kv_dtype": "int8"}, ""),
        (16, {"head_dim": 256}, "crowded"),
        (17, {"head_dim": 256}, ""),
        (16, {"head_dim": 256, "tokens": 16, "heads_q": 64}, ""),
        (12, {"head_dim": 256, "kv_dtype": "int8"}, ""),
        (13, {"head_dim": 256, "kv_dtype": "int8"}, "crowded"),
    ],
)
def test_about_as_many_sequences_as_run_at_once_have_a_row_of_their_own(
    sequences, changes, variant
):
    assert decode(4096, lengths=(1,) * sequences, **changes).variant == variant


def compiled_by(shared_by_stages, limit):
    """What `compile_to_fit` chooses from a kernel that takes so much with so many stages."""
    config = KernelConfig(block_q=64, block_kv=32, num_warps=4, num_stages=3)

    def compile(config):
        shared = shared_by_stages[config.num_stages]
        return SimpleNamespace(metadata=SimpleNamespace(shared=shared))

    fitted, compiled = compile_to_fit("flash_fwd", compile, config, "sm90", limit)
    assert replace(fitted, num_stages=3) == config
    return fitted.num_stages, compiled.metadata.shared


def test_a_kernel_that_fits_is_compiled_as_configured():
    assert compiled_by({3: 100}, limit=100) == (3, 100)


def test_a_kernel_that_does_not_fit_gets_fewer_stages():
    assert compiled_by({3: 300, 2: 200, 1: 100}, limit=299) == (2, 200)
    assert compiled_by({3: 300, 2: 200, 1: 100}, limit=199) == (1, 100)


def test_a_kernel_that_fits_with_no_number_of_stages_is_refused():
    message = (
        "flash_fwd: expected at most 99 bytes of shared memory on sm90, got 100 with "
        "KernelConfig(block_q=64, block_kv=32, num_warps=4, num_stages=1)"
    )
    with pytest.raises(NotImplementedError) as error:
        compiled_by({3: 300, 2: 200, 1: 100}, limit=99)
    assert str(error.value) == message
