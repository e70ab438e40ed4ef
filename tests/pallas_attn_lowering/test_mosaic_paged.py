import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import append_kv, merge_states, paged_decode
from pallas_attn.dispatch import choose
from tests.pallas_attn_lowering.lowered import kernels
from twin_attention.contract.paged_spec import AppendSpec
from twin_attention.contract.spec import MergeSpec
from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.targets.family import FAMILIES
from twin_attention.targets.target import TARGETS, use_target

*_, PAGED, PORTABLE, _ = FAMILIES["pallas_attn"]
CASE = DecodeCase("base", (100, 300), heads_q=8, page_size=16, max_pages=32, num_splits=3)
REASON = PAGED.supports("paged_decode", CASE.spec, "sm80")
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from pallas_attn.kernels.explicit import mma_launch  # noqa: E402

CASES = (
    CASE,
    replace(CASE, name="one-split", num_splits=1, dtype="float16"),
    replace(CASE, name="d128", head_dim=128, num_splits=None),
    replace(CASE, name="d96-dv72-page-7", head_dim=96, head_dim_v=72, page_size=7),
    replace(CASE, name="d256", head_dim=256),
    replace(CASE, name="64-rows", tokens=16),
    replace(CASE, name="int8", kv_dtype="int8"),
    replace(CASE, name="fp8-d256", kv_dtype="float8_e4m3fn", head_dim=256, scale_shape=(2,)),
    replace(
        CASE, name="all-options", tokens=3, sinks=True, window_size=(70, 0), softcap=5.0, scale=-0.3
    ),
    replace(
        CASE, name="int8-all-options", kv_dtype="int8", tokens=3, sinks=True, window_size=(70, 0),
        softcap=5.0, scale=-0.3,
    ),
)  # fmt: skip


def operands(case):
    spec, array = case.spec, jax.ShapeDtypeStruct
    cache = spec.cache
    shape = (cache.num_pages, cache.page_size, cache.heads)
    found = {
        "q": array((spec.batch, spec.tokens, spec.heads_q, spec.head_dim), spec.dtype),
        "k_pages": array((*shape, spec.head_dim), cache.dtype),
        "v_pages": array((*shape, spec.head_dim_v), cache.dtype),
        "block_tables": array((spec.batch, cache.max_pages), "int32"),
        "seq_lens": array((spec.batch,), "int32"),
    }
    if case.sinks:
        found["sinks"] = array((spec.heads_q,), "float32")
    if cache.is_quantized:
        found |= dict.fromkeys(("k_scale", "v_scale"), array(case.scale_shape, "float32"))
    return found


def new_tokens(case):
    spec, found = case.spec, operands(case)
    rows = found.pop("q").shape[:2]
    sizes = {"k_new": spec.head_dim, "v_new": spec.head_dim_v}
    return {
        name: jax.ShapeDtypeStruct((*rows, spec.heads_kv, size), spec.dtype)
        for name, size in sizes.items()
    } | found


def lower(function, **arguments):
    traced = jax.jit(lambda arguments: function(**arguments)).trace(arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def aliases(text):
    pattern = r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)"
    return [tuple(map(int, found)) for found in re.findall(pattern, text)]


