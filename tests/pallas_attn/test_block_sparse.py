import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import BlockMask, block_sparse_attention, check_block_mask


@pytest.fixture
def operands():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (1, 70, 2, 16), (1, 130, 1, 16), (1, 130, 1, 24)
    kept = jnp.array([[[1, 0, 1], [0, 1, 0]], [[0, 1, 1], [0, 0, 0]]], bool)
    return *map(jax.random.normal, keys, shapes), kept


def loss(q, k, v, mask, implementation="reference"):
    out, lse = block_sparse_attention(
        q, k, v, mask, causal=True, return_lse=True, implementation=implementation
    )
    return jnp.sum(out**2) + jnp.sum(jnp.maximum(lse, -9))


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_lists_go_through_jit_and_grad(operands):
    """As a pytree; one trace serves all masks of a shape."""
    *qkv, kept = operands
    traces = []

    @jax.jit
    def gradients(mask, *qkv):
        traces.append(mask)
        return jax.grad(loss, (0, 1, 2))(*qkv, mask)

    for mask in (kept, ~kept):
        want = jax.grad(loss, (0, 1, 2))(*qkv, mask)
        assert_close(gradients(BlockMask.of(mask), *qkv), want)
    assert len(traces) == 1


def test_vmap_over_masks(operands):
    """Through the kernels: Pallas batches their lists."""
    q, k, v, kept = operands
    masks = jnp.stack([kept, ~kept])

    def gradient(implementation):
        return lambda mask: jax.grad(loss)(q, k, v, mask, implementation)

    got = jax.jit(jax.vmap(gradient("triton")))(masks)
    assert_close(got, jnp.stack([*map(jax.jit(gradient("reference")), masks)]))


def test_check_block_mask_needs_values(operands):
    mask = BlockMask.of(operands[-1])
    assert check_block_mask(mask) is None
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(check_block_mask)(mask)
