"""Llama of Hugging Face transformers with random weights and a choice of attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, LlamaConfig

from models.config import INIT_STD, NORM_EPS, ModelConfig
from models.torch_attention import choose_attention
from torch_attn.adapters.transformers import register
from twin_attention.contract.validate.errors import fail

# Of transformers, by the names of `models.torch_attention`.
ATTENTIONS = {"twin": "torch_attn", "eager": "eager", "sdpa": "sdpa", "flex": "flex_attention"}


class Llama(nn.Module):
    """transformers' Llama in the shape of a `models.torch_model.Transformer`.

    Args:
        config: the shape, with RMSNorm and SwiGLU.
        attention: "twin" (this project's), or transformers' "eager", "sdpa" or "flex".
        device, dtype: of parameters; device None is the CPU.
        compute_dtype: of matrix products and attention, by autocast; None is `dtype`.

    Raises:
        ValueError: an unknown attention, or a shape that Llama cannot have.
        NotImplementedError: an attention that the device lacks for this dtype and head dimension.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: str = "twin",
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if attention not in ATTENTIONS:
            fail(ValueError, "attention", f"one of {', '.join(ATTENTIONS)}", repr(attention))
        if (config.norm, config.mlp) != ("rmsnorm", "swiglu"):
            expected, got = "rmsnorm and swiglu", f"{config.norm} and {config.mlp}"
            fail(ValueError, "config", expected, got)
        self.device = torch.device(device or "cpu")
        self.dtype, self.compute_dtype = dtype, compute_dtype or dtype
        choose_attention(attention, config, self.device, self.compute_dtype)
        register()
        shape = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads_kv,
            tie_word_embeddings=config.tied_head,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=NORM_EPS,
            initializer_range=INIT_STD,
        )
        with self.device:
            self.model = AutoModelForCausalLM.from_config(
                shape, dtype=dtype, attn_implementation=ATTENTIONS[attention]
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, S, vocab_size] of tokens [B, S]."""
        return self._run(tokens, use_cache=False).logits

    def decode(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return the likeliest next token [B, 1] after new tokens [B, T], and the extended cache.

        The given cache, None for none, grows in place.
        """
        found = self._run(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return found.logits.argmax(dim=-1), found.past_key_values

    def _run(self, tokens: Tensor, **options):
        differ = self.dtype != self.compute_dtype
        with torch.autocast(self.device.type, self.compute_dtype, enabled=differ):
            return self.model(tokens, **options)
