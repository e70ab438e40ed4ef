"""Mosaic GPU kernels traced and lowered for SM80, on any machine.

The last tests guard the private API of JAX that `lowering.py` and other files of
`pallas_attn/kernels/explicit` use, beyond the names in `pallas_attn/private.py`. When one fails
after an update of JAX, read in those files when its entry can go, and otherwise:

- `mpmd`: compare ``jax/_src/pallas/mpmd.py``, whose rule for CUDA `_lower` calls, and adapt that.
- `_infer_arch`: see ``jax/experimental/mosaic/gpu/utils.py`` for what names the architecture now.
- registers or transfers: compare ``jax/experimental/mosaic/gpu/fragmented_array.py``, and adapt
  `_units` (transfers), `as_left_operand`, `add_to_sums`, `rescale` and `_like` (registers).
"""

import inspect
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import flash_attention, flash_attention_varlen
from tests.pallas_attn_lowering import lowered
from tests.pallas_attn_lowering.lowered import batched, kernels, of, sharded_and_scanned
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import FAMILIES, Backend
from twin_attention.targets.target import use_target

SPEC = AttentionSpec(1, 300, 300, 4, 2, 128, 128, "bfloat16", 0.1)
FAMILY, *_ = FAMILIES["pallas_attn"]
REASON = FAMILY.supports("flash_fwd", SPEC, "sm80")
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)

import jax.experimental.mosaic.gpu.utils as mgpu_utils  # noqa: E402
from jax._src.pallas import mpmd  # noqa: E402
from jax.experimental.mosaic.gpu import fragmented_array  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from pallas_attn.kernels.explicit import lowering, mma_launch  # noqa: E402


def arrays(head_dim, seq_q=300, seq_kv=300, heads_kv=2, dtype="bfloat16"):
    shapes = (seq_q, 4), (seq_kv, heads_kv), (seq_kv, heads_kv)
    return [of(1, *shape, head_dim, dtype=dtype) for shape in shapes]


lower = partial(lowered.lower, "sm80")


def gradients(**options):
    attention = partial(flash_attention, implementation="mosaic", **options)

    def function(*qkv):
        out, pullback = jax.vjp(attention, *qkv)
        return pullback(out)

    return function


def trace(function, *operands):
    with use_target("sm80"):
        return jax.jit(function).trace(*operands)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 96, 128, 192, 256])
def test_every_row_is_traced(head_dim, deterministic):
    traced = trace(gradients(causal=True, deterministic=deterministic), *arrays(head_dim))
    backward = {"flash_bwd_dq", "flash_bwd_dkdv"}
    if not deterministic:
        backward = {"flash_bwd_fused", "flash_bwd_postprocess"}
    names = re.findall(r"\bname=(flash_(?:fwd|bwd)\w*)", str(traced.jaxpr))
    assert {*names} == {"flash_fwd", "flash_bwd_preprocess"} | backward


@pytest.mark.parametrize(
    ("operands", "options", "number"),
    [
        (arrays(64), {"causal": True, "deterministic": False}, 4),
        (arrays(96, seq_q=131, dtype="float16"), {"causal": True, "deterministic": True}, 4),
        (arrays(256, seq_kv=70), {"window_size": (30, 20), "softcap": 5.0}, 4),
    ],
)
def test_forward_and_backward_are_lowered(operands, options, number):
    text = lower(gradients(**options), *operands)
    assert kernels(text) == ["mosaic_gpu_v2"] * number


@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_sequences_are_lowered(deterministic):
    def function(*operands):
        options = {"causal": True, "deterministic": deterministic, "implementation": "mosaic"}
        attention = partial(flash_attention_varlen, **options)
        out, pullback = jax.vjp(lambda *qkv: attention(*qkv, *operands[3:]), *operands[:3])
        return pullback(out)

    tokens = [of(*x.shape[1:]) for x in arrays(64)]
    offsets = of(6, dtype="int32")
    text = lower(function, *tokens, offsets, offsets)
    assert kernels(text) == ["mosaic_gpu_v2"] * 4
    operands = batched((*tokens, offsets, offsets))
    assert kernels(lower(jax.vmap(function), *operands)) == kernels(text)


def test_sums_take_the_memory_of_the_preprocess():
    text = lower(gradients(deterministic=False), *arrays(64))
    assert text.count("output_operand_alias<") == 1


def test_no_axis_of_the_sums_takes_more_than_32_bits(monkeypatch):
    """A head of 2^31 elements: kernels count along an axis in 32 bits."""
    shapes = []

    def kernel(*args, out_type, **options):
        shapes.extend(x.shape for x in out_type)
        return lambda *operands: [jnp.zeros(x.shape, x.dtype) for x in out_type]

    monkeypatch.setattr(mma_launch.plgpu, "kernel", kernel)
    operands = [of(1, 2**24, 1, 128)] * 3
    with use_target("sm80"):
        jax.eval_shape(gradients(deterministic=False), *operands)
    assert (1, 1, 2**24, 128) in shapes
    assert max(map(max, shapes)) < 2**31


