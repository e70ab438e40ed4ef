"""`torch_attn` as an attention implementation of Hugging Face transformers.

transformers asks one registered function for a mask, once for each kind of layer, and hands the
mask to another in every layer. Here the mask is a `Window`, not a tensor: what the mask function
cannot say as a window it refuses, so that no part of a mask is lost on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from torch_attn import flash_attention
from twin_attention.contract.spec import Window
from twin_attention.contract.validate import fail

# What models pass down to every layer and no attention depends on.
_WITHOUT_EFFECT = {
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


def register(name: str = "torch_attn") -> None:
    """Make `torch_attn` known to transformers as ``attn_implementation=name``.

    Causal models, sliding windows, bidirectional encoders, softcap, sinks and GQA work, in training
    and with a cache that grows (`DynamicCache`, transformers' default). Padding in a batch, packed
    sequences, chunked attention, static caches, dropout, position biases and attention weights are
    refused when a model meets them. Under `torch.compile` with `fullgraph` leave
    `attention_mask` out and the cache on: otherwise transformers builds a mask for padding or for
    packed sequences while tracing.

    Args:
        name: the name to give to `from_pretrained`, `from_config` or `set_attn_implementation`.
            It must not contain "flash", which transformers reads as flash-attn.

    Raises:
        ValueError: the name contains "flash".

    Example::

        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from torch_attn.adapters.transformers import register

        register()
        config = LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=100, attn_implementation="torch_attn",
        )
        model = LlamaForCausalLM(config)
        tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    """
    if "flash" in name:
        fail(ValueError, "name", 'a name without "flash"', repr(name))
    # A type checker takes these class methods for `abc.ABCMeta.register`.
    AttentionInterface.register(name, attention_forward)  # pyright: ignore[reportCallIssue]
    AttentionMaskInterface.register(name, mask_window)  # pyright: ignore[reportCallIssue]


def mask_window(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **others: Any,
) -> Window:
    """Return the window that transformers' mask is, or refuse it.

    Args:
        q_length, q_offset: the queries are tokens q_offset to q_offset + q_length.
        kv_length, kv_offset: likewise the keys.
        attention_mask: [B, tokens seen] bool, False where a token is padding; None is no padding.
        local_size: the sliding window, or the chunk size of chunked attention.
        allow_is_causal_skip: the mask is causal, apart from padding and `local_size`.
        allow_is_bidirectional_skip: likewise, it keeps every key.
        config: the model's configuration.
        batch_size and others: unused.

    Raises:
        NotImplementedError: names `attention_mask`, `past_key_values` or the option.
    """
    if local_size is not None and getattr(config, "attention_chunk_size", None) is not None:
        fail(NotImplementedError, "attention_chunk_size", "None", config.attention_chunk_size)
    end = kv_offset + kv_length
    if allow_is_causal_skip:
        window = Window(None if local_size is None else local_size - 1, 0)
    elif allow_is_bidirectional_skip:
        window = Window(local_size, local_size)
    elif q_length == 1 and bool(q_offset + 1 != end):
        _refuse_static_cache(end)
    else:
        expected = "a causal, sliding-window or bidirectional mask"
        got = "packed sequences or a mask function of the model's own"
        fail(NotImplementedError, "attention_mask", expected, got)
    if window != Window() and bool(q_offset + q_length != end):
        _refuse_static_cache(end)
    if attention_mask is not None:
        seen = attention_mask[:, kv_offset:end]
        if seen.shape[1] != kv_length or not seen.all():
            fail(
                NotImplementedError,
                "attention_mask",
                "no padding (batch sequences of one length, or one at a time; for training on "
                "right-padded sequences leave attention_mask out, as no token sees what follows "
                "it, and ignore the padding in the loss)",
                "a batch with padding",
            )
    return window


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention as transformers' attention interface asks for it.

    Args:
        module: the layer's attention. Its `is_causal` counts where there is no mask.
        query: [B, Hq, Sq, D]; key [B, Hkv, Skv, D]; value [B, Hkv, Skv, Dv].
        attention_mask: the `Window` of the registered mask function, or None.
        scaling: factor of the scores; None is ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        s_aux: [Hq], sinks; None is none.
        dropout: 0.0.
        is_causal: overrides the module's; must agree with a mask.
        sliding_window: unused, the mask has it.
        others: what transformers passes to every layer.

    Returns:
        out [B, Sq, Hq, Dv], and None for the weights.

    Raises:
        NotImplementedError: dropout, a mask as a tensor, or an option in `others` that attention
            depends on.
        What `torch_attn.flash_attention` raises.
    """
    if dropout != 0:
        fail(NotImplementedError, "dropout", "0.0 (attention_dropout of the config)", dropout)
    for name, option in others.items():
        if name not in _WITHOUT_EFFECT and option is not None and option is not False:
            fail(NotImplementedError, name, "None or False", type(option).__name__)
    if attention_mask is None:
        if sliding_window is not None:
            expected = "a mask of the registered mask function beside sliding_window"
            fail(NotImplementedError, "attention_mask", expected, None)
        causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
        if causal is None:
            expected = "a bool where there is no attention_mask"
            fail(NotImplementedError, "is_causal", expected, None)
        attention_mask = Window(None, 0) if causal else Window()
    elif not isinstance(attention_mask, Window):
        expected = "the mask that torch_attn's mask function made"
        fail(NotImplementedError, "attention_mask", expected, type(attention_mask).__name__)
    elif is_causal is not None and query.shape[2] > 1 and is_causal != (attention_mask.right == 0):
        fail(NotImplementedError, "is_causal", "what the model's mask says", is_causal)
    out = flash_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale=scaling,
        window_size=(attention_mask.left, attention_mask.right),
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),  # a model has them in its own dtype
    )
    return out, None


def _refuse_static_cache(length: int) -> None:
    expected = "a cache of the tokens seen (DynamicCache)"
    fail(NotImplementedError, "past_key_values", expected, f"one of {int(length)} slots")
