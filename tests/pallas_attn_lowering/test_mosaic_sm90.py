import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import (
    BlockMask,
    block_sparse_attention,
    flash_attention,
    flash_attention_varlen,
    paged_attention,
)
from tests.pallas_attn_lowering import lowered
from tests.pallas_attn_lowering.lowered import batched, kernels, of, sharded_and_scanned
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.targets.config import use_configs
from twin_attention.targets.family import FAMILIES
from twin_attention.targets.target import use_target

SPEC = AttentionSpec(1, 300, 300, 4, 2, 128, 128, "bfloat16", 0.1)
_, FAMILY, *_ = FAMILIES["pallas_attn"]
REASON = FAMILY.supports("flash_fwd", SPEC, "sm90")
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from pallas_attn.kernels.explicit import items, wgmma_launch, wgmma_scores  # noqa: E402
from pallas_attn.kernels.explicit.items import PACKED_HEADS, head_and_tile  # noqa: E402
from pallas_attn.kernels.explicit.schedule import TILE_OVERHEAD, make_schedule  # noqa: E402
from pallas_attn.kernels.explicit.tma import piece_widths  # noqa: E402
from pallas_attn.kernels.library.scores import attention_mask  # noqa: E402

attention = partial(flash_attention, implementation="mosaic")


def arrays(head_dim, head_dim_v=None, seq_q=300, seq_kv=300, dtype="bfloat16"):
    shapes = (seq_q, 4, head_dim), (seq_kv, 2, head_dim), (seq_kv, 2, head_dim_v or head_dim)
    return [of(1, *shape, dtype=dtype) for shape in shapes]


lower = partial(lowered.lower, "sm90")
SINKS = of(4, dtype="float32")


@pytest.mark.parametrize(
    ("operands", "options"),
    [
        (arrays(64), {"causal": True}),
        (arrays(96, 40, seq_q=131, dtype="float16"), {"return_lse": True}),
        (arrays(128, seq_q=304, seq_kv=304), {"softcap": 5.0}),
        (arrays(192), {"scale": -0.1}),
        (arrays(256, seq_kv=70), {"window_size": (30, 20)}),
        (arrays(256, seq_kv=1104), {"causal": True}),
        (arrays(240, seq_kv=1030), {"window_size": (30, 20)}),
    ],
)
def test_the_forward_is_lowered(operands, options):
    assert kernels(lower(partial(attention, **options), *operands)) == ["mosaic_gpu_v2"]


def chunks(page_size, heads_q, head_dim, head_dim_v, dtype="bfloat16"):
    pools = (20, page_size, 2, head_dim), (20, page_size, 2, head_dim_v)
    shapes = (300, heads_q, head_dim), *pools
    numbers = (of(*shape, dtype="int32") for shape in ((3, 8), (3,), (4,)))
    return [*(of(*shape, dtype=dtype) for shape in shapes), *numbers]


def check_everywhere(function, operands, number):
    """Under `vmap`, where numbers may have 64 bits; the tests of one problem have 32."""
    with jax.enable_x64(True):
        text = lower(jax.vmap(function), *batched(operands))
    assert kernels(text) == ["mosaic_gpu_v2"] * number


@pytest.mark.parametrize(
    ("operands", "options"),
    [
        (chunks(16, 8, 128, 128), {}),
        (chunks(128, 4, 64, 64, dtype="float16"), {"window_size": (90, 0), "softcap": 5.0}),
        (chunks(32, 128, 72, 48), {"return_lse": True}),
        (chunks(256, 16, 256, 128), {"scale": -0.1}),
    ],
)
def test_chunks_over_pages_are_lowered(operands, options):
    attend = partial(paged_attention, num_splits=1, implementation="mosaic", **options)
    sinks = of(operands[0].shape[1], dtype="float32")
    text = lower(lambda sinks, *x: attend(*x, sinks=sinks), sinks, *operands)
    assert kernels(text) == ["mosaic_gpu_v2"]


def test_chunks_over_pages_are_lowered_everywhere():
    attend = partial(paged_attention, num_splits=1, implementation="mosaic")
    check_everywhere(attend, chunks(16, 8, 128, 128), 1)


