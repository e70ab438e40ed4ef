"""A layer's attention, as transformers' attention interface asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_attn import flash_attention, flash_attention_varlen
from torch_attn.adapters.seeds import draw_seed
from torch_attn.adapters.transformers.masks import CAUSAL, Mask
from torch_attn.operands import with_rows
from twin_attention.contract.spec import Window
from twin_attention.contract.validate.errors import fail, type_name

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
    "return_dict",
    "use_cache",
}


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
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
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention as transformers' attention interface asks for it.

    Args:
        module: the layer's attention. Its `is_causal` counts where there is no mask.
        query: [B, Hq, Sq, D]; key [B, Hkv, Skv, D]; value [B, Hkv, Skv, Dv]; copied, as T5's
            position biases are, if their last dimension is not contiguous.
        attention_mask: the registered function's `Mask`; a tensor of the user's own, [B, Hq, Sq,
            Skv] or 1 in place of any, bool (True is seen) or added to the scores; or None.
        scaling: factor of the scores; None is ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: [Hq], sinks.
        dropout: share of probabilities to drop, seeded by torch's generator of the device.
        position_bias: [B, Hq, Sq, Skv], or 1 in place of any, added to the scores.
        is_causal: overrides the module's; must agree with a mask.
        sliding_window: unused, the mask has it.
        cu_seq_lens_q, cu_seq_lens_k: [N + 1], offsets of sequences packed into the batch's rows,
            one row after the other, instead of the mask's segments.
        position_ids: [B, Sq]: where they restart in a causal batch without padding, a document
            begins, which only sees itself. Any other shape is unused.
        others: what transformers passes to every layer.

    Returns:
        out [B, Sq, Hq, Dv], and None for the weights.

    Raises:
        NotImplementedError: a mask that is no Mask and not 4-D; softcap with a mask that only a
            bias can express; padding or a position bias with `cu_seq_lens_q`; `position_ids` that
            restart after a cache's tokens; or an option in `others` that attention depends on.
        ValueError: one of `cu_seq_lens_q` and `cu_seq_lens_k` without the other.
        What `torch_attn.flash_attention` and `flash_attention_varlen` raise.
    """
    for name, option in others.items():
        if name not in _WITHOUT_EFFECT and option is not None and option is not False:
            fail(NotImplementedError, name, "None or False", type(option).__name__)
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        missing = "cu_seq_lens_q" if cu_seq_lens_q is None else "cu_seq_lens_k"
        fail(ValueError, missing, "cu_seq_lens_q and cu_seq_lens_k, or neither", None)
    mask = _mask_of(module, query, attention_mask, is_causal, sliding_window)
    if mask.num_keys is not None:
        key, value = key[:, :, : mask.num_keys], value[:, :, : mask.num_keys]
        position_bias = None if position_bias is None else position_bias[..., : mask.num_keys]
    q, k, v = (with_rows(x.transpose(1, 2)) for x in (query, key, value))
    options: dict[str, Any] = {
        "scale": scaling,
        "window_size": (mask.window.left, mask.window.right),
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),  # a model has them in its own dtype
        "dropout_rate": dropout,
        "dropout_seed": draw_seed(query, dropout),
    }
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if position_bias is not None:
            expected = "None with cu_seq_lens_q"
            fail(NotImplementedError, "position_bias", expected, type(position_bias).__name__)
        if mask.operands and not mask.is_packed:
            expected = "None, or a causal, sliding or full mask without padding, with cu_seq_lens_q"
            fail(NotImplementedError, "attention_mask", expected, "another mask")
        out = flash_attention_varlen(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seq_lens_q.int(),
            cu_seq_lens_k.int(), **options,
        )  # fmt: skip
        return out.unflatten(0, q.shape[:2]), None
    if mask.is_packed is None and position_ids is not None and q.shape[1] > 1:
        mask.keep_documents_apart(position_ids, *k.shape[:2])
    bias = mask.operands.get("bias")
    if bias is not None and softcap is not None:
        expected = "with softcap a causal, sliding, packed or full mask, padded or not"
        fail(NotImplementedError, "attention_mask", expected, "a mask of another form")
    if position_bias is not None:
        bias = with_rows(position_bias if bias is None else position_bias + bias)
    options |= mask.operands
    options["bias"] = bias
    return flash_attention(q, k, v, **options), None


def _mask_of(
    module: torch.nn.Module,
    query: Tensor,
    mask: Mask | Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> Mask:
    if isinstance(mask, Mask):
        can_tell = query.shape[2] > 1 and not {"bias", "q_ranges"} & {*mask.operands}
        if can_tell and is_causal is not None and is_causal != (mask.window.right == 0):
            fail(NotImplementedError, "is_causal", "what the model's mask says", is_causal)
        return mask
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 4:
            expected = "a mask that torch_attn's mask function made, or a tensor [B, Hq, Sq, Skv]"
            fail(
                NotImplementedError,
                "attention_mask",
                expected,
                f"{type_name(mask)} {list(getattr(mask, 'shape', ()))}",
            )
        if mask.dtype == torch.bool:
            mask = torch.zeros((), dtype=query.dtype, device=mask.device).where(mask, -torch.inf)
        return Mask(Window(), {"bias": mask})
    if sliding_window is not None:
        expected = "a mask of the registered mask function beside sliding_window"
        fail(NotImplementedError, "attention_mask", expected, None)
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        expected = "a bool where there is no attention_mask"
        fail(NotImplementedError, "is_causal", expected, None)
    return Mask(CAUSAL if causal else Window())
