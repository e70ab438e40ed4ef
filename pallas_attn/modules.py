"""Multi-head attention as Flax NNX modules: projections around the sparse functions.

Only this file needs flax, from the extra `models`; `pallas_attn` does not import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    message = "pallas_attn.modules needs Flax: pip install 'twin-attention[models]'"
    raise ModuleNotFoundError(message, name=error.name) from None

from pallas_attn.block_sparse import block_sparse_attention
from pallas_attn.dilated import dilated_attention
from pallas_attn.dispatch import Implementation, check_implementation
from pallas_attn.operands import operand
from twin_attention.contract.block_mask import BlockMask
from twin_attention.contract.validate.block_mask import check_mask
from twin_attention.contract.validate.dilated import check_dilations
from twin_attention.contract.validate.layers import check_heads, check_tokens


class _MultiHeadAttention(nnx.Module):
    """Project tokens to q, k and v, and the result of `attend` back to tokens."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_heads_kv: int | None,
        implementation: Implementation | None,
        **options: Any,
    ) -> None:
        head_dim, num_heads_kv = check_heads(d_model, num_heads, num_heads_kv)
        check_implementation(implementation)
        self.head_dim, self.implementation = head_dim, implementation
        self.q_proj = nnx.Linear(d_model, num_heads * head_dim, **options)
        self.k_proj = nnx.Linear(d_model, num_heads_kv * head_dim, **options)
        self.v_proj = nnx.Linear(d_model, num_heads_kv * head_dim, **options)
        self.out_proj = nnx.Linear(num_heads * head_dim, d_model, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map tokens [B, S, d_model] to outputs of that shape."""
        check_tokens(x.shape, self.q_proj.in_features)
        projected = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        rows, size = x.shape[:-1], self.head_dim
        q, k, v = (y.reshape(*rows, y.shape[-1] // size, size) for y in projected)
        return self.out_proj(self.attend(q, k, v).reshape(*rows, q.shape[2] * size))

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Return the attention [B, S, Hq, D] of projected tokens."""
        raise NotImplementedError


class MultiHeadDilatedAttention(_MultiHeadAttention):
    """Self-attention [B, S, d_model] by `dilated_attention`, between projections to heads and back.

    Its parameters are those of four `nnx.Linear`: q_proj, k_proj, v_proj and out_proj.

    Args:
        d_model: size of a token, D · num_heads.
        num_heads: query heads.
        segment_lengths, dilation_rates, implementation: as in `dilated_attention`.
        num_heads_kv: kv heads, a divisor of num_heads; None is num_heads.
        causal: a token sees tokens up to itself.
        bias: whether the projections have a bias.
        rngs, param_dtype: of the parameters.
        dtype: of the projections' arithmetic and results; None is that of tokens and parameters.

    Raises:
        TypeError, ValueError: invalid numbers or pairs.

    Source: Ding et al. 2023 (LongNet), section 2.3.

    Example::

        import jax.numpy as jnp
        from flax import nnx
        from pallas_attn.modules import MultiHeadDilatedAttention

        attention = MultiHeadDilatedAttention(
            128, 4, [64, 128, 256], [1, 2, 4], causal=True, rngs=nnx.Rngs(0)
        )
        out = attention(jnp.ones((2, 256, 128)))
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        num_heads_kv: int | None = None,
        *,
        causal: bool = False,
        bias: bool = False,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
    ) -> None:
        options = {"use_bias": bias, "rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        super().__init__(d_model, num_heads, num_heads_kv, implementation, **options)
        check_dilations(segment_lengths, dilation_rates)
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.causal = causal

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        pairs = self.segment_lengths, self.dilation_rates
        options: dict[str, Any] = {"causal": self.causal, "implementation": self.implementation}
        return dilated_attention(q, k, v, *pairs, **options)


class MaskList(nnx.Variable):
    """A list of a block mask: data of a module, not a parameter."""


class MultiHeadBlockSparseAttention(_MultiHeadAttention):
    """Self-attention [B, S, d_model] by `block_sparse_attention`, between projections.

    Its parameters are those of `MultiHeadDilatedAttention`; the mask's lists are `MaskList`
    variables. S is the mask's length.

    Args:
        block_mask, implementation: as in `block_sparse_attention`. Lists are made from booleans
            once.
        d_model, num_heads, num_heads_kv, causal, bias, rngs, dtype, param_dtype: as in
            `MultiHeadDilatedAttention`.

    Raises:
        TypeError, ValueError: invalid numbers or mask.

    Source: Zaheer et al. 2020 (BigBird).

    Example::

        import jax.numpy as jnp
        from flax import nnx
        from pallas_attn.modules import MultiHeadBlockSparseAttention
        from twin_attention.contract.block_mask import local_tiles

        mask = jnp.asarray(local_tiles(4, 4, left=1, right=0))  # 4 tiles of 64 tokens
        attention = MultiHeadBlockSparseAttention(128, 4, mask, causal=True, rngs=nnx.Rngs(0))
        out = attention(jnp.ones((2, 256, 128)))
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        block_mask: BlockMask[jax.Array] | jax.Array,
        num_heads_kv: int | None = None,
        *,
        causal: bool = False,
        bias: bool = False,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
    ) -> None:
        options = {"use_bias": bias, "rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        super().__init__(d_model, num_heads, num_heads_kv, implementation, **options)
        if not isinstance(block_mask, BlockMask):
            check_mask(operand("block_mask", block_mask))
            block_mask = BlockMask.of(block_mask)
        for name, x in block_mask._asdict().items():
            setattr(self, name, MaskList(x))
        self.causal = causal

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = BlockMask(*(getattr(self, name)[...] for name in BlockMask._fields))
        options: dict[str, Any] = {"causal": self.causal, "implementation": self.implementation}
        return block_sparse_attention(q, k, v, mask, **options)
