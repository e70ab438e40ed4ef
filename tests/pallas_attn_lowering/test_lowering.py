"""Pallas kernels compiled by the `triton` package, for the device's own target or another.

These tests guard the private API that `pallas_attn/lowering.py` (JAX, jaxlib) and
`pallas_attn/ttir.py` (Triton) use. When one fails after an update:

- of JAX: compare ``jax/_src/pallas/triton/pallas_call_registration.py``, whose lowering rule ours
  follows, and adapt `_lower`. If JAX has dropped its Triton lowering, as announced, pyproject
  names the last version that has it.
- of jaxlib: compare ``jaxlib/gpu/triton_kernels.cc``, which launches what `_lower` describes.
- of Triton: compare ``triton/compiler/compiler.py`` (`ASTSource`, `compile`) and adapt `ttir.py`.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxlib import gpu_triton

from pallas_attn import lowering
from pallas_attn.lowering import TritonCompilerParams, recording
from twin_attention.targets.kernels import FlashConfig

CONFIG = FlashConfig(block_q=64, block_kv=64, num_warps=4, num_stages=2)
SIZE = 256
A = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)
needs_plugin = pytest.mark.skipif(
    not hasattr(gpu_triton, "TritonKernel"), reason="jaxlib's CUDA plugin is not installed"
)


def matmul_kernel(a_ref, b_ref, c_ref):
    def step(index, acc):
        k = pl.ds(index * CONFIG.block_kv, CONFIG.block_kv)
        a, b = plt.load(a_ref.at[:, k]), plt.load(b_ref.at[k, :])
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)

    zeros = jnp.zeros(c_ref.shape, jnp.float32)
    c_ref[...] = lax.fori_loop(0, SIZE // CONFIG.block_kv, step, zeros)


def matmul(a, b, target, config=CONFIG, **options):
    block = config.block_q
    return pl.pallas_call(
        matmul_kernel,
        grid=(SIZE // block, SIZE // block),
        in_specs=[
            pl.BlockSpec((block, SIZE), lambda i, j: (i, 0)),
            pl.BlockSpec((SIZE, block), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32),
        compiler_params=TritonCompilerParams(config, target),
        name="matmul",
        **options,
    )(a, b)


def lower(target, config=CONFIG, **options):
    def run(a, b):
        return matmul(a, b, target, config, **options)

    return jax.jit(run).trace(A, A).lower(lowering_platforms=("cuda",))


class Gpu:
    def __init__(self, compute_capability, shared_memory=227 * 1024):
        self.compute_capability = compute_capability
        self.shared_memory_per_block_optin = shared_memory


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(lowering, "_device", lambda: Gpu("9.0"))


@pytest.mark.parametrize(("target", "instruction"), [("sm80", "mma.sync"), ("sm90", "wgmma")])
def test_recording_compiles_for_the_target(target, instruction):
    with recording() as kernels:
        lower(target)
    [(name, config, compiled)] = kernels
    assert (name, config) == ("matmul", CONFIG)
    assert f".target sm_{target[2:]}" in compiled.asm["ptx"]
    assert instruction in compiled.asm["ptx"]


def test_sm80_code_has_asynchronous_copies_and_no_wgmma():
    with recording() as kernels:
        lower("sm80")
    ptx = kernels[0][2].asm["ptx"]
    assert "cp.async" in ptx
    assert "wgmma" not in ptx


def test_triton_folds_a_sum_into_the_product():
    """Without the passes over Triton IR, each product is added to its accumulator by itself."""
    with recording() as kernels:
        lower("sm80")
    assert "arith.addf" not in kernels[0][2].asm["ttir"]


def test_kernel_takes_its_operands_and_the_two_pointers_that_jaxlib_adds():
    """jaxlib's launcher appends null pointers for Triton's global scratch and its profiler."""
    with recording() as kernels:
        lower("sm80")
    signature = re.search(r"\.entry \w+\((.*?)\)", kernels[0][2].asm["ptx"], re.DOTALL)
    assert signature[1].count(".param") == 3 + 2


def test_code_is_assembled_for_the_device_or_else_for_its_target():
    assert lowering._capability("sm80", None) == 80
    assert lowering._capability("sm80", Gpu("9.0")) == 90
    assert lowering._capability("sm80", Gpu("12.0")) == 120


@needs_plugin
def test_sm80_code_is_assembled_for_hopper_and_launched_by_jaxlib(on_hopper, monkeypatch):
    launched = []

    def kernel(*description):
        launched.append(description)
        return make_kernel(*description)

    make_kernel = gpu_triton.TritonKernel
    monkeypatch.setattr(gpu_triton, "TritonKernel", kernel)
    text = lower("sm80").as_text()
    assert "@triton_kernel_call_ffi" in text
    assert "__gpu$xla.gpu.triton" not in text
    [(name, num_warps, num_ctas, shared, ptx, _, capability)] = launched
    assert (num_warps, num_ctas, capability) == (CONFIG.num_warps, 1, 90)
    assert shared > 0
    assert f".entry {name}(" in ptx
    assert ".target sm_90a" in ptx
    assert "mma.sync" in ptx
    assert "wgmma" not in ptx


HUNGRY = FlashConfig(block_q=128, block_kv=64, num_warps=8, num_stages=8)


@pytest.mark.parametrize("limit", [163 * 1024, 99 * 1024])
def test_a_kernel_that_does_not_fit_gets_fewer_stages(limit):
    with recording() as as_configured:
        lower("sm80", HUNGRY)
    with recording(lambda kernel: {"matmul": limit}[kernel]) as fitted:
        lower("sm80", HUNGRY)
    [(_, config, compiled)] = as_configured
    assert (config, compiled.metadata.shared > 163 * 1024) == (HUNGRY, True)
    [(_, config, compiled)] = fitted
    assert 1 < config.num_stages < HUNGRY.num_stages
    assert compiled.metadata.shared <= limit


@pytest.mark.parametrize(
    ("target", "shared_memory", "limit"),
    [
        ("sm80", 227 * 1024, 163 * 1024),  # SM80 code on a Hopper card
        ("sm80", 99 * 1024, 99 * 1024),
        ("sm90", 227 * 1024, 227 * 1024),
    ],
)
def test_the_limit_is_the_targets_or_a_smaller_cards(target, shared_memory, limit):
    assert lowering._shared_memory(target, Gpu("9.0", shared_memory)) == limit


def test_what_fits_with_no_number_of_stages_is_refused(monkeypatch):
    monkeypatch.setattr(lowering, "_device", lambda: Gpu("8.6", 1024))
    with pytest.raises(NotImplementedError, match=r"matmul: expected at most 1024 bytes .*sm80"):
        lower("sm80")


def test_what_the_launch_cannot_carry_is_refused(on_hopper):
    with pytest.raises(NotImplementedError, match="metadata"):
        lower("sm80", metadata={"note": "for the profiler"})


def increment_kernel(x_ref, y_ref):
    y_ref[...] = x_ref[...] + 1


def increment(x, target):
    """In the memory of `x`."""
    return pl.pallas_call(
        increment_kernel,
        out_shape=x,
        input_output_aliases={0: 0},
        compiler_params=TritonCompilerParams(CONFIG, target),
        name="increment",
    )(x)


def test_an_operand_and_the_output_that_shares_its_memory_are_named_to_xla():
    x = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    run = jax.jit(lambda x: increment(x, "sm80"), donate_argnums=0)
    with recording() as kernels:
        text = run.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert [name for name, *_ in kernels] == ["increment"]
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 0" in text
    assert "tf.aliasing_output = 0" in text


@pytest.mark.parametrize("size", [2**31, 2**32 + SIZE, 2**31 + SIZE, 2**32])
def test_offsets_in_8_bits_that_the_lowering_would_get_wrong_are_refused(size):
    """When this fails because JAX counts such offsets right, drop the refusal."""
    x = jax.ShapeDtypeStruct((size,), jnp.int8)
    call = pl.pallas_call(
        increment_kernel,
        out_shape=x,
        grid=(2,),
        in_specs=[pl.BlockSpec((SIZE,), lambda i: (i,))],
        out_specs=pl.BlockSpec((SIZE,), lambda i: (i,)),
        compiler_params=TritonCompilerParams(CONFIG, "sm80"),
        name="increment",
    )
    with recording() as kernels:
        trace = jax.jit(call).trace(x)
        if size in (2**31, 2**32 + SIZE):
            trace.lower(lowering_platforms=("cuda",))
            assert ("i64" in kernels[0][2].asm["ttir"]) == (size > 2**32)
        else:
            with pytest.raises(NotImplementedError, match=r"increment: expected arrays in 8 bits"):
                trace.lower(lowering_platforms=("cuda",))


def test_missing_triton_is_named(on_hopper, monkeypatch):
    monkeypatch.delitem(sys.modules, "pallas_attn.ttir", raising=False)
    monkeypatch.delattr("pallas_attn.ttir", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'twin-attention\[triton"):
        lower("sm80")


def is_hopper():
    device = lowering._device()
    return device is not None and device.compute_capability == "9.0"


@pytest.mark.skipif(not is_hopper(), reason="runs SM80 and SM90 code on a Hopper GPU")
@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_result_on_a_hopper_gpu(target):
    a, b = jax.random.normal(jax.random.key(0), (2, *A.shape), A.dtype)
    run = jax.jit(lambda a, b: matmul(a, b, target)).lower(a, b).compile()
    assert "triton_kernel_call_ffi" in run.as_text()
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(run(a, b), expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(not is_hopper(), reason="runs SM80 and SM90 code on a Hopper GPU")
@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_a_donated_operand_is_written_in_place_on_a_hopper_gpu(target):
    x = jnp.arange(SIZE, dtype=jnp.float32)
    kept = np.asarray(increment(x, target) - x)
    where = x.unsafe_buffer_pointer()
    y = jax.jit(lambda x: increment(x, target), donate_argnums=0)(x)
    assert y.unsafe_buffer_pointer() == where
    assert x.is_deleted()
    np.testing.assert_array_equal(kept, np.ones(SIZE, np.float32))
    np.testing.assert_array_equal(y, np.arange(1, SIZE + 1))
