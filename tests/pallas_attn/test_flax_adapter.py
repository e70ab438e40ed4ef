"""Flax's attention modules with `attention_fn`, against the modules' own attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from pallas_attn.adapters.flax import attention_fn

X = jax.random.normal(jax.random.key(0), (2, 12, 64))
IDS = jnp.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3])
PADDING = (IDS > 0)[:, None, None]
CAUSAL, DOCUMENTS = (
    linen.make_causal_mask(IDS), linen.make_attention_mask(IDS, IDS, jnp.equal),
)  # fmt: skip
OF_LINEN = {"num_heads": 4, "qkv_features": 64}


def of_nnx(**options):
    return nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0), **options)


def linen_module(x, mask, **options):
    module = linen.MultiHeadDotProductAttention(**OF_LINEN, **options)
    parameters = module.init(jax.random.key(1), X)
    return module.apply(parameters, x, mask=mask)


def nnx_module(x, mask, **options):
    return of_nnx(num_kv_heads=2, **options)(x, mask=mask)


@pytest.fixture(autouse=True)
def _exact_products():
    """A GPU's products of float32 are TF32 by default."""
    with jax.default_matmul_precision("highest"):
        yield


def assert_same(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "ours", "options"),
    [
        (None, None, {}),
        (CAUSAL, None, {"is_causal": True}),
        (PADDING, PADDING, {}),
        (DOCUMENTS, DOCUMENTS, {}),
        (DOCUMENTS, None, {"q_segment_ids": IDS, "kv_segment_ids": IDS}),
        (linen.combine_masks(CAUSAL, PADDING, DOCUMENTS), PADDING,
         {"is_causal": True, "q_segment_ids": IDS, "kv_segment_ids": IDS}),
        (linen.combine_masks(CAUSAL, PADDING), CAUSAL * PADDING, {"implementation": "triton"}),
    ],
    ids=["none", "causal", "padding", "documents", "ids", "all", "bias"],
)  # fmt: skip
def test_masks(mask, ours, options):
    """Rows that see no key differ, and count in no loss."""
    module = linen_module if options else nnx_module

    def loss(x, mask, **options):
        out = module(x, mask, **options)
        return jnp.sum(jnp.sin(out) * (IDS > 0)[:, :, None]), out

    function = attention_fn(**{"implementation": "reference"} | options)
    gradient = jax.jit(jax.grad(lambda x: loss(x, ours, attention_fn=function), has_aux=True))
    for got, want in zip(gradient(X), jax.grad(loss, has_aux=True)(X, mask), strict=True):
        assert_same(got[IDS > 0], want[IDS > 0])


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_cache(kind):
    """Token by token, each sees itself and those before."""
    function = attention_fn(is_causal=True, implementation="reference")
    if kind == "linen":
        module = linen.MultiHeadDotProductAttention(**OF_LINEN, attention_fn=function, decode=True)
        variables = module.init(jax.random.key(1), X)
        whole = linen_module(X, CAUSAL)
        for i in range(X.shape[1]):
            out, cache = module.apply(variables, X[:, i : i + 1], mutable=["cache"])
            variables |= cache
            assert_same(out, whole[:, i : i + 1])
        return
    module, whole = of_nnx(attention_fn=function), of_nnx()(X, mask=CAUSAL)
    module.init_cache(X.shape)
    for i in range(X.shape[1]):
        assert_same(module(X[:, i : i + 1], decode=True), whole[:, i : i + 1])


def test_dropout():
    function = attention_fn(implementation="reference")
    q = jnp.ones((3, 2, 16, 4, 16))  # two batch axes
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(3)}
    dropped = function(q, q, q, **options)
    assert (dropped == function(q, q, q, **options)).all()
    assert 0.7 < dropped.mean() < 1.3
    assert dropped.std() > 0.05
    assert_same(function(q, q, q, **options, deterministic=True), q)
    options = {"attention_fn": function, "dropout_rate": 0.5}
    for module in (linen_module, nnx_module):
        assert_same(module(X, None, **options, deterministic=True), module(X, None))
    assert not jnp.allclose(of_nnx(**options)(X, deterministic=False), of_nnx()(X))


def test_a_bias_without_batch_and_a_dtype():
    q = jax.random.normal(jax.random.key(4), (5, 4, 16), jnp.float16)
    bias = jax.random.normal(jax.random.key(5), (5, 5))
    got = attention_fn(implementation="reference")(q, q, q, bias=bias, dtype=jnp.float32)
    assert got.dtype == jnp.float32
    assert_same(got, linen.dot_product_attention(q, q, q, bias=bias, dtype=jnp.float32))


@pytest.mark.parametrize(
    ("call", "made", "error", "message"),
    [
        ({"module": 1}, {}, NotImplementedError, "^module: expected None, since no weights"),
        ({"qk_attn_weights_einsum": 1}, {}, NotImplementedError, "^qk_attn_weights_einsum: "),
        ({"dropout_rate": 0.5}, {}, ValueError, "^dropout_rng: expected a key"),
        ({"mask": jnp.ones((3, 1, 1, 5))}, {}, ValueError, r"^mask: expected batch axes"),
        ({"is_causal": True}, {}, ValueError, "^query: expected as many queries as keys with is_c"),
        ({}, {"window_size": (3, 0)}, ValueError, "with window_size, got 2 and 5"),
    ],
)
def test_refusals(call, made, error, message):
    q, k = jnp.ones((1, 2, 4, 16)), jnp.ones((1, 5, 4, 16))
    with pytest.raises(error, match=message):
        attention_fn(**made)(q, k, k, **call)
