"""`jax.export` with symbolic sizes: plain JAX by name; kernels say what to do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_attn import flash_attention, flash_attention_varlen, paged_decode

OPTIONS = {"causal": True, "window_size": (8, 0), "softcap": 3.0}


def exported(function, *shapes):
    scope = export.SymbolicScope()
    types = (
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for shape, dtype in shapes
    )
    return export.export(jax.jit(function))(*types)


def test_batch_and_lengths_of_the_reference():
    def gradients(q, k, v, ids):
        def loss(*qkv):
            attend = partial(flash_attention, implementation="reference", **OPTIONS)
            return attend(*qkv, q_segment_ids=ids, kv_segment_ids=ids).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    keys, ids = ("b, s, 2, 16", "float32"), ("b, s", "int32")
    program = exported(gradients, ("b, s, 4, 16", "float32"), keys, keys, ids)
    for batch, length in ((1, 5), (2, 24)):
        q = jax.random.normal(jax.random.key(0), (batch, length, 4, 16))
        given = q, q[:, :, :2], q[:, :, 2:], jnp.zeros((batch, length), jnp.int32)
        for got, want in zip(program.call(*given), gradients(*given), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_packed_tokens_and_pages_of_the_reference():
    packed = lambda q, k, v, ends: flash_attention_varlen(  # noqa: E731
        q, k, v, ends, ends, implementation="reference", **OPTIONS
    )
    tokens, ends = ("t, 2, 16", "float32"), ("n + 1", "int32")
    assert exported(packed, tokens, tokens, tokens, ends).nr_devices == 1
    pool, tables = ("p, 16, 2, 16", "float16"), ("b, 8", "int32")
    decode = partial(paged_decode, implementation="reference")
    queries, lengths = ("b, 4, 16", "float16"), ("b", "int32")
    assert exported(decode, queries, pool, pool, tables, lengths).nr_devices == 1


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_kernels_ask_for_numbers(implementation):
    function = partial(flash_attention, implementation=implementation)
    message = "^q: expected numbers as sizes: export .*'reference'.*got .b, 8, 2, 16"
    with pytest.raises(NotImplementedError, match=message):
        exported(function, *[("b, 8, 2, 16", "float32")] * 3)
