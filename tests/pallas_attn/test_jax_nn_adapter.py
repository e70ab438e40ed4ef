import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType

from pallas_attn.adapters.jax_nn import dot_product_attention
from twin_attention.contract.tolerances import compare_to_reference


def inputs(seq_q: int, seq_kv: int, dtype=jnp.bfloat16, batch: tuple[int, ...] = (2,)):
    keys = jax.random.split(jax.random.key(seq_q * 100 + seq_kv), 3)
    shapes = ((*batch, seq_q, 4, 16), *[(*batch, seq_kv, 2, 16)] * 2)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def assert_like_jax(function, operands, **options) -> None:
    """Gradients need float32: of rounded results, ours are further off, since delta reads out."""
    theirs, ours = (
        function(lambda *qkv, attention=attention: attention(*qkv, **options))
        for attention in (jax.nn.dot_product_attention, dot_product_attention)
    )
    with jax.default_matmul_precision("highest"):
        wanted = theirs(*(x.astype(jnp.float32) for x in operands))
        found = (ours(*operands), wanted, theirs(*operands))
    for (path, got), (_, ref), (_, lp) in zip(*map(jax.tree.leaves_with_path, found), strict=True):
        kind = "gradient" if "gradient" in str(path) else "output"
        assert (got.shape, got.dtype) == (lp.shape, lp.dtype)
        got, ref, lp = (torch.from_numpy(np.array(x, np.float64)) for x in (got, ref, lp))
        agreement = compare_to_reference(got, ref, lp, operands[0].dtype.name, kind)
        assert agreement.ok, agreement


def loss_of(out):
    return jnp.sum(out * jnp.sin(jnp.arange(out.size)).reshape(out.shape))


def with_gradients(attention):
    def loss(*qkv):
        found = attention(*qkv)
        return loss_of(found[0]), found

    def results(*qkv):
        gradients, found = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*qkv)
        return {"gradient": gradients, "output": found}

    return jax.jit(results)


def test_the_signature_is_that_of_jax_nn():
    ours, theirs = map(inspect.signature, (dot_product_attention, jax.nn.dot_product_attention))
    described = [(name, p.kind, p.default) for name, p in theirs.parameters.items()]
    assert [(name, p.kind, p.default) for name, p in ours.parameters.items()] == described


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(3, 7), (7, 3)])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, None), (True, (6, 1)), (False, 4), (False, (5, 9))]
)
def test_alignment(seq_q, seq_kv, causal, window):
    operands = inputs(seq_q, seq_kv)
    assert_like_jax(jax.jit, operands, is_causal=causal, local_window_size=window)


# From queries that see nothing at the end to none that sees anything.
WINDOWS = (1, 0), (1, 2), (-2, 9), (3, -1), (-9, 12), (-1, -1), (2, -3), -4


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "window", "causal"),
    [(*((9, 7), (5, 9))[i % 2], window, i % 4 < 2) for i, window in enumerate(WINDOWS)],
)
def test_a_window_without_a_key_for_some_queries(seq_q, seq_kv, window, causal):
    options = {"local_window_size": window, "is_causal": causal, "return_residual": True}
    assert_like_jax(with_gradients, inputs(seq_q, seq_kv, jnp.float32), **options)


@pytest.mark.parametrize(
    ("operands", "options"),
    [
        (inputs(5, 7), {"scale": 0.3}),
        (inputs(5, 7), {"return_residual": True}),
        (inputs(5, 7, batch=()), {"return_residual": True, "is_causal": True}),
        (inputs(5, 7), {"bias": None, "mask": None, "query_seq_lengths": None}),
    ],
    ids=["scale", "residual", "without batch", "absent arguments"],
)
def test_options(operands, options):
    assert_like_jax(jax.jit, operands, **options)


# All tokens and none, lengths past the range, and queries without a key.
LENGTHS_OF = {
    "query_seq_lengths": jnp.array([9, 3, 0, 5, 2, 50, -1], jnp.int32),
    "key_value_seq_lengths": jnp.array([7, 2, 5, 0, 6, 1, 70], jnp.int32),
}


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "causal", "window"),
    [
        (5, 9, True, (2, 0)), (9, 7, True, None), (9, 7, False, (-1, 3)), (5, 9, False, (2, -3)),
    ],
)  # fmt: skip
def test_lengths(seq_q, seq_kv, causal, window):
    options = {"is_causal": causal, "local_window_size": window, "return_residual": True}
    operands = inputs(seq_q, seq_kv, jnp.float32, batch=(7,))
    assert_like_jax(with_gradients, operands, **options, **LENGTHS_OF)


@pytest.mark.parametrize("name", LENGTHS_OF)
def test_lengths_of_one_side(name):
    options = {name: LENGTHS_OF[name], "is_causal": True, "return_residual": True}
    assert_like_jax(jax.jit, inputs(5, 9, batch=(7,)), **options)


