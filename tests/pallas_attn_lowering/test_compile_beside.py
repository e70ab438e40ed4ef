"""Threads compile kernels in Mosaic GPU before XLA does, here for a card that is only described.

These tests guard what `pallas_attn.ahead` knows of JAX's CUDA plugin: how XLA passes it a kernel,
and that it keeps what it has compiled by the given hash.
"""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import jax
import pytest

from pallas_attn import flash_attention
from tuning.static import mosaic_aot
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.target import SHARED_MEMORY_LIMIT, use_target

SPEC = AttentionSpec(1, 300, 300, 4, 2, 64, 64, "bfloat16", 0.1)
if (reason := mosaic_aot.missing(SPEC, "sm90")) is not None:
    pytest.skip(reason, allow_module_level=True)

from pallas_attn import ahead  # noqa: E402
from pallas_attn.ahead import compile_beside  # noqa: E402

QKV = [jax.ShapeDtypeStruct((1, 300, heads, 64), "bfloat16") for heads in (4, 2, 2)]
FORWARD = partial(flash_attention, causal=True, implementation="mosaic")


def gradients(*qkv):
    out, pullback = jax.vjp(FORWARD, *qkv)
    return pullback(out)


@pytest.fixture
def noted(monkeypatch):
    """The kernels that a test's functions give to threads, which do not start."""
    kernels = []
    monkeypatch.setattr(ahead, "compiled_for", lambda: "a card")
    monkeypatch.setattr(ahead, "compile_beside", lambda kernel, device: kernels.append(kernel))
    return kernels


def lower(function):
    jax.clear_caches()
    with use_target("sm90"):
        return jax.jit(function).trace(*QKV).lower(lowering_platforms=("cuda",))


def test_every_kernel_of_a_program_is_noted(noted):
    text = lower(gradients).as_text()
    assert len(noted) == len({x.hash for x in noted}) == text.count("@mosaic_gpu_v2") > 1
    assert all(x.module.startswith(b"ML\xefR") for x in noted)  # MLIR's bytecode


def outcomes(*kernels):
    card = mosaic_aot.card_in_words("sm90", SHARED_MEMORY_LIMIT["sm90"])
    return [str(compile_beside(kernel, card).exception() or "") for kernel in kernels]


def test_xla_finds_what_a_thread_has_compiled(noted):
    """The plugin gets a module that it cannot compile, with the hash of a compiled one."""
    lower(FORWARD)
    (kernel,) = noted
    broken = kernel._replace(module=b"no module")
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        before, compiled, after = process.submit(outcomes, broken, kernel, broken).result(120)
    assert "Failed to parse" in before
    assert (compiled, after) == ("", "")