@pytest.mark.parametrize(
    ("head_dim", "options"), [(64, {}), (64, {"causal": True}), (256, {"window_size": (90, 20)})]
)
def test_a_block_mask_is_lowered(head_dim, options):
    counts, tiles = (of(*shape, dtype="int32") for shape in ((1, 4, 3), (1, 4, 3, 2)))
    sparse = partial(block_sparse_attention, implementation="mosaic", **options)
    text = lower(sparse, *arrays(head_dim), BlockMask(counts, tiles, counts, tiles))
    assert kernels(text) == ["mosaic_gpu_v2"]


def sequences(operands):
    offsets = of(6, dtype="int32")
    return [*(of(*x.shape[1:], dtype=x.dtype) for x in operands), offsets, offsets]


@pytest.mark.parametrize(
    ("operands", "options"),
    [
        (arrays(80), {"causal": True}),
        (arrays(96, 40, seq_q=131, dtype="float16"), {"return_lse": True}),
        (arrays(128, seq_kv=303), {"softcap": 5.0}),
        (arrays(72, 128), {"scale": -0.1}),
        (arrays(64, 112, seq_kv=70), {"window_size": (30, 20)}),
        (arrays(192, 128, seq_q=300), {"causal": True, "softcap": 5.0}),
        (arrays(256), {}),
    ],
)
def test_packed_sequences_are_lowered(operands, options):
    packed = partial(flash_attention_varlen, implementation="mosaic", **options)
    assert kernels(lower(packed, *sequences(operands))) == ["mosaic_gpu_v2"]


