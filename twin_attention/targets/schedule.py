"""The order in which programs take tiles, as the GPU starts them one after the other."""

from __future__ import annotations

from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import padded_head_dim

# 32-bit registers of an SM, on every target.
REGISTERS = 65536
# Bytes of float32 sums that an A100's L2 cache holds.
CACHED_SUMS = 40 * 2**20


def programs_of_sm(block: int, *sizes: int) -> int:
    """Estimate how many programs of a portable kernel fit on an SM at a time, 1 to 4.

    Their accumulators, of `block` rows and `sizes` columns, take half of its registers.
    """
    sums = block * sum(map(padded_head_dim, sizes))
    return max(1, min(4, REGISTERS // 2 // sums))


def heads_together(
    spec: AttentionSpec, num_tiles: int, programs: int, summed_heads: int | None = None
) -> int:
    """Return how many of the last heads are interleaved, their longest tiles first.

    Under a causal mask most SMs would idle while the last head's long tiles end. So the tiles of
    the last heads are sorted as one list: twice as many tiles as programs run at a time. The other
    heads follow each other, so that few heads' keys and values are read at once. In packed
    sequences all heads are interleaved.

    If programs add to sums of dq, all heads are interleaved if the last heads would be half of them
    or more and their sums exceed the L2 cache (docs/history/sm80.md).

    Args:
        num_tiles: tiles of queries of a head, or of keys of a kv head.
        programs: how many run at a time on all SMs.
        summed_heads: how many heads have tiles whose programs add to dq; None if they do not.
    """
    heads = spec.batch * spec.heads_q
    if spec.is_packed:
        return heads
    window = spec.position_window
    if window.right is None or window.left is not None:
        return 1  # all tiles are about equally long
    together = max(1, min(2 * programs // max(num_tiles, 1), heads))
    if summed_heads is not None and 2 * together >= summed_heads:
        rows = together * heads // summed_heads * spec.seq_q
        if 4 * rows * padded_head_dim(spec.head_dim) > CACHED_SUMS:
            return summed_heads
    return together