def mosaic(function, **options):
    return partial(function, implementation="mosaic", **options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode_is_lowered(case, target):
    decode = mosaic(paged_decode, return_lse=True, **case.options)
    with use_target(target):
        found = kernels(lower(decode, **operands(case)))
    # The products, and the merge where there are splits.
    assert found == ["mosaic_gpu_v2"] * (1 if case.num_splits == 1 else 2)


def test_decode_in_64_bit_mode():
    with jax.enable_x64(True):
        found = kernels(lower(mosaic(paged_decode), **operands(CASES[0])))
    assert set(found) == {"mosaic_gpu_v2"}


def test_hopper_converts_float8_in_hardware():
    case = replace(CASE, kv_dtype="float8_e4m3fn")
    for target, expected in (("sm90", True), ("sm80", False)):
        with use_target(target):
            text = lower(mosaic(paged_decode), **operands(case))
        assert ("cvt.rn.f16x2.e4m3x2" in text) == expected


def test_copies_fetch_128_bytes_to_l2():
    case = replace(CASE, kv_dtype="int8", num_splits=1)
    with use_target("sm90"):
        text = lower(mosaic(paged_decode, num_splits=1), **operands(case))
    assert "cp.async.cg.shared.global.L2::128B" in text


def test_the_merge_writes_into_the_results_of_one_split():
    with use_target("sm90"):
        text = lower(mosaic(paged_decode), **operands(CASE))
    # After outs, lses and the lengths.
    assert aliases(text) == [(0, 3), (1, 4)]


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
def test_append_is_lowered_and_shares_the_memory_of_the_pools(kv_dtype):
    case = replace(CASE, kv_dtype=kv_dtype, tokens=3, scale_shape=(2,))
    with use_target("sm90"):
        text = lower(mosaic(append_kv), **new_tokens(case))
    assert kernels(text) == ["mosaic_gpu_v2"]
    first = 4 if kv_dtype is None else 6
    assert aliases(text) == [(0, first), (1, first + 1)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_merge_is_lowered(dtype):
    outs = jax.ShapeDtypeStruct((5, 2, 8, 72), dtype)
    lses = jax.ShapeDtypeStruct((5, 2, 8), "float32")
    with use_target("sm80"):
        text = lower(mosaic(merge_states), outs=outs, lses=lses)
    assert kernels(text) == ["mosaic_gpu_v2"]


def test_vmap_of_append_gives_each_its_own_pool():
    """The kernel would otherwise write one pool for all elements."""
    shapes = new_tokens(replace(CASE, tokens=1))
    shapes |= {
        x: jax.ShapeDtypeStruct((3, *shapes[x].shape), "bfloat16") for x in ("k_new", "v_new")
    }

    def mapped(k_new, v_new, **cache):
        return jax.vmap(lambda k, v: append_kv(k, v, **cache, implementation="mosaic"))(
            k_new, v_new
        )

    with use_target("sm90"):
        text = lower(mapped, **shapes)
    (call,) = re.findall(r"custom_call @mosaic_gpu_v2.*-> \((.*)\)", text)
    pool = "x".join(map(str, (3, *shapes["k_pages"].shape)))
    assert call.count(pool) == 2
    assert aliases(text) == [(0, 4), (1, 5)]


def test_under_scan():
    shapes = new_tokens(replace(CASE, tokens=1))
    q = operands(replace(CASE, tokens=1))["q"]

    append, decode = mosaic(append_kv), mosaic(paged_decode, num_splits=1)

    def loop(q, k_new, v_new, k_pages, v_pages, block_tables, seq_lens):
        def step(carry, _):
            pools, lengths = carry
            lengths = lengths + 1
            pools = append(k_new, v_new, *pools, block_tables, lengths)
            return (pools, lengths), decode(q, *pools, block_tables, lengths)

        return jax.lax.scan(step, ((k_pages, v_pages), seq_lens), length=4)

    with use_target("sm90"):
        assert kernels(lower(loop, q=q, **shapes)) == ["mosaic_gpu_v2"] * 2


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_merge_and_an_append_run_where_they_are_asked_for(kv_dtype, target):
    """A decode too where it is not faster: tests/targets/test_family.py."""
    spec = replace(CASE, kv_dtype=kv_dtype).spec
    merge = MergeSpec(2, 1, 1, 4, 64, "bfloat16")
    append = AppendSpec(spec.batch, 1, spec.cache, spec.dtype)
    for operation, problem in (("append_kv", append), ("combine", merge)):
        assert choose("mosaic", operation, target, problem)[0].family is PAGED
        assert choose(None, operation, target, problem)[0].family is PORTABLE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"packed": True}, "its kernels take no packed sequences"),
        ({"rotary_dim": 64}, "its kernels rotate nothing"),
    ],
)
def test_packed_and_rotated_tokens_are_refused(change, reason):
    append = AppendSpec(2, 1, CASE.spec.cache, CASE.dtype, **change)
    with pytest.raises(NotImplementedError, match=f"'mosaic': .*; {reason}$"):
        choose("mosaic", "append_kv", "sm90", append)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tree": "drafts"}, "its kernels take no trees"),
        ({"alibi": "heads"}, "its kernels take no alibi_slopes"),
        ({"latent": True}, "its kernels read and write a pool of values"),
        ({"cascade": True}, "its kernels read each sequence's pages"),
    ],
)
def test_trees_and_cascades_are_refused(change, reason):
    with pytest.raises(NotImplementedError, match=f"'mosaic': .*; {reason}$"):
        choose("mosaic", "paged_decode", "sm90", replace(CASE, **change).spec)


def test_what_16_bytes_do_not_divide_is_refused():
    case = replace(CASE, kv_dtype="int8", head_dim=72)
    message = "it has only flash attention and paged attention; its copies of 16 bytes take"
    with use_target("sm90"), pytest.raises(NotImplementedError, match=message):
        lower(mosaic(paged_decode), **operands(case))


def test_pools_of_2_31_keys_are_refused():
    """A lane tells the others the place of its key, below 0 for none."""
    most = 2**31 // CASE.spec.cache.page_size - 1
    for num_pages in (most, most + 1):
        cache = replace(CASE.spec.cache, num_pages=num_pages)
        refused = nullcontext()
        if num_pages > most:
            reason = "number the keys of a pool in 32 bits"
            refused = pytest.raises(NotImplementedError, match=f"'mosaic': .*; .* {reason}$")
        with refused:
            choose("mosaic", "paged_decode", "sm90", replace(CASE.spec, cache=cache))


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 192, 256])
def test_a_smaller_card_takes_a_row_that_fits(head_dim, kv_dtype, monkeypatch):
    sizes, call = [], mma_launch.plgpu.kernel

    def kernel(*args, scratch_types, **options):
        sizes.append(sum(map(mma_launch._size, scratch_types)))
        return call(*args, scratch_types=scratch_types, **options)

    case = replace(CASE, head_dim=head_dim, kv_dtype=kv_dtype, num_splits=1)
    monkeypatch.setattr(mma_launch, "shared_memory", lambda target: 99 * 1024)
    monkeypatch.setattr(mma_launch.plgpu, "kernel", kernel)
    with use_target("sm80"):
        lower(mosaic(paged_decode, num_splits=1), **operands(case))
    assert max(sizes) <= 99 * 1024


# ---- Guards of what `registers.py`, `memory.py` and `merge.py` take for granted ----


def test_registers_of_rows():
    """[row tile, .., row half, ..]: each warp has 16 rows of every 64."""
    rows = plgpu.Layout.MMA_ACC(np.dtype("bfloat16")).reduce(1).to_mgpu()
    assert rows.registers_shape((128,)) == (2, 1, 2, 1, 1)


def test_packed_pairs_lie_as_float16():
    layouts = [plgpu.Layout.MMA_RHS(jnp.dtype(x)).to_mgpu() for x in ("int16", "float16")]
    assert layouts[0] == layouts[1]
