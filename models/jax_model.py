"""The transformer in JAX, as Flax NNX modules; `torch_model` is its twin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import INIT_STD, NORM_EPS, ModelConfig, check_dtypes
from models.jax_attention import Attend, PagedCache, choose_attention

Rotary = tuple[jax.Array, jax.Array]


class Transformer(nnx.Module):
    """A decoder-only transformer, weights normal with `INIT_STD`.

    Args:
        config: the shape.
        attention: "twin" (this project's), "xla" or "cudnn".
        rngs: of the weights; None is ``nnx.Rngs(0)``.
        dtype: of parameters.
        compute_dtype: of the layers; None is `dtype`. Norms, rotations and the loss compute in
            float32.

    Raises:
        ValueError: an unknown attention or dtype.
        NotImplementedError: an attention that the device lacks for this dtype and head dimension.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: str = "twin",
        *,
        rngs: nnx.Rngs | None = None,
        dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        self.config = config
        compute_dtype = dtype if compute_dtype is None else compute_dtype
        check_dtypes(*(jnp.dtype(x).name for x in (dtype, compute_dtype)))
        self.attend = choose_attention(attention, config, compute_dtype)
        options = {"param_dtype": dtype, "dtype": compute_dtype, "rngs": rngs or nnx.Rngs(0)}
        normal = nnx.initializers.normal(INIT_STD)
        self.embed = nnx.Embed(config.vocab_size, config.d_model, embedding_init=normal, **options)
        self.layers = nnx.List(Block(config, options) for _ in range(config.num_layers))
        self.norm = make_norm(config, options)
        if not config.tied_head:
            self.head = linear(config.d_model, config.vocab_size, options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits [B, S, vocab_size] of tokens [B, S]."""
        positions = jnp.arange(tokens.shape[1])
        x, rotary = self.embed(tokens), self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotary, self.attend)
        return self.logits(x)

    def decode(self, tokens: jax.Array, cache: PagedCache) -> tuple[jax.Array, PagedCache]:
        """Return the logits [B, T, vocab_size] of T new tokens, at most 64, and the extended cache.

        The given cache is not to be used any more.
        """
        cache = cache.extended(tokens.shape[1])
        x, rotary = self.embed(tokens), self.rotary(cache.positions(tokens.shape[1]))
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, cache.attend(i))
        return self.logits(x), cache

    def rotary(self, positions: jax.Array) -> Rotary:
        """Return cosine and sine, [..., S, 1, head_dim / 2] in float32, of positions [..., S]."""
        angles = positions[..., None, None] * jnp.asarray(self.config.rotary_frequencies)
        return jnp.cos(angles), jnp.sin(angles)

    def logits(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)
        return self.embed.attend(x) if self.config.tied_head else self.head(x)


class Block(nnx.Module):
    """Attention and MLP, each on the normalised residual stream and added to it."""

    def __init__(self, config: ModelConfig, options: dict) -> None:
        self.attention_norm = make_norm(config, options)
        self.attention = Attention(config, options)
        self.mlp_norm = make_norm(config, options)
        self.mlp = SwiGLU(config, options) if config.mlp == "swiglu" else GELU(config, options)

    def __call__(self, x: jax.Array, rotary: Rotary, attend: Attend) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), rotary, attend)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nnx.Module):
    """Projections around a given attention, with rotary positions in q and k."""

    def __init__(self, config: ModelConfig, options: dict) -> None:
        d_model, self.head_dim = config.d_model, config.head_dim
        d_kv = config.num_heads_kv * config.head_dim
        self.q_proj = linear(d_model, d_model, options)
        self.k_proj = linear(d_model, d_kv, options)
        self.v_proj = linear(d_model, d_kv, options)
        self.o_proj = linear(d_model, d_model, options)

    def __call__(self, x: jax.Array, rotary: Rotary, attend: Attend) -> jax.Array:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = rotate(self.q_proj(x).reshape(heads), rotary)
        k = rotate(self.k_proj(x).reshape(heads), rotary)
        v = self.v_proj(x).reshape(heads)
        return self.o_proj(attend(q, k, v).reshape(x.shape))


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) · up(x))``. Source: Shazeer 2020."""

    def __init__(self, config: ModelConfig, options: dict) -> None:
        self.gate_proj = linear(config.d_model, config.d_ff, options)
        self.up_proj = linear(config.d_model, config.d_ff, options)
        self.down_proj = linear(config.d_ff, config.d_model, options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class GELU(nnx.Module):
    """``down(gelu(up(x)))``."""

    def __init__(self, config: ModelConfig, options: dict) -> None:
        self.up_proj = linear(config.d_model, config.d_ff, options)
        self.down_proj = linear(config.d_ff, config.d_model, options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.gelu(self.up_proj(x), approximate=False))


def make_norm(config: ModelConfig, options: dict) -> nnx.Module:
    norm = nnx.RMSNorm if config.norm == "rmsnorm" else nnx.LayerNorm
    # The fast variance, E[x²] - E[x]², cancels.
    return norm(config.d_model, epsilon=NORM_EPS, use_fast_variance=False, **options)


def linear(d_in: int, d_out: int, options: dict) -> nnx.Linear:
    normal = nnx.initializers.normal(INIT_STD)
    return nnx.Linear(d_in, d_out, use_bias=False, kernel_init=normal, **options)


def rotate(x: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotate each pair of dimensions i and i + D/2 of x [B, S, H, D]. Source: Su et al. 2021."""
    cos, sin = rotary
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def next_token_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy, in nats, of each of tokens [B, S + 1] but the first."""
    logits = model(tokens[:, :-1])
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()
