"""Masks of transformers, as the arguments of `flash_attention` that hide the same keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import causal_mask_function, find_packed_sequence_indices, sdpa_mask
from transformers.utils.import_utils import is_tracing

from twin_attention.contract.spec import Window
from twin_attention.contract.validate.errors import fail

CAUSAL = Window(None, 0)
_CONSECUTIVE = (
    "consecutive positions in a row that uses a cache (for packed sequences pass use_cache=False, "
    "or cu_seq_lens_q and cu_seq_lens_k)"
)


class NotATensorError(NotImplementedError, AttributeError):
    """A model computes with the mask itself. `hasattr` takes it for False."""


@dataclass
class Mask:
    """A mask of transformers.

    Attributes:
        window: the keys around its own position that a token sees.
        operands: `flash_attention`'s tensors that hide further keys.
        num_keys: the keys seen so far, if a static cache has more slots; None is all of them.
        is_packed: True if segment ids are documents', False if each row is one sequence, None if
            `position_ids` have to tell.
    """

    window: Window
    operands: dict[str, Tensor] = field(default_factory=dict)
    num_keys: int | None = None
    is_packed: bool | None = False

    ndim: ClassVar[int] = 4  # so transformers takes it for a finished mask

    def contiguous(self) -> Mask:
        return self

    def to(self, device: Any, **options: Any) -> Mask:
        """Return the mask on another device."""
        if not isinstance(device, (str, int, torch.device)):
            _refuse_to_be_a_tensor()
        moved = {name: x.to(device, **options) for name, x in self.operands.items()}
        return replace(self, operands=moved)

    def __getattr__(self, name: Any) -> NoReturn:
        _refuse_to_be_a_tensor()

    __getitem__ = __add__ = __mul__ = __rsub__ = __getattr__

    @classmethod
    def __torch_function__(cls, *call: Any) -> NoReturn:
        _refuse_to_be_a_tensor()

    def keep_documents_apart(self, position_ids: Tensor, batch_size: int, num_keys: int) -> None:
        """Give the documents that `position_ids` tell segment ids, for all layers.

        Args:
            position_ids: [B, Sq] or [1, Sq]: a document begins where they restart. Positions of
                more dimensions tell none.

        Raises:
            NotImplementedError: there are several documents, and a cache's tokens or chunks.
            RuntimeError: from compiled code: there are several documents.
        """
        if position_ids.ndim != 2:
            return
        if is_tracing(position_ids):
            consecutive = (position_ids.diff() == 1).all()
            message = f"position_ids: expected {_CONSECUTIVE}, got packed sequences"
            torch._assert_async(consecutive, message)  # pyright: ignore[reportPrivateImportUsage]
            return
        self.is_packed = False
        documents = find_packed_sequence_indices(position_ids)
        if documents is None:
            return
        if self.operands or num_keys != position_ids.shape[1]:
            fail(NotImplementedError, "position_ids", _CONSECUTIVE, "packed sequences")
        documents = documents.expand(batch_size, -1)
        self.is_packed, self.operands = True, _segments(documents, documents)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **others: Any,
) -> Mask:
    """Return the mask that transformers describes.

    Causal and bidirectional masks with windows, chunks, padding, packed sequences, blocks that see
    all of themselves and static caches take memory for each token; others become a bias, for each
    pair of tokens. With one query nothing waits for the device.

    Args:
        q_length, q_offset: the queries are tokens q_offset to q_offset + q_length; keys likewise.
            A static cache has more keys than tokens, and its q_offset may be a tensor.
        mask_function: transformers' own, read if the mask is neither causal nor bidirectional.
        attention_mask: [B, tokens seen] bool, False for padding; or a finished mask.
        local_size: the sliding window, or the chunk size of chunked attention.
        allow_is_causal_skip: the mask is causal, apart from padding and `local_size`.
        allow_is_bidirectional_skip: likewise, it keeps every key.
        use_vmap, device: for `mask_function`.
        dtype: of a bias.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    tracing = is_tracing(attention_mask)
    if q_length > 1 and not tracing:
        q_offset = int(q_offset)
    chunk = getattr(config, "attention_chunk_size", None)
    chunk = chunk if local_size == chunk else None
    documents, window, ranges = None, None, None
    if not (allow_is_causal_skip or allow_is_bidirectional_skip or use_vmap or tracing):
        documents = _packed_sequences(mask_function)
    if allow_is_causal_skip or documents is not None:
        window = Window(None if local_size is None or chunk else local_size - 1, 0)
    elif allow_is_bidirectional_skip:
        window = Window(local_size, local_size)
    elif q_length > 1 and not tracing:
        sizes = batch_size, q_offset + q_length, q_length
        window, ranges = _ranges_of_blocks(mask_function, attention_mask, *sizes, kv_offset)

    # Bidirectional queries may have other tokens' keys. In all other masks the keys after the last
    # query are unused slots of a static cache.
    num_keys: Any = kv_length if window == Window() else q_offset + q_length - kv_offset
    fits = not torch.is_tensor(num_keys) and num_keys <= kv_length
    hides = attention_mask is not None or chunk is not None or num_keys != kv_length
    if window is None or not fits or (q_length == 1 and hides):
        seen: Any = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        if q_length == 1:
            ids = seen[:, 0, 0].int() - 1
            return Mask(Window(), _segments(torch.zeros_like(ids[:, :1]), ids))
        bias = torch.zeros((), dtype=dtype, device=device).where(seen, -torch.inf)
        return Mask(Window(), {"bias": bias})

    end: Any = kv_offset + num_keys
    ids = documents
    if chunk is not None and end > chunk:
        start = 0  # of each sequence's chunks
        if attention_mask is not None:
            start = (attention_mask.cumsum(1) == 0).sum(1, keepdim=True)
        ids = (torch.arange(end, device=device)[None] - start) // chunk
    is_padded = False
    if attention_mask is not None:
        tokens = pad(attention_mask, (0, max(end - attention_mask.shape[1], 0)))[:, :end]
        is_padded = tracing or not tokens[:, kv_offset:].all()
        if is_padded:
            ids = torch.where(tokens, 0 if ids is None else ids, -1)
    operands: dict[str, Tensor] = {}
    if ids is not None:
        ids = ids.expand(batch_size, -1)
        q_ids = ids[:, -q_length:]
        if window == Window():
            q_ids = torch.zeros(batch_size, q_length, device=device)
        operands = _segments(q_ids, ids[:, kv_offset:])
    is_packed = documents is not None
    if ranges is not None:
        operands["q_ranges"] = ranges.to(device)
    elif window.right == 0 and not is_padded and not is_packed:
        is_packed = None
    used: Any = num_keys if num_keys < kv_length else None
    return Mask(window, operands, used, is_packed)