def test_lengths_in_the_kernels():
    operands = inputs(9, 7, batch=(7,))
    lengths, names = LENGTHS_OF.values(), [*LENGTHS_OF]
    attend = jax.jit(
        lambda implementation, qkv, *given: dot_product_attention(
            *qkv, implementation=implementation, **dict(zip(names, given, strict=True))
        ),
        static_argnums=0,
    )
    got, want = (attend(name, operands, *lengths) for name in ("triton", "reference"))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=0.02)


@pytest.mark.parametrize("shape", [(2, 4, 9, 7), (1, 4, 9, 7), (2, 1, 1, 7)])
def test_bias(shape):
    """Queries past the last key are cut off."""
    bias = jax.random.normal(jax.random.key(1), shape)

    def gradient(attention):
        def loss(bias, *qkv):
            return loss_of(attention(*qkv, bias))

        return lambda *qkv: {"gradient": jax.grad(loss)(bias, *qkv)}

    assert_like_jax(gradient, inputs(9, 7, jnp.float32), local_window_size=(1, 2))


def test_numpy_arrays():
    q, k, v = (np.array(x) for x in inputs(5, 7))
    assert jnp.array_equal(dot_product_attention(q, k, v), dot_product_attention(*inputs(5, 7)))


def test_a_mask_without_batch_and_heads():
    operands, mask = inputs(9, 7), jnp.tri(9, 7, dtype=bool)
    attend = jax.jit(lambda mask: dot_product_attention(*operands, mask=mask, bias=mask * 1.0))
    assert jnp.array_equal(attend(mask), attend(mask[None, None]))


def test_queries_without_a_key_on_a_mesh_of_explicit_axes():
    lengths = jnp.array([0, 4], jnp.int32)
    options = {"key_value_seq_lengths": lengths, "mask": MASK}
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        place = jax.P("data", None, "model")
        q, k, v = (jax.device_put(x, place) for x in inputs(9, 7))
        got = dot_product_attention(q, k, v, **options)
    assert jax.P(*got.sharding.spec[:3]) == place
    want = dot_product_attention(*inputs(9, 7), **options)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, want)))


@pytest.mark.parametrize("shape", [(1, 1, 9, 7), (2, 4, 1, 7)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "bias": jax.random.normal(jax.random.key(1), (1, 4, 9, 7))},
        {name: x[:2] for name, x in LENGTHS_OF.items()} | {"local_window_size": (4, 2)},
    ],
    ids=["alone", "bias", "lengths"],
)
def test_masks(shape, options):
    """Some queries see no key."""
    mask = jax.random.bernoulli(jax.random.key(2), 0.3, shape).at[-1, :, -1].set(False)
    options |= {"mask": mask, "return_residual": True}
    assert_like_jax(with_gradients, inputs(9, 7, jnp.float32), **options)


MASK = jnp.ones((1, 1, 9, 7), bool)
LENGTHS = jnp.array([3, 4], jnp.int32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias": MASK[..., :5] * 1.0}, ValueError, "bias: expected shape (2, 4, 9, 7), or 1"),
        ({"mask": MASK * 1.0}, TypeError, "mask: expected bool, got float32"),
        ({"mask": MASK[..., :5]}, ValueError, "mask: expected shape (2, 4, 9, 7), or 1"),
        (
            {"query_seq_lengths": LENGTHS.astype(jnp.int16)},
            TypeError, "query_seq_lengths: expected int32, got int16",
        ),
        (
            {"key_value_seq_lengths": LENGTHS[:1]},
            ValueError, "key_value_seq_lengths: expected shape (2,), got (1,)",
        ),
        (
            {"implementation": "xla"}, NotImplementedError,
            "implementation: expected None or one of 'mosaic', 'triton', 'reference', 'gluon', "
            "'torch_triton', since 'xla' and 'cudnn' run only in jax.nn.dot_product_attention, "
            "got 'xla'",
        ),
        ({"implementation": "cudnn"}, NotImplementedError, "implementation: expected None or one"),
        ({"implementation": "flash"}, ValueError, "implementation: expected None or one of"),
        (
            {"value": jnp.zeros((2, 8, 2, 16)), "is_causal": True},
            ValueError, "value: expected key's length 7, got 8",
        ),
        ({"query": jnp.zeros((9, 16))}, ValueError, "query: expected 3 or 4 dimensions"),
    ],
)  # fmt: skip
def test_refuses(options, error, message):
    arguments = dict(zip(("query", "key", "value"), inputs(9, 7), strict=True))
    with pytest.raises(error) as caught:
        dot_product_attention(**arguments | options)
    assert str(caught.value).startswith(message)
