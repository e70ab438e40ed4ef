"""FLOPs and bytes, held to counting by hand."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from interop.contract.cost import (
    backward_bytes,
    backward_flops,
    forward_bytes,
    forward_flops,
    visible_pairs,
)
from interop.contract.spec import AttentionSpec, Window

SPEC = AttentionSpec(
    batch=2, seq_q=3, seq_kv=5, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24,
    dtype="float16", scale=1.0,
)  # fmt: skip

sides = st.none() | st.integers(0, 15)


@given(st.integers(0, 12), st.integers(0, 12), sides, sides)
def test_visible_pairs_count_the_visible_keys(seq_q, seq_kv, left, right):
    spec = replace(SPEC, seq_q=seq_q, seq_kv=seq_kv, window=Window(left, right))
    assert visible_pairs(spec) == sum(len(spec.visible_keys(query)) for query in range(seq_q))


def test_a_causal_rectangle_is_not_half_a_rectangle():
    """Query i of 1024 sees 3073 + i of the 4096 keys: 7/8 of all, where half is often counted."""
    spec = replace(SPEC, seq_q=1024, seq_kv=4096, window=Window(None, 0))
    assert visible_pairs(spec) == sum(3073 + query for query in range(1024)) == 3_670_528
    full = replace(spec, window=Window())
    assert visible_pairs(full) == 1024 * 4096
    assert 0.875 < forward_flops(spec) / forward_flops(full) < 0.876


def test_flops_of_each_matrix_product():
    pairs = 2 * 4 * 3 * 5
    qk, pv = 2 * 16 * pairs, 2 * 24 * pairs
    assert forward_flops(SPEC) == qk + pv
    s, dp, dv, dk, dq = qk, pv, pv, qk, qk
    assert backward_flops(SPEC) == s + dp + dv + dk + dq
    square = replace(SPEC, head_dim_v=16)
    assert backward_flops(square) == 2.5 * forward_flops(square)


def test_bytes_of_each_operand():
    q, k, v, out = (2 * 2 * rows for rows in (3 * 4 * 16, 5 * 2 * 16, 5 * 2 * 24, 3 * 4 * 24))
    lse = 4 * 2 * 4 * 3
    assert forward_bytes(SPEC) == q + k + v + out + lse
    dout = out
    assert backward_bytes(SPEC) == (q + k + v + out + lse + dout) + (q + k + v)


def test_float32_doubles_all_but_the_lse():
    lse = 4 * 2 * 4 * 3
    wide = replace(SPEC, dtype="float32")
    for count in (forward_bytes, backward_bytes):
        assert count(wide) - lse == 2 * (count(SPEC) - lse)
