"""Bands of distances: how programs share the gradient of a table of distances.

A tile of queries starts at a multiple of block_q. Its band n has the keys from n · block_kv past
its first query's position on. So the band's pairs have the distances n · block_kv - (block_q - 1)
.. n · block_kv + block_kv - 1, the same in every tile of queries.
"""

from __future__ import annotations

from typing import NamedTuple

from twin_attention.contract.spec import AttentionSpec


class Bands(NamedTuple):
    """The bands that hold all pairs of a problem.

    near, num_near: bands before the near ones, whose pairs may have distances below `reach`.
    reach: distances of at least this share one entry of the table on each side.
    radius: of the table, R.
    """

    first: int
    count: int
    near: int
    num_near: int
    reach: int
    radius: int


def bands_of(spec: AttentionSpec, radius: int, block_q: int, block_kv: int) -> Bands:
    """Return the bands of a problem and a table of 2 · radius + 1 distances."""
    # No distance reaches the length, so the ends of a larger table stay 0.
    reach = min(radius, max(spec.seq_q, spec.seq_kv, 1))
    near_first = -(-(reach - 1) // block_kv) if reach else 0
    near_last = (reach + block_q - 2) // block_kv
    first = min(-spec.seq_kv // block_kv, -near_first)
    last = max((spec.seq_q - 1) // block_kv, near_last)
    return Bands(
        first=first,
        count=last - first + 1,
        near=-near_first - first,
        num_near=near_last + near_first + 1,
        reach=reach,
        radius=radius,
    )
