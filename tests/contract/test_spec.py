"""The semantic rules: how causal and window fold into one, and which keys a query sees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interop.contract.spec import AttentionSpec, Window

SEES_ALL = Window()


def spec_of(seq_q: int, seq_kv: int, window: Window = SEES_ALL, **changes) -> AttentionSpec:
    sizes = {"batch": 1, "heads_q": 1, "heads_kv": 1, "head_dim": 16, "head_dim_v": 16}
    return AttentionSpec(
        seq_q=seq_q, seq_kv=seq_kv, dtype="float32", scale=1.0, window=window, **(sizes | changes)
    )


@pytest.mark.parametrize(
    ("causal", "window_size", "expected"),
    [
        (False, None, Window(None, None)),
        (True, None, Window(None, 0)),
        (False, (None, None), Window(None, None)),
        (True, (None, None), Window(None, 0)),
        (False, (3, 5), Window(3, 5)),
        (True, (3, 5), Window(3, 0)),
        (True, (3, None), Window(3, 0)),
        (True, (0, 0), Window(0, 0)),
        (False, (None, 5), Window(None, 5)),
    ],
)
def test_causal_folds_into_the_window(causal, window_size, expected):
    assert Window.of(causal, window_size) == expected


sides = st.none() | st.integers(0, 12)


@given(st.integers(0, 9), st.integers(0, 9), sides, sides)
def test_visible_keys_follow_the_written_rule(seq_q, seq_kv, left, right):
    spec = spec_of(seq_q, seq_kv, Window(left, right))
    for query in range(seq_q):
        position = query + seq_kv - seq_q
        seen = [
            key
            for key in range(seq_kv)
            if (left is None or key >= position - left)
            and (right is None or key <= position + right)
        ]
        assert list(spec.visible_keys(query)) == seen


def test_the_last_query_stands_at_the_last_key():
    for seq_q, seq_kv in ((1, 7), (7, 7), (9, 7)):
        spec = spec_of(seq_q, seq_kv, Window(0, 0))
        assert list(spec.visible_keys(seq_q - 1)) == [seq_kv - 1]


@pytest.mark.parametrize(("heads_q", "heads_kv", "group"), [(8, 8, 1), (8, 2, 4), (0, 0, 1)])
def test_group_size(heads_q, heads_kv, group):
    assert spec_of(1, 1, heads_q=heads_q, heads_kv=heads_kv).group_size == group


def test_is_empty_when_any_size_that_is_read_or_written_is_zero():
    assert not spec_of(1, 1).is_empty
    assert spec_of(0, 1).is_empty
    assert spec_of(1, 0).is_empty
    assert spec_of(1, 1, batch=0).is_empty
    assert spec_of(1, 1, heads_q=0, heads_kv=1).is_empty
