"""`torch_attn` as an attention implementation of Hugging Face transformers.

transformers asks a registered function for a mask, once for each kind of layer, and hands it to
another in every layer. Here the mask is a `Mask`, not a tensor of scores: what cannot be said
as a window and segments is refused, so that no part of a mask is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    message = (
        "torch_attn.adapters.transformers needs transformers: pip install 'transformers>=5.23'"
    )
    raise ModuleNotFoundError(message, name=error.name) from None

from torch_attn import flash_attention, flash_attention_varlen
from torch_attn.adapters.seeds import draw_seed
from torch_attn.operands import with_rows
from twin_attention.contract.spec import Window
from twin_attention.contract.validate.errors import fail

# What models pass to every layer and attention does not depend on.
_WITHOUT_EFFECT = {
    "cache_position",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass(frozen=True)
class Mask:
    """A mask of transformers.

    Attributes:
        window: the keys around its own position that a token sees.
        segment_ids: [B, S] int32, the only sequence that each token sees where several are packed;
            None is one sequence a row.
    """

    window: Window
    segment_ids: Tensor | None = None


def register(name: str = "torch_attn") -> None:
    """Make `torch_attn` known to transformers as ``attn_implementation=name``.

    Causal models, sliding windows, bidirectional encoders, softcap, sinks, GQA, dropout and T5's
    position biases work, in training and with `DynamicCache`, transformers' default. Padding in a
    batch, chunked attention, static caches and attention weights are refused when a model meets
    them. Under `torch.compile` with `fullgraph` leave `attention_mask` out and the cache on:
    otherwise transformers builds a mask while tracing.

    Sequences packed into one row, as `DataCollatorWithFlattening` makes them, are kept apart in
    either of two ways: by `cu_seq_lens_q` and `cu_seq_lens_k`
    (``return_flash_attn_kwargs=True``), which models hand to their attention; or by
    `position_ids` that restart, where the model's eager attention minds them: without
    `attention_mask`, with ``use_cache=False``, and not in gpt-oss.

    Args:
        name: for `from_pretrained`, `from_config` or `set_attn_implementation`, without "flash",
            which transformers reads as flash-attn.

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
    AttentionMaskInterface.register(name, make_mask)  # pyright: ignore[reportCallIssue]


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **others: Any,
) -> Mask:
    """Return the window and the segments that transformers' mask is, or refuse it.

    Args:
        q_length, q_offset: the queries are tokens q_offset to q_offset + q_length; keys likewise.
        mask_function: transformers' own, read if the mask is neither causal nor bidirectional.
        attention_mask: [B, tokens seen] bool, False for padding.
        local_size: the sliding window, or the chunk size of chunked attention.
        allow_is_causal_skip: the mask is causal, apart from padding and `local_size`.
        allow_is_bidirectional_skip: likewise, it keeps every key.

    Raises:
        NotImplementedError: names `attention_mask`, `past_key_values` or the option.
    """
    if local_size is not None and getattr(config, "attention_chunk_size", None) is not None:
        fail(NotImplementedError, "attention_chunk_size", "None", config.attention_chunk_size)
    end = kv_offset + kv_length
    segment_ids = None if allow_is_causal_skip else _packed_sequences(mask_function)
    if allow_is_causal_skip or segment_ids is not None:
        window = Window(None if local_size is None else local_size - 1, 0)
    elif allow_is_bidirectional_skip:
        window = Window(local_size, local_size)
    elif q_length == 1 and bool(q_offset + 1 != end):
        _refuse_static_cache(end)
    else:
        expected = "a causal, sliding-window, packed or bidirectional mask"
        got = "a mask function of the model's own"
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
    return Mask(window, segment_ids)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention as transformers' attention interface asks for it.

    Args:
        module: the layer's attention. Its `is_causal` counts where there is no mask.
        query: [B, Hq, Sq, D]; key [B, Hkv, Skv, D]; value [B, Hkv, Skv, Dv].
        attention_mask: the registered function's `Mask`, or None.
        scaling: factor of the scores; None is ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: [Hq], sinks.
        dropout: share of probabilities to drop, seeded by torch's generator of the device.
        position_bias: [B, Hq, Sq, Skv], or 1 in place of any, added to the scores; copied if its
            last dimension is not contiguous, as T5's.
        is_causal: overrides the module's; must agree with a mask.
        sliding_window: unused, the mask has it.
        cu_seq_lens_q, cu_seq_lens_k: [N + 1], offsets of sequences packed into the batch's rows,
            one row after the other, instead of the mask's segments.
        others: what transformers passes to every layer.

    Returns:
        out [B, Sq, Hq, Dv], and None for the weights.

    Raises:
        NotImplementedError: a mask as a tensor, a position bias with packed sequences, or an option
            in `others` that attention depends on.
        ValueError: one of `cu_seq_lens_q` and `cu_seq_lens_k` without the other.
        What `torch_attn.flash_attention` and `flash_attention_varlen` raise.
    """
    for name, option in others.items():
        if name not in _WITHOUT_EFFECT and option is not None and option is not False:
            fail(NotImplementedError, name, "None or False", type(option).__name__)
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        missing = "cu_seq_lens_q" if cu_seq_lens_q is None else "cu_seq_lens_k"
        fail(ValueError, missing, "cu_seq_lens_q and cu_seq_lens_k, or neither", None)
    if attention_mask is None:
        if sliding_window is not None:
            expected = "a mask of the registered mask function beside sliding_window"
            fail(NotImplementedError, "attention_mask", expected, None)
        causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
        if causal is None:
            expected = "a bool where there is no attention_mask"
            fail(NotImplementedError, "is_causal", expected, None)
        attention_mask = Mask(Window(None, 0) if causal else Window())
    elif not isinstance(attention_mask, Mask):
        expected = "the mask that torch_attn's mask function made"
        fail(NotImplementedError, "attention_mask", expected, type(attention_mask).__name__)
    elif (
        is_causal is not None
        and query.shape[2] > 1
        and is_causal != (attention_mask.window.right == 0)
    ):
        fail(NotImplementedError, "is_causal", "what the model's mask says", is_causal)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "scale": scaling,
        "window_size": (attention_mask.window.left, attention_mask.window.right),
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),  # a model has them in its own dtype
        "dropout_rate": dropout,
        "dropout_seed": draw_seed(query, dropout),
    }
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if position_bias is not None:
            expected = "None with cu_seq_lens_q"
            fail(NotImplementedError, "position_bias", expected, type(position_bias).__name__)
        out = flash_attention_varlen(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seq_lens_q.int(),
            cu_seq_lens_k.int(), **options,
        )  # fmt: skip
        return out.unflatten(0, q.shape[:2]), None
    ids = attention_mask.segment_ids
    bias = None if position_bias is None else with_rows(position_bias)
    out = flash_attention(q, k, v, q_segment_ids=ids, kv_segment_ids=ids, bias=bias, **options)
    return out, None


def _packed_sequences(mask_function: Callable[..., Tensor] | None) -> Tensor | None:
    """Return the segment ids of a mask of packed sequences, None for any other mask function.

    The ids are in the closure of `packed_sequence_mask_function`'s result, which must be joined
    with transformers' causal or sliding mask, in either order; their positions count within a
    sequence.
    """
    packed, remapped = _split(mask_function, "packed_sequence_mask_function")
    within = _closure(remapped, "remap_positions_for_packed_sequence").get("mask_function")
    _, rest = _split(within, "sliding_window_overlay")
    if not packed or rest is not causal_mask_function:
        return None
    return packed["packed_sequence_mask"].int()


def _split(function: Any, maker: str) -> tuple[dict[str, Any], Any]:
    """Split a joined mask: return the variables of the function that a maker made, and the other
    function; none and the mask itself if it is no such pair.
    """
    both = _closure(function, "and_masks").get("mask_functions", ())
    made = [_closure(x, maker) for x in both]
    if len(both) != 2 or bool(made[0]) == bool(made[1]):
        return {}, function
    return (made[0], both[1]) if made[0] else (made[1], both[0])


def _closure(function: Any, maker: str) -> dict[str, Any]:
    """Return a mask function's variables from its maker; none if another made it."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>."):
        return {}
    cells = (cell.cell_contents for cell in function.__closure__)
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def _refuse_static_cache(length: int) -> None:
    expected = "a cache of the tokens seen (DynamicCache)"
    fail(NotImplementedError, "past_key_values", expected, f"one of {int(length)} slots")
