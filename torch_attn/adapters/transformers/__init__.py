"""`torch_attn` as an attention implementation of Hugging Face transformers.

transformers asks a registered function for a mask, once for each kind of layer and forward, and
hands it to another in every layer. Here the mask is a `Mask`: what `flash_attention` is called
with.
"""

from __future__ import annotations

try:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    message = (
        "torch_attn.adapters.transformers needs transformers: pip install 'transformers>=5.17'"
    )
    raise ModuleNotFoundError(message, name=error.name) from None

from torch_attn.adapters.transformers.attention import attention_forward
from torch_attn.adapters.transformers.masks import Mask, make_mask
from twin_attention.contract.validate.errors import fail

__all__ = ["Mask", "attention_forward", "make_mask", "register"]


def register(name: str = "torch_attn") -> None:
    """Make `torch_attn` known to transformers as ``attn_implementation=name``.

    Causal models, windows, chunks, encoders, cross attention, softcap, sinks, GQA, dropout and T5's
    position biases work, in training and generation, with padding, packed sequences, dynamic and
    static caches, and under `torch.compile`. Masks of another form become a bias. Attention weights
    are refused, and so are models whose attention transformers does not let replace.
    `docs/hugging-face.md` has the models and the details.

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
