"""Trees of new tokens: which keys of a sequence's new tokens a query sees beside the older keys."""

import jax.numpy as jnp
from jax.experimental.pallas import triton as plt


def tree_mask(s, ends_ref, first, token, new, exists):
    """Set the scores of keys that a token of a tree does not see to -inf.

    It sees the keys before the new tokens, and of these u if ``u <= token < ends[u]``: its
    ancestors and itself. A key that does not exist comes after all tokens.

    Args:
        s: scores of rows of q and rows of k.
        ends_ref: the ends of new tokens, int32: token u is seen by those from u to before its end.
        first: the sequence's first new token in `ends_ref`.
        token: which new token each row of q is.
        new: which new token each key is, negative for a key before them.
        exists: which keys do.
    """
    end = plt.load(ends_ref.at[first + new], mask=exists & (new >= 0), other=2**31 - 1)
    seen = (new[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
    return jnp.where(seen, s, float("-inf"))
