from dataclasses import replace
from types import SimpleNamespace

import pytest

from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec, PagedCache
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, VarlenSpec
from twin_attention.interop.parity.cases import DecodeCase, FlashCase
from twin_attention.targets.conditions import CONDITIONS
from twin_attention.targets.config import (
    PACKAGES,
    compile_to_fit,
    current_configs,
    find_configs,
    load_table,
    parse_table,
    repeat_configs,
    requested_configs,
    table_path,
    use_configs,
)
from twin_attention.targets.family import FAMILIES, Backend, portable_backend
from twin_attention.targets.kernels import FAMILY_KERNELS, KERNELS, AppendConfig, FlashConfig
from twin_attention.targets.target import TARGETS

TABLE = """
[flash_fwd]
columns = ["dtype_bits", "head_dim", "when", "block_q", "block_kv", "num_warps", "num_stages"]
rows = [
  [16,  64, "softcap",  64, 64, 4, 3],  # Tuned by hand
  [16,  64, "",        128, 64, 4, 3],
  [32, 128, "",         64, 32, 8, 2],
]

[append_kv]
columns = ["block_heads", "num_warps"]
rows = [[16, 4]]
"""


def test_a_table_gives_each_kernel_its_rows_in_order():
    table = parse_table(TABLE)
    assert {kernel: [row.config for row in rows] for kernel, rows in table.items()} == {
        "flash_fwd": [
            FlashConfig(block_q=64, block_kv=64, num_warps=4, num_stages=3),
            FlashConfig(block_q=128, block_kv=64, num_warps=4, num_stages=3),
            FlashConfig(block_q=64, block_kv=32, num_warps=8, num_stages=2),
        ],
        "append_kv": [AppendConfig(block_heads=16, num_warps=4)],
    }
    assert table["flash_fwd"][0].key == (("dtype_bits", 16), ("head_dim", 64), ("when", "softcap"))
    assert table["append_kv"][0].key == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"num_warps", "num_stages"]', '"num_warps"]', "flash_fwd: expected columns"),
        ('"block_heads"', '"block_q"', "append_kv: expected columns"),
        ('"dtype_bits", "head_dim"', '"head_dim", "dtype_bits"', "flash_fwd: expected columns"),
        ("[[16, 4]]", "[[16]]", "append_kv: expected rows"),
        ('"softcap"', '"capped"', r"when: expected one of 'softcap', .*, got 'capped'"),
        ("[append_kv]", "[append]", "kernel: expected one of 'flash_fwd', .*, got 'append'"),
    ],
)
def test_a_wrong_table_is_an_error(old, new, message):
    assert old in TABLE
    with pytest.raises(ValueError, match=message):
        parse_table(TABLE.replace(old, new))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_kernel_has_a_table(package, target):
    assert list(load_table(table_path(package, target))) == list(KERNELS)


