from __future__ import annotations

from typing import Any

from twin_attention.contract.spec import WINDOW_UNLIMITED
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.operands import head_dims, is_head_dim
from twin_attention.contract.validate.options import check_integer


def check_heads(d_model: Any, num_heads: Any, num_heads_kv: Any) -> tuple[int, int]:
    """Return the head dimension and number of kv heads."""
    for name, x in (("d_model", d_model), ("num_heads", num_heads)):
        check_integer(name, x, 1, WINDOW_UNLIMITED)
    if d_model % num_heads:
        fail(ValueError, "num_heads", f"a divisor of d_model {d_model}", num_heads)
    head_dim = d_model // num_heads
    if not is_head_dim(head_dim):
        expected = f"a number that makes d_model // num_heads {head_dims()}"
        fail(NotImplementedError, "num_heads", expected, f"{num_heads}, which makes it {head_dim}")
    if num_heads_kv is None:
        return head_dim, num_heads
    check_integer("num_heads_kv", num_heads_kv, 1, WINDOW_UNLIMITED, or_else="None or ")
    if num_heads % num_heads_kv:
        fail(ValueError, "num_heads_kv", f"a divisor of num_heads {num_heads}", num_heads_kv)
    return head_dim, num_heads_kv


def check_tokens(shape: tuple[int, ...], d_model: int) -> None:
    """Check [B, S, d_model]."""
    if len(shape) != 3 or shape[2] != d_model:
        fail(ValueError, "x", f"shape [B, S, d_model {d_model}]", tuple(shape))
