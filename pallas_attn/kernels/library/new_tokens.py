"""Trees of new tokens: which new tokens' keys a query sees in addition to the older keys."""

import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.tiles import arange


def tree_mask(s, ends_ref, first, token, new, exists):
    """Hide keys that a row's token does not see; new: each key's token, negative if older."""
    end = plt.load(ends_ref.at[first + new], mask=exists & (new >= 0), other=2**31 - 1)
    seen = (new[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
    return jnp.where(seen, s, float("-inf"))


def tree_words(ends_ref, token, tokens):
    bit = arange(32)

    def word(first):
        new = first + bit
        end = plt.load(ends_ref.at[new], mask=new < tokens, other=0)
        seen = (new[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
        return jnp.sum(seen.astype(jnp.int32) << bit[None, :], 1)

    return word(0), word(32) if tokens > 32 else None


def tree_mask_of_words(s, words, new, tokens):
    low, high = words
    word = low[:, None]
    if high is not None:
        word = jnp.where(new[None, :] < 32, word, high[:, None])
    is_seen = (new < tokens)[None, :] & (((word >> (new & 31)[None, :]) & 1) != 0)
    return jnp.where((new < 0)[None, :] | is_seen, s, float("-inf"))
