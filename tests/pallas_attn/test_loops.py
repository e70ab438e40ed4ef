"""Kernels on slices of stacks, as in a loop over layers.

XLA may pass a kernel places in the stacks themselves (`pallas_attn/own_memory.py`).
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pallas_attn import append_kv, flash_attention, flash_attention_varlen, paged_decode
from tests.oracle import assert_within_budget
from tests.pallas_attn import test_decode as decoding
from tests.pallas_attn.test_decode import POOLS, assert_same, new_tokens, written
from tests.sides import IMPLEMENTATIONS, PallasSide, takes
from tests.without_lowering import name_of
from twin_attention.interop.parity.cases import AppendCase, FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs

ON_GPU = torch.cuda.is_available()
NAMES = (*IMPLEMENTATIONS, "gluon", "torch_triton") if ON_GPU else IMPLEMENTATIONS
DENSE = FlashCase("dense", batch=1, seq_q=32, seq_kv=32, heads_kv=1, dtype="float16", causal=True)
PACKED = VarlenCase("packed", lengths=((24, 24), (40, 40)), padding=(0, 0), dtype="float16")
FUNCTIONS = {DENSE: flash_attention} | ({PACKED: flash_attention_varlen} if ON_GPU else {})
APPEND = AppendCase("append", lengths=(8,), dtype="float16", head_dim=16)
CACHES = decoding.CASE, decoding.LATER


@pytest.fixture(params=dict.fromkeys(name_of("pallas_attn", x) for x in NAMES))
def kernels(request):
    return request.param


def need(kernels, *cases):
    for case in cases:
        if not takes(PallasSide("cpu"), kernels, case):
            pytest.skip(f"{kernels} has no kernels for {case.name}")


def stack(problems):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *problems)


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_stacked_results_and_gradients(kernels, case):
    need(kernels, case)
    problems = [make_inputs(replace(case, name=f"layer {i}"), "cpu") for i in range(3)]
    arrays = [{name: jnp.asarray(x.numpy()) for name, x in each.items()} for each in problems]
    options = {**case.options, "return_lse": True, "implementation": kernels}

    def layer(operands):
        gradients = [operands.pop(name) for name in ("dout", "dlse")]
        qkv = [operands.pop(name) for name in "qkv"]
        attention = partial(FUNCTIONS[case], **operands, **options)
        results, pullback = jax.vjp(attention, *qkv)
        return *results, *pullback(tuple(gradients))

    got = jax.jit(partial(jax.lax.map, layer))(stack(arrays))
    for i, problem in enumerate(problems):
        assert_within_budget([torch.from_numpy(np.array(x[i])) for x in got], problem, case.spec)


def test_a_scan_over_layers_with_pools(kernels):
    need(kernels, APPEND, *CACHES)
    caches = [[*decoding.operands(case).values()] for case in CACHES]
    layers = stack([(new_tokens(i), cache) for i, cache in enumerate(caches)])
    before = jax.tree.map(np.array, layers)

    def layer(_, given):
        new, (q, *cache) = given
        pools = append_kv(*new, *cache, implementation=kernels)
        decode = partial(paged_decode, **decoding.CASE.options, return_lse=True)
        return None, (pools, decode(q, *pools, *cache[2:], implementation=kernels))

    pools, results = jax.jit(lambda layers: jax.lax.scan(layer, None, layers)[1])(layers)
    for i, (case, (_, *cache)) in enumerate(zip(CACHES, caches, strict=True)):
        found = [x[i] for x in pools]
        assert_same(found, written(new_tokens(i), *cache))
        at_the_end = decoding.operands(case) | dict(zip(POOLS, found, strict=True))
        decoding.assert_right([x[i] for x in results], at_the_end, case.spec)
    jax.tree.map(np.testing.assert_array_equal, layers, before)


def test_a_layer_of_pools_that_are_kept(kernels):
    """Without a loop, the slice of an array that the caller keeps is not written."""
    need(kernels, APPEND)
    _, *cache = decoding.operands(CACHES[0]).values()
    stacks = [jnp.stack([x, x]) for x in cache[:2]]
    before = jax.tree.map(np.array, stacks)

    @jax.jit
    def append(new, stacks, others):
        return append_kv(*new, *(x[1] for x in stacks), *others, implementation=kernels)

    assert_same(append(new_tokens(), stacks, cache[2:]), written(new_tokens(), *cache))
    assert_same(stacks, before)


def test_a_layer_that_is_replaced_by_its_attention(kernels):
    """A kernel does not overwrite what its programs still read."""
    if kernels == "reference":
        pytest.skip("XLA may round its own operations differently in two programs")
    seq, heads = (4096, 16) if ON_GPU else (32, 1)  # more programs than run at a time
    case = FlashCase(
        "replaced", batch=1, seq_q=seq, seq_kv=seq, heads_q=heads, heads_kv=heads, dtype="float16"
    )
    need(kernels, case)
    attention = partial(flash_attention, implementation=kernels)
    layers = decoding.normal((2, 1, seq, heads, 64), jnp.float16, seed=0)

    def replace_layer(i, layers):
        x = jax.lax.dynamic_index_in_dim(layers, i, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(layers, attention(x, x, x), i, 0)

    got = jax.jit(lambda x: jax.lax.fori_loop(0, len(x), replace_layer, x))(layers)
    one = jax.jit(lambda x: attention(x, x, x))
    np.testing.assert_array_equal(got, [one(x) for x in layers])