@pytest.mark.parametrize(
    "family",
    [
        family
        for families in FAMILIES.values()
        for family in families
        if family.folder not in ("paged", None)
    ],
    ids=lambda family: f"{family.package} {family.name} {family.folder}",
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_problem_of_a_family_has_a_row(family, deterministic):
    target = family.folder if family.folder in TARGETS else "sm80"
    path = table_path(family.package, target, family.folder)
    by_sums = family.folder == "sm80" and not deterministic
    backward = {"flash_bwd_fused"} if by_sums else {"flash_bwd_dq", "flash_bwd_dkdv"}
    products = {"flash_bwd_fused", "flash_bwd_dq", "flash_bwd_dkdv"}
    base = replace(SPEC, deterministic=deterministic)
    for head_dim in range(16, 257, 8):
        spec = replace(base, head_dim=head_dim, head_dim_v=272 - head_dim)
        configs = find_configs(path, spec, family.folder)
        assert "flash_fwd" in configs, head_dim
        assert configs.keys() <= {*FAMILY_KERNELS[family.folder]}, head_dim
        assert configs.keys() & products == backward, head_dim


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_every_paged_problem_has_a_row(dtype, target):
    path = table_path("pallas_attn", target, "paged")
    for head_dim in range(16, 257, 16):
        cache = PagedCache(3, 16, 4, 2, head_dim, 272 - head_dim, dtype)
        decode = DecodeSpec(2, 1, 4, cache, "float16", 0.1)
        for spec, kernel in (
            (decode, "paged_decode"),
            (AppendSpec(2, 1, cache, "float16"), "append_kv"),
            (decode.merge(3), "combine"),
        ):
            assert [*find_configs(path, spec, "paged")] == [kernel], head_dim


def test_a_family_with_one_backward_runs_it_for_both(tmp_path):
    rows = '"num_warps", "num_stages"]\nrows = [[64, 64, 4, 1]]\n'
    table = tmp_path / "sm80.toml"
    table.write_text(f'[flash_bwd_dq]\ncolumns = ["block_q", "block_kv", {rows}')
    for deterministic in (False, True):
        spec = replace(SPEC, deterministic=deterministic)
        assert [*find_configs(table, spec, "sm80")] == ["flash_bwd_dq"]


SPEC = AttentionSpec(
    batch=1, seq_q=1, seq_kv=1, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=24,
    dtype="bfloat16", scale=1.0,
)  # fmt: skip
ROWS = """
[flash_fwd]
columns = ["dtype_bits", "head_dim", "when", "block_q", "block_kv", "num_warps", "num_stages"]
rows = [
  [16,  64, "softcap", 1, 16, 4, 1],
  [16,  64,        "", 2, 16, 4, 1],
  [16, 128,        "", 3, 16, 4, 1],
  [32,  64,        "", 4, 16, 4, 1],
]

[paged_decode]
columns = ["head_dim", "when", "max_rows", "block_kv", "num_warps", "num_stages"]
rows = [
  [ 64, "> 32 rows and softcap", 1, 16, 4, 1],
  [ 64, "> 32 rows",             2, 16, 4, 1],
  [ 64, "softcap",               3, 16, 4, 1],
  [256, "",                      4, 16, 4, 1],
]

[combine]
columns = ["head_dim", "block_states", "num_warps", "num_stages"]
rows = [[32, 1, 4, 1], [256, 2, 4, 1]]
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "sm80.toml"
    path.write_text(ROWS)
    return path


def test_a_problem_takes_the_first_row_that_serves_it(path):
    def block_q(**changes):
        return find_configs(path, replace(SPEC, **changes))["flash_fwd"].block_q

    assert block_q() == 2
    assert block_q(softcap=1.0) == 1
    assert block_q(dtype="float16", head_dim=16, head_dim_v=40) == 2
    assert block_q(head_dim_v=80) == 3
    assert block_q(head_dim_v=80, softcap=1.0) == 3
    assert block_q(dtype="float32") == 4


def test_a_row_may_ask_for_several_conditions(path):
    def max_rows(**changes):
        case = replace(DecodeCase("rows", heads_q=8, heads_kv=1, head_dim=64), **changes)
        return find_configs(path, case.spec)["paged_decode"].max_rows

    assert max_rows(tokens=4) == 4
    assert max_rows(tokens=5) == 2
    assert max_rows(tokens=5, softcap=1.0) == 1
    assert max_rows(tokens=4, softcap=1.0) == 3
    assert max_rows(tokens=5, softcap=1.0, head_dim=128) == 4


def test_a_merge_goes_by_the_size_of_its_values(path):
    spec = DecodeCase("merge", head_dim=128, head_dim_v=32).spec.merge(2)
    assert find_configs(path, spec)["combine"].block_states == 1


def test_a_problem_without_a_row_is_named(path):
    with pytest.raises(LookupError, match=r"flash_fwd in .*: expected a row that serves"):
        find_configs(path, replace(SPEC, dtype="float32", head_dim=256))


def decode(capacity, **changes):
    base = DecodeCase("when", heads_q=32, heads_kv=32, head_dim=128, page_size=1, lengths=(1,))
    return replace(base, max_pages=capacity, **changes).spec


def conditions(spec):
    return {name for name, holds in CONDITIONS.items() if holds(spec)}


def test_few_keys():
    assert conditions(decode(256)) == {"<= 256 keys"}
    assert conditions(decode(256, lengths=(1,) * 3)) == {"<= 256 keys"}
    assert conditions(decode(1 << 20, window_size=(200, 0))) == {"<= 256 keys"}
    for other in (
        decode(257),
        decode(256, num_splits=1),  # bitwise the same whatever the tables' width
        decode(256, lengths=(1,) * 4),  # more programs than an A100 has SMs
    ):
        assert conditions(other) == set()


@pytest.mark.parametrize(
    ("sequences", "changes", "condition"),
    [
        (12, {}, None), (13, {}, "many programs"), (20, {}, "many programs"), (21, {}, None),
        (16, {"num_splits": 1}, None),  # bitwise the same whatever the batch
        (21, {"tokens": 16}, None), (21, {"tokens": 16, "heads_q": 64}, "many programs"),
        (12, {"tokens": 16, "heads_q": 64}, None), (16, {"tokens": 16, "heads_q": 96}, "> 32 rows"),
        (20, {"kv_dtype": "int8"}, None), (21, {"kv_dtype": "int8"}, "many programs"),
        (64, {"kv_dtype": "int8"}, "many programs"), (65, {"kv_dtype": "int8"}, None),
        (16, {"head_dim": 256}, "many programs"), (17, {"head_dim": 256}, None),
        (16, {"head_dim": 256, "tokens": 16, "heads_q": 64}, None),
        (12, {"head_dim": 256, "kv_dtype": "int8"}, None),
        (13, {"head_dim": 256, "kv_dtype": "int8"}, "many programs"),
    ],
)  # fmt: skip
def test_many_programs(sequences, changes, condition):
    spec = decode(4096, lengths=(1,) * sequences, **changes)
    assert conditions(spec) == ({condition} if condition else set())


SEES_640 = "sees 640 keys on average"


@pytest.mark.parametrize(
    ("tokens", "held"),
    [
        (4096, {">= 1024 keys", ">= 2048 keys", SEES_640}),
        (4095, {">= 1024 keys", SEES_640}),
        (2047, {SEES_640}),
        (1279, set()),
    ],
)
def test_packed_sequences_count_by_their_expected_length(tokens, held):
    spec = FlashCase("when", 1, tokens, tokens, 1, 1).spec
    spec = VarlenSpec(**vars(spec), num_sequences=3)
    assert conditions(spec) == {"packed"} | held


def test_keys_that_a_mask_hides_do_not_count():
    case = FlashCase("when", 1, 1280, 1280, 1, 1)
    assert SEES_640 in conditions(case.spec)
    assert SEES_640 in conditions(replace(case, causal=True).spec)
    assert SEES_640 not in conditions(replace(case, seq_q=1216, seq_kv=1216, causal=True).spec)
    assert SEES_640 not in conditions(replace(case, window_size=(512, 0)).spec)


FLASH = FlashCase("", seq_q=64, seq_kv=64, head_dim=64).spec


def test_numbers_are_changed_inside_the_block_only():
    before = current_configs("torch_attn", "sm80", FLASH)
    with use_configs({"flash_fwd": {"block_q": 16}}):
        for package in PACKAGES:
            inside = current_configs(package, "sm80", FLASH)
            assert inside["flash_fwd"].block_q == 16
        with use_configs({"flash_fwd": {"block_kv": 32}}, "torch_attn"):
            both = replace(before["flash_fwd"], block_q=16, block_kv=32)
            assert current_configs("torch_attn", "sm80", FLASH) == before | {"flash_fwd": both}
            assert current_configs("pallas_attn", "sm80", FLASH) == inside
            with use_configs({"flash_fwd": {"block_q": 64}}):
                assert current_configs("torch_attn", "sm80", FLASH)["flash_fwd"].block_q == 64
    assert current_configs("torch_attn", "sm80", FLASH) == before


def test_the_block_says_which_kernels_were_looked_up():
    with use_configs({}) as read:
        assert not read
        current_configs("torch_attn", "sm80", decode(256))
        assert read == {"paged_decode"}
        current_configs("torch_attn", "sm80", AppendSpec(2, 1, decode(256).cache, "float16"))
    current_configs("torch_attn", "sm80", FLASH)
    assert read == {"paged_decode", "append_kv"}


def test_changes_can_be_repeated_later():
    with use_configs({"flash_fwd": {"block_q": 16}}):
        changes = requested_configs()
    assert hash(changes) is not None
    with repeat_configs(changes):
        assert current_configs("torch_attn", "sm80", FLASH)["flash_fwd"].block_q == 16
        with repeat_configs(()):
            assert current_configs("torch_attn", "sm80", FLASH)["flash_fwd"].block_q != 16
    assert requested_configs() == ()


@pytest.mark.parametrize(
    ("configs", "package", "message"),
    [
        ({"flash": {}}, None, "kernel: expected one of 'flash_fwd', .*, got 'flash'"),
        (
            {"append_kv": {"block_q": 8}}, None,
            "field of append_kv: expected one of 'block_heads', 'num_warps', got 'block_q'",
        ),
        ({}, "jax", "package: expected None or one of 'torch_attn', 'pallas_attn', got 'jax'"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_an_error(configs, package, message):
    with pytest.raises(ValueError, match=message), use_configs(configs, package):
        pass


def test_a_kernel_that_does_not_fit_takes_the_next_configuration_that_does():
    sizes = {(64, 2): 300, (64, 1): 200, (32, 2): 150, (32, 1): 100, (16, 1): 50}

    def compile(config):
        shared = sizes[config.block_q, config.num_stages]
        return SimpleNamespace(metadata=SimpleNamespace(shared=shared))

    large, small, least = (
        FlashConfig(block_q=block_q, block_kv=32, num_warps=4, num_stages=num_stages)
        for block_q, num_stages in ((64, 2), (32, 2), (16, 1))
    )
    for limit, fits in (
        (300, large), (200, replace(large, num_stages=1)), (199, small),
        (100, replace(small, num_stages=1)), (50, least),
    ):  # fmt: skip
        fitted, _ = compile_to_fit("f", compile, large, "sm80", limit, lambda: (small, least))
        assert fitted == fits
    with pytest.raises(NotImplementedError, match=r"at most 49 bytes .* got 50 with .*block_q=16"):
        compile_to_fit("f", compile, large, "sm80", 49, lambda: (small, least))


def test_smaller_configurations_are_those_of_the_rows_after():
    gluon, *_ = FAMILIES["torch_attn"]
    backend = Backend(gluon, "sm80")
    spec = replace(SPEC, dtype="bfloat16", deterministic=False)
    own = backend.configs(spec)["flash_bwd_fused"]
    others = backend.smaller_configs(spec, "flash_bwd_fused", own)
    assert [config.block_q for config in others] == [64, 64, 64, 32]
    assert backend.smaller_configs(spec, "flash_bwd_fused", replace(own, num_warps=16)) == ()
    assert backend.smaller_configs(replace(spec, head_dim=256), "flash_fwd", own) == ()


@pytest.mark.parametrize(("head_dim", "precision"), [(64, "ieee"), (256, "ieee"), (256, "tf32")])
def test_a_smaller_card_takes_the_last_row_of_the_same_key(head_dim, precision):
    backend = portable_backend("pallas_attn", "sm80")
    dtype = "float32" if precision == "tf32" else "bfloat16"
    spec = replace(
        SPEC, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, precision=precision, softcap=None
    )
    own = backend.configs(spec)["flash_bwd_dq"]
    smaller = backend.config_of_smaller_cards(spec, "flash_bwd_dq", own)
    tiles = {(64, "ieee"): "64×64", (256, "ieee"): "32×32", (256, "tf32"): "16×16"}
    assert smaller.tile == tiles[head_dim, precision]
    assert (smaller == own) == (head_dim == 64)
    masked = BlockSparseSpec(**vars(spec), tile_q=16, tile_kv=16, mask_batch=1, mask_heads=1)
    own = backend.configs(masked)["flash_bwd_dq"]
    assert backend.config_of_smaller_cards(masked, "flash_bwd_dq", own).tile == "16×16"
    changed = replace(own, num_warps=16)
    assert backend.config_of_smaller_cards(masked, "flash_bwd_dq", changed) == changed
