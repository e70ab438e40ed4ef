"""Problem descriptions and the semantic rules that both implementations follow.

Positions are bottom-right aligned: query ``i`` stands at key position
``p = i + seq_kv - seq_q`` and sees key ``j`` when ``p - left <= j <= p + right``.
Causal attention is the rule ``right <= 0``, so a window is all that a kernel needs to know.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIM_MIN, HEAD_DIM_MAX, HEAD_DIM_STEP = 16, 256, 8


@dataclass(frozen=True)
class Window:
    """How far a query sees to the left and to the right of its own position; None is unlimited."""

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, causal: bool, window_size: tuple[int | None, int | None] | None) -> Window:
        """Fold `causal` and `window_size` into one rule."""
        left, right = window_size if window_size is not None else (None, None)
        if causal:
            right = 0 if right is None else min(right, 0)
        return cls(left, right)


@dataclass(frozen=True)
class AttentionSpec:
    """One attention problem: shapes, dtype and semantics, with every default resolved.

    Attributes:
        batch, seq_q, seq_kv, heads_q, heads_kv: counts.
        head_dim: size of a query and of a key.
        head_dim_v: size of a value.
        dtype: one of `DTYPES`.
        scale: factor of the scores q·k.
        window: visibility rule, `causal` included.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
    """

    batch: int
    seq_q: int
    seq_kv: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    window: Window = Window()
    softcap: float | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head (GQA): query head h reads kv head h // group_size."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def diagonal(self) -> int:
        """Key position of query 0."""
        return self.seq_kv - self.seq_q

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to read or nothing to write."""
        return 0 in (self.batch, self.seq_q, self.seq_kv, self.heads_q)

    def visible_keys(self, query: int) -> range:
        """The keys that one query sees."""
        position = query + self.diagonal
        begin, end = 0, self.seq_kv
        if self.window.left is not None:
            begin = max(begin, position - self.window.left)
        if self.window.right is not None:
            end = min(end, position + self.window.right + 1)
        return range(begin, max(begin, end))