def test_packed_sequences_are_lowered_everywhere():
    packed = partial(flash_attention_varlen, implementation="mosaic")
    operands = sequences(arrays(128))
    check_everywhere(packed, operands, 1)
    text = lower(lambda sinks, *x: packed(*x, sinks=sinks), SINKS, *operands)
    assert kernels(text) == ["mosaic_gpu_v2"]


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 20])
@pytest.mark.parametrize("num_tiles", [2, 7, 30])
def test_items_are_the_tiles_of_a_few_heads_at_a_time(heads, num_tiles):
    item = jnp.arange(heads * num_tiles)
    head, tile = (np.asarray(x) for x in head_and_tile(item, heads, num_tiles))
    pairs = [*zip(head.tolist(), tile.tolist(), strict=True)]
    assert sorted(pairs) == [(head, tile) for head in range(heads) for tile in range(num_tiles)]
    parts = -(-heads // PACKED_HEADS)
    for part in np.split(np.arange(heads * num_tiles), np.flatnonzero(np.diff(tile) < 0) + 1):
        assert len({*head[part]}) <= -(-heads // parts)
        assert (np.diff(tile[part]) >= 0).all()


def places(monkeypatch, cu_seqlens, cu_seqlens_other, heads, last_first):
    num_rows, num_rows_other, block = 1300, 1500, 128
    taken = items.Items(
        *(jnp.asarray(x, jnp.int32) for x in (cu_seqlens, cu_seqlens_other)),
        num_rows, num_rows_other, heads, block, last_first,
    )  # fmt: skip
    num_items = heads * (num_rows // block + len(cu_seqlens))
    monkeypatch.setattr(items, "take_item", lambda counter: counter)
    found = jax.vmap(lambda item: items.take_place(item, taken))(jnp.arange(num_items + 3))
    found = items.Place(*map(np.asarray, found))
    assert (found.head[:num_items] >= 0).all()
    assert (found.head[num_items:] == -1).all()
    return items.Place(*(x[:num_items] for x in found))


@pytest.mark.parametrize("last_first", [False, True])
def test_items_have_each_row_of_each_head_once(last_first, monkeypatch):
    lengths = [(300, 340), (0, 90), (700, 650), (1, 200), (129, 0), (128, 128)]
    offsets = np.cumsum([(0, 0), *lengths], axis=0).T
    owner = np.full((3, 1300), -1)
    of_head = {head: [] for head in range(3)}
    for place in zip(*places(monkeypatch, *offsets, 3, last_first), strict=True):
        head, _tile, start, end, first_other, size_other, sequence = place
        if start < end:
            assert (owner[head, start : min(start + 128, end)] == -1).all()
            owner[head, start : min(start + 128, end)] = sequence
            of_head[head].append(start)
            others = (*(other for _, other in lengths), 0)[sequence]
            assert (first_other, size_other) == (offsets[1][sequence], others)
    want = np.repeat(np.arange(7), [*(own for own, _ in lengths), 1300 - offsets[0][-1]])
    np.testing.assert_array_equal(owner, np.broadcast_to(want, owner.shape))
    for starts in of_head.values():
        assert starts == sorted(starts, reverse=last_first)


@pytest.mark.parametrize(
    "bad", [[0, 500, -9, 30, 2], [2**31 - 1] * 5, [7, 6, -(2**31), 4, 3]], ids=str
)
def test_items_of_wrong_offsets_stay_inside_the_tensors(bad, monkeypatch):
    good = [0, 1, 2, 3, 4]
    for offsets in ((bad, good), (good, bad), (bad, bad)):
        place = places(monkeypatch, *offsets, 2, True)
        assert ((place.start >= 0) & (place.start <= place.end) & (place.end <= 1300)).all()
        assert ((place.first_other >= 0) & (place.size_other >= 0)).all()
        assert (place.first_other + place.size_other <= 1500).all()
        assert ((place.sequence >= 0) & (place.sequence <= 4)).all()


def packed_gradients(*operands, **options):

    def packed(q, k, v, *sinks):
        given = dict(zip(("sinks",), sinks, strict=False))
        return flash_attention_varlen(q, k, v, *operands[3:5], **given, **options)

    return gradients(packed, *operands[:3], *operands[5:])


@pytest.mark.parametrize(
    ("operands", "number", "options"),
    [
        (arrays(128, seq_q=4096, seq_kv=40960), 4, {"causal": True}),
        (arrays(80, 104, seq_q=131, seq_kv=6144, dtype="float16"), 4, {"window_size": (30, 20)}),
        (arrays(96, 40, seq_q=131, seq_kv=6144, dtype="float16"), 3, {"softcap": 5.0}),
        (arrays(72, 128, seq_kv=6143), 3, {"window_size": (30, 20)}),
        (arrays(128, 16, seq_kv=6144), 3, {"scale": -0.1, "deterministic": True}),
    ],
)
def test_the_backward_of_packed_sequences_is_lowered(operands, number, options):
    """dq has a kernel of its own, or of five sequences from 6144 keys on its sums."""
    function = partial(packed_gradients, implementation="mosaic", **options)
    assert kernels(lower(function, *sequences(operands))) == ["mosaic_gpu_v2"] * number


def test_the_backward_of_packed_sequences_is_lowered_everywhere():
    check_everywhere(packed_gradients, [*sequences(arrays(128)), SINKS], 3)


def test_the_backward_of_packed_large_heads_is_another_familys():
    operands = sequences(arrays(192))
    with use_target("sm90"):
        traced = jax.jit(packed_gradients).trace(*operands)
        names = {*re.findall(r"\bname=(flash_(?:fwd|bwd)\w*)", str(traced.jaxpr))}
        assert names == {"flash_fwd", "flash_bwd_preprocess", "flash_bwd_dq", "flash_bwd_dkdv"}
        with pytest.raises(
            NotImplementedError, match="packed sequences has head dimensions up to 128"
        ):
            jax.jit(partial(packed_gradients, implementation="mosaic")).trace(*operands)


def test_rows_of_packed_sequences_are_those_of_a_tile():
    operands = sequences(arrays(128))
    refused = pytest.raises(NotImplementedError, match="flash_bwd_dq: expected block_q=128, got")
    with use_configs({"flash_bwd_dq": {"block_q": 64, "num_warps": 8}}), refused:
        lower(partial(packed_gradients, implementation="mosaic"), *operands)


def test_the_forward_is_lowered_everywhere():
    check_everywhere(attention, arrays(64), 1)
    q, k, v = arrays(64)
    (qs,) = batched([q])
    assert kernels(lower(jax.vmap(attention, (0, None, None)), qs, k, v)) == ["mosaic_gpu_v2"]
    text = lower(lambda q, k, v, sinks: attention(q, k, v, sinks=sinks), q, k, v, SINKS)
    assert kernels(text) == ["mosaic_gpu_v2"]


@pytest.mark.parametrize(("block_q", "ping_pong"), [(64, 2), (128, 0), (128, 1), (192, 2)])
def test_every_number_of_warpgroups_is_lowered(block_q, ping_pong):
    config = {"block_q": block_q, "num_warps": block_q // 16 + 4, "ping_pong": ping_pong}
    with use_configs({"flash_fwd": config}):
        assert kernels(lower(attention, *arrays(64))) == ["mosaic_gpu_v2"]


def test_under_shard_map_and_scan():
    sharded, scanned = sharded_and_scanned(attention)
    assert kernels(lower(sharded, *arrays(64))) == ["mosaic_gpu_v2"]
    assert kernels(lower(scanned, *batched(arrays(64)))) == ["mosaic_gpu_v2"]


def gradients(attention, *qkv):
    out, pullback = jax.vjp(attention, *qkv)
    return pullback(out)


@pytest.mark.parametrize(
    ("operands", "number", "options"),
    [
        (arrays(64, 128, seq_kv=2049, dtype="float16"), 6, {"scale": -0.1}),
        (arrays(64, 48, seq_kv=2048), 6, {"causal": True, "softcap": 5.0}),
        (arrays(96, seq_kv=2050), 6, {"window_size": (30, 20), "softcap": 5.0}),
        (arrays(64, seq_kv=8192), 4, {}),
        (arrays(120, 104, seq_kv=8192), 6, {"window_size": (30, 20)}),
        (arrays(64, 128, seq_kv=16), 3, {}),
        (arrays(112, 120, 304, 304), 3, {"deterministic": True, "softcap": 5.0}),
        (arrays(72, 40, seq_q=131, dtype="float16"), 3, {"deterministic": True}),
    ],
)
def test_the_backward_is_lowered(operands, number, options):
    """dq has a kernel of its own, or from 2048 keys on its sums from the kernel of dk and dv.

    The former computes lse2 and delta as well. The sums have a preprocess, and a postprocess for
    each summed gradient: dk and dv too if they have few tiles of keys.
    """
    text = lower(partial(gradients, partial(attention, **options)), *operands)
    assert kernels(text) == ["mosaic_gpu_v2"] * number
    assert "stablehlo.reduce" not in text


@pytest.mark.parametrize(
    ("seq_kv", "programs", "sums"),
    [
        (2100, 17 * 4, [(1, 4, 384, 80), (1, 2, 2176, 80), (1, 2, 2176, 48)]),
        (8192, 64 * 2, [(1, 4, 384, 80)]),
    ],
)
def test_few_kv_heads_are_split(seq_kv, programs, sums, monkeypatch):
    """Few tiles of keys are shared: programs of one query head add up dk and dv."""
    made = {}

    def kernel(*args, out_type, kernel_name, grid, **options):
        made[kernel_name] = grid, out_type
        return lambda *operands: [jnp.zeros(x.shape, x.dtype) for x in out_type]

    monkeypatch.setattr(wgmma_launch.plgpu, "kernel", kernel)
    operands = arrays(72, 40, seq_kv=seq_kv)
    with use_target("sm90"):
        found = jax.eval_shape(partial(gradients, attention), *operands)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in operands]
    grid, outputs = made["flash_bwd_fused"]
    assert grid == (programs,)
    assert [x.shape for x in outputs if x.dtype == jnp.float32] == sums
    assert len(outputs) == 3


def test_no_axis_of_the_sums_takes_more_than_32_bits(monkeypatch):
    """A head of 2^31 elements: kernels count along an axis in 32 bits."""
    shapes = []

    def kernel(*args, out_type, **options):
        shapes.extend(x.shape for x in out_type)
        return lambda *operands: [jnp.zeros(x.shape, x.dtype) for x in out_type]

    monkeypatch.setattr(wgmma_launch.plgpu, "kernel", kernel)
    operands = [of(1, 2**24, 1, 128)] * 3
    with use_target("sm90"):
        jax.eval_shape(partial(gradients, attention), *operands)
    assert (1, 1, 2**24, 128) in shapes
    assert max(map(max, shapes)) < 2**31


@pytest.mark.parametrize(
    ("operands", "options"),
    [
        (arrays(256), {"causal": True}),
        (arrays(192, 128, seq_q=131, dtype="float16"), {"softcap": 5.0}),
        (arrays(72, 136, seq_kv=2100), {"window_size": (90, 20)}),
    ],
)
def test_the_backward_of_large_heads_is_lowered(operands, options):
    """dq, dk and dv have a kernel each, with any number of keys."""
    text = lower(partial(gradients, partial(attention, **options)), *operands)
    assert kernels(text) == ["mosaic_gpu_v2"] * 4


# What memory holds is padded to 16 elements; rows of the table end at 64, 128, 160, 192, 224, 256.
HEAD_DIMS = (16, 24, 64, 72, 96, 128, 136, 160, 192, 224, 248, 256)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size_of_the_backward_fits(head_dim, deterministic, monkeypatch):
    checked, check = [], wgmma_launch.check_memory
    monkeypatch.setattr(wgmma_launch, "check_memory", lambda *args: checked.append(args))

    def kernel(*args, out_type, **options):
        return lambda *operands: [jnp.zeros(x.shape, x.dtype) for x in out_type]

    monkeypatch.setattr(wgmma_launch.plgpu, "kernel", kernel)
    function = partial(gradients, partial(attention, deterministic=deterministic))
    with use_target("sm90"):
        largest = 128 if head_dim <= 128 else 256
        for sizes in ((head_dim,), (head_dim, largest), (largest, head_dim)):
            operands = arrays(*sizes, seq_kv=2048)
            jax.jit(function).trace(*operands)
    sums_dq = not deterministic and head_dim <= 128
    backward = ("flash_bwd_fused",) if sums_dq else ("flash_bwd_dq", "flash_bwd_dkdv")
    assert {name for name, *_ in checked} == {"flash_fwd", *backward}
    for arguments in checked:
        check(*arguments)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size_fits(head_dim, monkeypatch):
    sizes = []

    def kernel(*args, scratch_types, **options):
        sizes.append(wgmma_launch.size_of(scratch_types))
        raise NotImplementedError("stop")

    monkeypatch.setattr(wgmma_launch.plgpu, "kernel", kernel)
    for operands in (arrays(head_dim), arrays(head_dim, 256), arrays(256, head_dim)):
        with pytest.raises(NotImplementedError, match="stop"):
            lower(attention, *operands)
    assert max(sizes) <= 227 * 1024


def test_what_does_not_fit_is_refused():
    refused = pytest.raises(NotImplementedError, match="flash_fwd: expected at most 232448 bytes")
    with use_configs({"flash_fwd": {"num_stages": 9}}), refused:
        lower(attention, *arrays(128))
    refused = pytest.raises(NotImplementedError, match="flash_bwd_fused: expected at most 232448 b")
    with use_configs({"flash_bwd_fused": {"num_stages": 9}}), refused:
        lower(partial(gradients, attention), *arrays(128, seq_kv=2048))
    refused = pytest.raises(NotImplementedError, match="flash_bwd_fused: expected block_q=64, got ")
    with use_configs({"flash_bwd_fused": {"block_q": 128}}), refused:
        lower(partial(gradients, attention), *arrays(64, seq_kv=2048))


@pytest.mark.parametrize(
    ("size", "widths"), [(16, (16,)), (64, (64,)), (72, (64, 16)), (96, (64, 32)), (248, (64,) * 4)]
)
def test_pieces_hold_a_row(size, widths):
    assert piece_widths(size, False) == widths


def test_registers_of_a_sum():
    """`hide` takes a register's row tile, column tile and row half from its indices."""
    layout = plgpu.Layout.WGMMA.to_mgpu()
    assert layout.registers_shape((64, 128)) == (1, 16, 1, 1, 2, 1, 1, 1, 1)
    assert layout.registers_shape((64, 8)) == (1, 1, 1, 1, 2, 1, 1, 1, 1)
    assert layout.vector_length == 2


def hide(s, upper, lower):
    """`pallas_attn.kernels.explicit.wgmma_scores.hide`, without PTX."""
    column = np.arange(s.shape[1])
    first, place = column // 8 * 8, column % 8
    for bound, is_seen in ((upper, np.less_equal), (lower, np.greater_equal)):
        if bound is not None:
            s = np.where(is_seen(first, bound[:, place]), s, float("-inf"))
    return s


@pytest.mark.parametrize("end", [None, 230])
@pytest.mark.parametrize("window", [(None, 0), (None, 7), (9, 3), (20, None)])
def test_scores_are_hidden_by_two_bounds(window, end, monkeypatch):
    monkeypatch.setattr(wgmma_scores, "hide", hide)
    monkeypatch.setattr(
        wgmma_scores, "iota", lambda shape, axis, _: jax.lax.broadcasted_iota("int32", shape, axis)
    )
    s = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    position, start_kv = 180, 192
    queries, keys = position + np.arange(64)[:, None], start_kv + np.arange(64)[None, :]
    want = attention_mask(s, queries, keys, end, *window)
    assert np.isinf(want).any()
    assert np.isfinite(want).any()
    window = Window(*window)
    np.testing.assert_array_equal(wgmma_scores.hide_keys(s, position, start_kv, end, window), want)
    transposed = wgmma_scores.hide_queries(s.T, start_kv, position, end, window)
    np.testing.assert_array_equal(transposed, want.T)


@pytest.mark.parametrize("window", [Window(), Window(None, 0), Window(100, 20)])
@pytest.mark.parametrize(("batch", "seq_q", "seq_kv"), [(1, 300, 300), (3, 1, 500), (4, 999, 200)])
def test_a_schedule_has_each_tile_once(batch, seq_q, seq_kv, window):
    spec = AttentionSpec(batch, seq_q, seq_kv, 6, 2, 64, 64, "bfloat16", 0.1, window)
    schedule = make_schedule(spec, 128, 64, 10)
    tiles = -(-seq_q // 128) * 6 * batch
    assert schedule.dtype == np.int32
    assert len(schedule) == min(tiles, 10)
    assert (schedule[:, 0] > 0).all()
    assert sorted(tile for row in schedule for tile in row[1 : 1 + row[0]]) == [*range(tiles)]


# In the last two, one head or few would be left over if the others filled the L2 cache. What a tile
# takes outside its steps counts, as in the schedule.
@pytest.mark.parametrize(
    ("batch", "seq", "head_dim"), [(4, 4096, 128), (1, 12288, 128), (16, 1024, 96)]
)
def test_a_causal_schedule_is_balanced(batch, seq, head_dim):
    window, tiles = Window(None, 0), seq // 128
    spec = AttentionSpec(batch, seq, seq, 16, 16, head_dim, head_dim, "bfloat16", 0.1, window)
    steps = [sum(tile % tiles + 1 + TILE_OVERHEAD for tile in row[1 : 1 + row[0]])
             for row in make_schedule(spec, 128, 128, 132)]  # fmt: skip
    assert max(steps) < 1.03 * sum(steps) / len(steps)


def test_a_schedule_has_fewer_heads_together_where_each_visits_several():
    spec = AttentionSpec(4, 4096, 4096, 8, 8, 128, 128, "bfloat16", 0.1, Window(None, 0))
    heads = [
        len({tile // 32 for tile in make_schedule(spec, 128, 64, 132, members=members)[:, 1]})
        for members in (1, 4)
    ]
    assert heads == [16, 8]  # of tiles that programs begin with


@pytest.mark.parametrize(
    ("seq", "head_dim", "heads_kv"), [(512, 64, 8), (512, 256, 8), (512, 128, 2), (1024, 96, 8)]
)
def test_programs_begin_with_few_heads(seq, head_dim, heads_kv):
    spec = AttentionSpec(
        32, seq, seq, 8, heads_kv, head_dim, head_dim, "bfloat16", 0.1, Window(None, 0)
    )
    schedule, tiles = make_schedule(spec, 128, 128, 132), seq // 128
    assert len({tile // tiles for tile in schedule[:, 1]}) < 1.5 * 132 / tiles
    steps = [
        sum(tile % tiles + 1 + TILE_OVERHEAD for tile in row[1 : 1 + row[0]]) for row in schedule
    ]
    assert max(steps) < 1.04 * sum(steps) / len(steps)