def test_under_vmap_and_checkpoint():
    def function(*qkv):
        attention = partial(flash_attention, implementation="mosaic", deterministic=False)
        total = jax.checkpoint(lambda *qkv: attention(*qkv).astype(jnp.float32).sum())
        return jax.vmap(jax.grad(total))(*qkv)

    assert kernels(lower(function, *batched(arrays(64)))) == ["mosaic_gpu_v2"] * 4


def test_under_shard_map_and_scan():
    sharded, scanned = sharded_and_scanned(partial(flash_attention, implementation="mosaic"))
    assert kernels(lower(sharded, *arrays(64))) == ["mosaic_gpu_v2"]
    assert kernels(lower(scanned, *batched(arrays(64)))) == ["mosaic_gpu_v2"]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_smaller_card_takes_a_row_that_fits(head_dim, monkeypatch):
    sizes, call = [], mma_launch.plgpu.kernel

    def kernel(*args, scratch_types, **options):
        sizes.append(sum(map(mma_launch._size, scratch_types)))
        return call(*args, scratch_types=scratch_types, **options)

    monkeypatch.setattr(mma_launch, "shared_memory", lambda target: 99 * 1024)
    monkeypatch.setattr(mma_launch.plgpu, "kernel", kernel)
    for deterministic in (False, True):
        trace(gradients(deterministic=deterministic), *arrays(head_dim))
    assert len(sizes) == 4 + 4
    assert max(sizes) <= 99 * 1024


def test_what_fits_no_row_is_refused(monkeypatch):
    monkeypatch.setattr(mma_launch, "shared_memory", lambda target: 1024)
    with pytest.raises(NotImplementedError, match=r"flash_fwd: expected at most 1024 bytes .*sm80"):
        trace(partial(flash_attention, implementation="mosaic"), *arrays(64))


def test_the_least_rows_are_lowered(monkeypatch):
    """The only ones that no card here takes."""
    monkeypatch.setattr(mma_launch, "shared_memory", lambda target: 99 * 1024)
    assert len(kernels(lower(gradients(deterministic=False), *arrays(256)))) == 4


def test_a_smaller_row_is_one_of_the_table():
    backend = Backend(FAMILY, "sm80")
    spec = replace(SPEC, head_dim=256, head_dim_v=256)
    own = backend.configs(spec)["flash_bwd_fused"]
    (smaller,) = backend.smaller_configs(spec, "flash_bwd_fused", own)
    assert (own.block_q, smaller.block_q) == (64, 32)


# ---- Guards of private API ----


def test_the_architecture_is_asked_for_while_lowering(monkeypatch):
    """Without it the code would be for the device here, or for none."""
    asked = []

    def infer():
        asked.append(lowering._infer_arch())
        return asked[-1]

    assert mgpu_utils._infer_arch is lowering._infer_arch
    monkeypatch.setattr(mgpu_utils, "_infer_arch", infer)
    lower(partial(flash_attention, implementation="mosaic"), *arrays(64))
    assert asked
    assert {*asked} == {(8, 0)}
    assert not lowering._lowers_sm80.get()


def test_mpmd_has_the_rules_that_are_called():
    """`_lower` takes their place and passes everything on, with aliases by position."""
    names = "interpret", "compiler_params", "input_output_aliases"
    rule = inspect.signature(mpmd._mpmd_map_fallback_lowering).parameters
    assert {*names} <= rule.keys()
    assert list(inspect.signature(mpmd._mpmd_map_mgpu_lowering).parameters) == [
        "ctx", "in_nodes", "params",
    ]  # fmt: skip
    assert mpmd.mpmd_map_p.name == "mpmd_map"


def test_registers_of_a_sum_and_of_a_left_operand():
    """[row tile, column tile, .., row half, ..] and [.., column half, row half, ..]."""
    bfloat16 = np.dtype("bfloat16")
    layouts = plgpu.Layout.MMA_ACC(bfloat16), plgpu.Layout.MMA_ACC(bfloat16, m_warps=2)
    sums, shared_rows = (layout.to_mgpu() for layout in layouts)
    left = plgpu.Layout.MMA_LHS(bfloat16).to_mgpu()
    assert sums.registers_shape((128, 64)) == (2, 8, 1, 1, 2, 1, 1, 1, 1)
    assert sums.registers_shape((64, 8)) == (1, 1, 1, 1, 2, 1, 1, 1, 1)
    assert shared_rows.registers_shape((128, 64)) == (4, 4, 1, 1, 2, 1, 1, 1, 1)
    assert left.registers_shape((128, 64)) == (2, 4, 1, 2, 2, 1, 1, 1, 1)
    array = inspect.signature(fragmented_array.FragmentedArray).parameters
    assert list(array) == ["_registers", "_layout", "_is_signed"]


def test_transfers_of_a_tile_are_yielded_one_by_one():
    """`_units` takes each thread's place from the layout and each transfer's from its index."""
    parameters = inspect.signature(fragmented_array.FragmentedArray.transfer_tiled).parameters
    assert list(parameters)[:5] == ["ref", "swizzle", "layout", "shape", "optimized"]
    layout = fragmented_array.tiled_copy_smem_gmem_layout(8, 2, 128, 16)
    assert layout.vector_length == 8
    assert len(layout.base_tile_shape) == 2
    for name in ("lane_indices", "warp_indices"):
        assert callable(getattr(layout, name))
    assert layout.tiling.tile_strides((1, 0))