def _segments(q_ids: Tensor, kv_ids: Tensor) -> dict[str, Tensor]:
    return {"q_segment_ids": q_ids.int().contiguous(), "kv_segment_ids": kv_ids.int().contiguous()}


def _refuse_to_be_a_tensor() -> NoReturn:
    raise NotATensorError(
        "attention_mask: expected a model whose attention transformers lets replace, got one with "
        "attention of its own; use attn_implementation='eager' or 'sdpa'"
    )


def _packed_sequences(mask_function: Callable[..., Any]) -> Tensor | None:
    """Return the segment ids of a mask of packed sequences, None for any other mask function.

    They are in the closure of `packed_sequence_mask_function`'s result, which must be joined with
    transformers' causal or sliding mask.
    """
    packed, remapped = _split(mask_function, "packed_sequence_mask_function")
    remap = _closure(remapped, "remap_positions_for_packed_sequence")  # from 5.23 on
    within = remap.get("mask_function", remapped)
    _, rest = _split(within, "sliding_window_overlay")
    if not packed or rest is not causal_mask_function:
        return None
    return packed["packed_sequence_mask"].int()


def _ranges_of_blocks(
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    batch_size: int,
    num_tokens: int,
    q_length: int,
    kv_offset: int,
) -> tuple[Window | None, Tensor | None]:
    """Return window and ranges of a mask of what is before tokens, and their block; else None.

    Blocks are prefixes and images: tokens of one id, side by side. A sliding window holds for the
    tokens before, or for all.
    """
    of_all, function = _split(mask_function, "sliding_window_overlay")
    both = _closure(function, "or_masks").get("mask_functions", ())
    blocks = _closure(both[-1], "blockwise_overlay") if len(both) == 2 else {}
    before, function = _split(both[0], "sliding_window_overlay") if blocks else ({}, None)
    if function is not causal_mask_function or (of_all and before):
        return None, None
    size = (of_all | before).get("sliding_window")
    ids = blocks["block_sequence_ids"][:, :num_tokens].expand(batch_size, -1)
    ids = pad(ids, (0, num_tokens - ids.shape[1]), value=-1)
    if attention_mask is not None:
        seen = attention_mask.to(ids.device)[:, :num_tokens]
        ids = ids.where(pad(seen, (0, num_tokens - seen.shape[1])), -1)
    begins = ids != pad(ids, (1, 0), value=-1)[:, :-1]
    # A block's id is above all before it.
    if (begins & (ids >= 0) & (ids <= pad(ids, (1, 0), value=-1).cummax(1).values[:, :-1])).any():
        return None, None
    token = torch.arange(num_tokens, device=ids.device)
    first = token.where(begins, 0).cummax(1).values
    following = pad(token.where(begins, num_tokens)[:, 1:], (0, 1), value=num_tokens)
    end = following.flip(1).cummin(1).values.flip(1)
    first, end = (x.where(ids >= 0, token) for x in (first, end))
    if of_all and size is not None:
        first = first.maximum(token - (size - 1))
    ranges = torch.stack([first, end], 2)[:, -q_length:, None] - kv_offset
    return Window(None if size is None else size - 1, 0), ranges.int()


def _split(function: Any, maker: str) -> tuple[dict[str, Any], Any]:
    """Return a joined mask's variables of the function that a maker made, and the other one."""
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
