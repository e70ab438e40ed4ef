import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin_attention.contract.paged_spec import DecodeSpec, PagedCache
from twin_attention.contract.spec import AttentionSpec, MergeSpec, ScoreRule, Window

SEES_ALL = Window()
CACHE = PagedCache(
    num_pages=9, page_size=4, max_pages=3, heads=2, head_dim=16, head_dim_v=24, dtype="float16"
)
DECODE = DecodeSpec(batch=1, tokens=2, heads_q=8, cache=CACHE, dtype="float16", scale=1.0)


def spec_of(seq_q: int, seq_kv: int, window: Window = SEES_ALL, **changes) -> AttentionSpec:
    sizes = {"batch": 1, "heads_q": 1, "heads_kv": 1, "head_dim": 16, "head_dim_v": 16}
    return AttentionSpec(
        seq_q=seq_q,
        seq_kv=seq_kv,
        dtype="float32",
        window=window,
        **(sizes | {"scale": 1.0} | changes),
    )


@pytest.mark.parametrize(
    ("causal", "window_size", "expected"),
    [
        (False, None, Window(None, None)), (True, None, Window(None, 0)),
        (False, (None, None), Window(None, None)), (True, (None, None), Window(None, 0)),
        (False, (3, 5), Window(3, 5)), (True, (3, 5), Window(3, 0)),
        (True, (3, None), Window(3, 0)), (True, (0, 0), Window(0, 0)),
        (False, (None, 5), Window(None, 5)),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("scale", "softcap", "scale_first"),
    [(0.25, None, False), (0.25, 5.0, True), (0.0, None, True), (-0.25, None, True)],
)
def test_the_exponent_takes_the_scale_where_it_can(scale, softcap, scale_first):
    rule = spec_of(1, 1, scale=scale, softcap=softcap).scores
    exp2_scale = math.log2(math.e) * (1.0 if scale_first else scale)
    assert rule[:4] == (scale, softcap, scale_first, exp2_scale)
    assert replace(DECODE, scale=scale, softcap=softcap).scores == rule


@pytest.mark.parametrize(
    ("scale", "softcap", "cap_scale", "small_cap"),
    [
        (0.25, None, None, False), (0.25, 5.0, 0.05, True), (-0.25, 55.0, -0.25 / 55, True),
        (0.25, 56.0, 0.25 / 56, False), (-8.0, 2.0**-126, -(2.0**120), True),
    ],
)  # fmt: skip
def test_a_rule_has_what_a_softcap_needs(scale, softcap, cap_scale, small_cap):
    rule = spec_of(1, 1, scale=scale, softcap=softcap).scores
    assert (rule.cap_scale, rule.small_cap) == (cap_scale, small_cap)


def test_scores_of_a_quantised_cache_are_scaled_first():
    spec = replace(DECODE, scale=0.25, cache=replace(CACHE, dtype="int8"))
    assert spec.scores == ScoreRule(0.25, None, True, math.log2(math.e))


def test_a_window_is_bounded_by_the_problem():
    assert spec_of(3, 4, Window(2**31, 5)).bounded_window == Window(7, 5)
    assert spec_of(3, 4, Window(None, 2**31)).bounded_window == Window(None, 7)
    assert replace(DECODE, window_left=2**31).bounded_window == Window(CACHE.capacity, 0)


def test_what_has_a_size_of_zero_is_empty():
    merge = MergeSpec(num_states=2, batch=1, tokens=1, heads=1, head_dim_v=16, dtype="float16")
    cases = {
        spec_of(1, 1): ("batch", "seq_q", "seq_kv", "heads_q"),
        DECODE: ("batch", "tokens", "heads_q"),
        merge: ("num_states", "batch", "tokens", "heads"),
    }
    for spec, names in cases.items():
        assert not spec.is_empty
        assert all(replace(spec, **{name: 0}).is_empty for name in names)
    for name in ("num_pages", "max_pages"):
        assert replace(DECODE, cache=replace(CACHE, **{name: 0})).is_empty


@given(st.integers(-3, 15), st.integers(1, 6), sides)
def test_a_new_token_sees_what_the_last_queries_of_causal_attention_see(length, tokens, left):
    spec = replace(DECODE, tokens=tokens, window_left=left)
    seq_kv = min(max(length, 0), CACHE.capacity)
    same = spec_of(tokens, seq_kv, Window(left, 0))
    for token in range(tokens):
        assert list(spec.visible_keys(token, length)) == list(same.visible_keys(token))


def test_dtypes_of_a_cache():
    for dtype in ("float16", "bfloat16", "int8", "float8_e4m3fn"):
        spec = replace(DECODE, cache=replace(CACHE, dtype=dtype))
        bits = 16 if dtype.endswith("float16") else 8
        assert spec.dtype_bits == spec.cache.dtype_bits == bits
        assert spec.cache.is_quantized == (bits == 8)
