"""Who sees whom, beside the window: packed sequences, segment ids and block masks.

Each is a named tuple of operands and numbers, or None; a kernel takes all of them as one.
"""

from typing import Any, NamedTuple

from torch import Tensor

from torch_attn.kernels.library.block_mask import (
    Lists,
    lists_of_keys,
    lists_of_queries,
    with_numbers,
)
from torch_attn.kernels.library.segments import (
    Segments,
    segments_of,
    visiting_keys,
    visiting_queries,
)
from torch_attn.kernels.library.sequences import Offsets, offsets_of
from torch_attn.launch import KernelCall
from twin_attention.contract.operands import AttentionOperands


class Mask(NamedTuple):
    """Tell a kernel who sees whom; None for what the problem does not have.

    The lists come first: in loops Triton 3.6 loses the constants of a tuple in a tuple, unless a
    constant of the outer one follows, such as None.

    Attributes:
        lists: the tiles that a block mask keeps.
        offsets: of packed sequences, both None of a dense batch.
        segments: ids, and ranges of the visited tokens' ids.
    """

    lists: Lists | None
    offsets: Offsets
    segments: Segments | None


def mask_of_keys(operands: AttentionOperands[Tensor]) -> Mask:
    """Return the mask of a kernel that visits keys."""
    segments = visiting_keys(segments_of(operands))
    return Mask(lists_of_keys(operands), offsets_of(operands), segments)


def mask_of_queries(operands: AttentionOperands[Tensor]) -> Mask:
    """Return the mask of a kernel that visits queries."""
    segments = visiting_queries(segments_of(operands))
    return Mask(lists_of_queries(operands), offsets_of(operands), segments)


def mask_argument(call: KernelCall) -> dict[str, Any]:
    """Return a kernel's mask, its last operand, with the numbers of its lists."""
    mask = call.layouts[-1]
    return {"mask": mask._replace(lists=with_numbers(mask.lists, call.spec))}
