"""Multi-head attention as PyTorch modules: projections around the sparse functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_attn.block_sparse import block_sparse_attention
from torch_attn.dilated import dilated_attention
from torch_attn.dispatch import Implementation, check_implementation
from torch_attn.operands import operand
from twin_attention.contract.block_mask import BlockMask
from twin_attention.contract.validate.block_mask import check_mask
from twin_attention.contract.validate.dilated import check_dilations
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.layers import check_heads, check_tokens


class _MultiHeadAttention(nn.Module):
    """Project tokens to q, k and v, and the result of `attend` back to tokens."""

    __call__: Callable[[Tensor], Tensor]

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_heads_kv: int | None,
        implementation: Implementation | None,
        **options: Any,
    ) -> None:
        super().__init__()
        head_dim, num_heads_kv = check_heads(d_model, num_heads, num_heads_kv)
        check_implementation(implementation)
        self.head_dim, self.implementation = head_dim, implementation
        self.q_proj = nn.Linear(d_model, num_heads * head_dim, **options)
        self.k_proj = nn.Linear(d_model, num_heads_kv * head_dim, **options)
        self.v_proj = nn.Linear(d_model, num_heads_kv * head_dim, **options)
        self.out_proj = nn.Linear(num_heads * head_dim, d_model, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [B, S, d_model] to outputs of that shape."""
        check_tokens(x.shape, self.q_proj.in_features)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in projections)
        return self.out_proj(self.attend(q, k, v).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention [B, S, Hq, D] of projected tokens."""
        raise NotImplementedError


class MultiHeadDilatedAttention(_MultiHeadAttention):
    """Self-attention [B, S, d_model] by `dilated_attention`, between projections to heads and back.

    Its parameters are those of four `torch.nn.Linear`: q_proj, k_proj, v_proj and out_proj.

    Args:
        d_model: size of a token, D · num_heads.
        num_heads: query heads.
        segment_lengths, dilation_rates, implementation: as in `dilated_attention`.
        num_heads_kv: kv heads, a divisor of num_heads; None is num_heads.
        causal: a token sees tokens up to itself.
        bias: whether the projections have a bias.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: invalid numbers or pairs.

    Source: Ding et al. 2023 (LongNet), section 2.3.

    Example::

        import torch
        from torch_attn.modules import MultiHeadDilatedAttention

        attention = MultiHeadDilatedAttention(128, 4, [64, 128, 256], [1, 2, 4], causal=True)
        out = attention(torch.randn(2, 256, 128))
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = {"bias": bias, "device": device, "dtype": dtype}
        super().__init__(d_model, num_heads, num_heads_kv, implementation, **options)
        check_dilations(segment_lengths, dilation_rates)
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.causal = causal

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pairs = self.segment_lengths, self.dilation_rates
        options: dict[str, Any] = {"causal": self.causal, "implementation": self.implementation}
        return dilated_attention(q, k, v, *pairs, **options)


class MultiHeadBlockSparseAttention(_MultiHeadAttention):
    """Self-attention [B, S, d_model] by `block_sparse_attention`, between projections.

    Its parameters are those of `MultiHeadDilatedAttention`; the mask's lists are buffers, which
    `state_dict` leaves out and the module fills again where memory is new. S is the mask's length.

    Args:
        block_mask, implementation: as in `block_sparse_attention`. Lists are made from booleans
            once.
        device, dtype: of the parameters; the mask goes to the device as well.
        d_model, num_heads, num_heads_kv, causal, bias: as in `MultiHeadDilatedAttention`.

    Raises:
        TypeError, ValueError: invalid numbers or mask.

    Source: Zaheer et al. 2020 (BigBird).

    Example::

        import torch
        from torch_attn.modules import MultiHeadBlockSparseAttention
        from twin_attention.contract.block_mask import local_tiles

        mask = torch.from_numpy(local_tiles(4, 4, left=1, right=0))  # 4 tiles of 64 tokens
        attention = MultiHeadBlockSparseAttention(128, 4, mask, causal=True)
        out = attention(torch.randn(2, 256, 128))
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        block_mask: BlockMask[Tensor] | Tensor,
        num_heads_kv: int | None = None,
        *,
        causal: bool = False,
        bias: bool = False,
        implementation: Implementation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = {"bias": bias, "device": device, "dtype": dtype}
        super().__init__(d_model, num_heads, num_heads_kv, implementation, **options)
        if not isinstance(block_mask, BlockMask):
            check_mask(operand("block_mask", block_mask))
            with block_mask.device:
                block_mask = BlockMask.of(block_mask)
        if any(x.is_meta for x in block_mask):
            fail(ValueError, "block_mask", "tiles with values", "a mask on the meta device")
        for name, x in block_mask._asdict().items():
            self.register_buffer(name, x.to(device or x.device), persistent=False)
        self.block_mask, self.causal = BlockMask(*(x.cpu() for x in block_mask)), causal

    def reset_parameters(self) -> None:
        """Give the mask's lists their values again: `to_empty` forgets them, as FSDP knows."""
        for name, x in self.block_mask._asdict().items():
            self.get_buffer(name).copy_(x)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.reset_parameters()
        return self

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = BlockMask(*(self.get_buffer(name) for name in BlockMask._fields))
        options: dict[str, Any] = {"causal": self.causal, "implementation": self.implementation}
        return block_sparse_attention(q, k, v, mask, **options)
