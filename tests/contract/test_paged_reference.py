"""The oracle of paged decoding, against loops over tokens and keys."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.paged_spec import PagedCache
from twin_attention.contract.reference.cache import quantize
from twin_attention.contract.reference.merge import merge, merge_backward
from twin_attention.contract.reference.paged import paged_forward
from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = DecodeCase(
    "loops", lengths=(0, 1, 4, 5, 9, 12), tokens=3, page_size=4, max_pages=3, head_dim=16,
    head_dim_v=24, dtype="float16",
)  # fmt: skip
INT8, FLOAT8 = (PagedCache(1, 4, 1, 2, 16, 16, dtype) for dtype in ("int8", "float8_e4m3fn"))


def decode_by_loops(
    q, k_pages, v_pages, block_tables, seq_lens, sinks, k_scale, v_scale, tree_ends, slopes, spec
):
    if v_pages is None:
        v_pages, v_scale = k_pages[..., : spec.head_dim_v], k_scale
    out = np.zeros((spec.batch, spec.tokens, spec.heads_q, spec.head_dim_v))
    lse = np.full((spec.batch, spec.heads_q, spec.tokens), -np.inf)
    page_size = spec.cache.page_size
    for b, t, h in np.ndindex(spec.batch, spec.tokens, spec.heads_q):
        head = h // (spec.heads_q // spec.heads_kv)
        position = seq_lens[b] - spec.tokens + t
        scores, values = [], []
        for j in range(position + 1):
            if spec.window_left is not None and j < position - spec.window_left:
                continue
            new = j - (seq_lens[b] - spec.tokens)
            if tree_ends is not None and new >= 0 and t >= tree_ends[b, new]:
                continue
            page, slot = block_tables[b, j // page_size], j % page_size
            key, value = (x[page, slot, head].astype(float) for x in (k_pages, v_pages))
            if k_scale is not None:
                key, value = key * factor(k_scale, head), value * factor(v_scale, head)
            s = spec.scale * (q[b, t, h].astype(float) @ key)
            if slopes is not None:
                s -= float(slopes[b, h] if slopes.ndim == 2 else slopes[h]) * (position - j)
            scores.append(s if spec.softcap is None else spec.softcap * math.tanh(s / spec.softcap))
            values.append(value)
        logits = scores if sinks is None else [*scores, float(sinks[h])]
        if not logits:
            continue
        largest = max(logits)
        lse[b, h, t] = largest + math.log(math.fsum(math.exp(s - largest) for s in logits))
        for s, value in zip(scores, values, strict=True):
            out[b, t, h] += math.exp(s - lse[b, h, t]) * value
    return out, lse


def factor(scale, head):
    return float(scale[head] if scale.shape else scale)


def inputs_of(case):
    made = make_inputs(case, "cpu")
    return [None if name not in made else to_numpy(made[name]) for name in DecodeOperands._fields]


BITS = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8}


def to_numpy(x):
    name = str(x.dtype).removeprefix("torch.")
    if name not in BITS:
        return x.numpy()
    return x.view(getattr(torch, np.dtype(BITS[name]).name)).numpy().view(name)


def to_torch(x):
    bits = BITS.get(x.dtype.name, x.dtype)
    return torch.from_numpy(np.array(x).view(bits)).view(getattr(torch, x.dtype.name))


NAMESPACES = {
    "numpy": (lambda x: x, np.float64),
    "torch": (to_torch, torch.float64),
    "jax": (jnp.asarray, jnp.float64),
}


def run(namespace, inputs, spec):
    convert, dtype = NAMESPACES[namespace]
    forward = partial(paged_forward, spec=spec, dtype=dtype)
    if namespace == "jax":
        forward = jax.jit(forward)
    with np.errstate(divide="ignore"), jax.enable_x64(True):
        arrays = DecodeOperands(*(None if x is None else convert(x) for x in inputs))
        return [np.asarray(x) for x in forward(arrays)]


def close(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, np.float64)
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


cases = st.builds(
    replace,
    st.just(CASE),
    lengths=st.lists(st.integers(0, 12), max_size=3).map(tuple),
    tokens=st.integers(1, 6),
    heads_q=st.sampled_from([2, 4]),
    heads_kv=st.sampled_from([1, 2]),
    page_size=st.sampled_from([1, 3, 4, 12]),
    max_pages=st.just(12),
    scale=st.sampled_from([None, 0.0, -0.5]),
    window_size=st.none() | st.tuples(st.none() | st.integers(0, 9), st.sampled_from([None, 0, 3])),
    softcap=st.none() | st.sampled_from([0.5, 5.0]),
    sinks=st.booleans(),
    tree=st.sampled_from(["", "any"]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    kv_dtype=st.sampled_from([None, "int8", "float8_e4m3fn"]),
    latent=st.booleans(),
    alibi=st.sampled_from(["", "heads", "all"]),
)


@given(cases)
def test_any_decode_equals_the_definition(case):
    inputs = inputs_of(case)
    close(run("numpy", inputs, case.spec), decode_by_loops(*inputs, case.spec))


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize(
    ("kv_dtype", "scale_shape"), [(None, ()), ("int8", ()), ("float8_e4m3fn", (2,))]
)
def test_namespaces_agree(namespace, kv_dtype, scale_shape):
    case = replace(
        CASE, dtype="bfloat16", kv_dtype=kv_dtype, scale_shape=scale_shape, sinks=True,
        window_size=(5, 0), softcap=2.0, tree="any",
    )  # fmt: skip
    inputs = inputs_of(case)
    close(run(namespace, inputs, case.spec), decode_by_loops(*inputs, case.spec))


def test_the_dtype_of_every_operation_is_the_callers():
    case = replace(CASE, dtype="bfloat16", sinks=True, kv_dtype="int8")
    inputs = DecodeOperands(*(None if x is None else to_torch(x) for x in inputs_of(case)))
    exact, _ = paged_forward(inputs, case.spec, torch.float64)
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        out, lse = paged_forward(inputs, case.spec, dtype)
        assert out.dtype == lse.dtype == dtype
        errors[dtype] = float((out.double() - exact).abs().max())
    assert errors[torch.float32] < 1e-5 < 1e-3 < errors[torch.bfloat16]


def states_of(num_states, seed=0):
    """[N, 2, 3, 2, 16]; some, and one row of all, saw nothing and hold NaN."""
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((num_states, 2, 3, 2, 16))
    lses = 3 * rng.standard_normal((num_states, 2, 2, 3))
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    lses[:, 1, 0, 2] = -np.inf
    outs[np.isinf(lses.swapaxes(2, 3))] = np.nan
    return outs, lses


def run_merge(namespace, outs, lses):
    convert, dtype = NAMESPACES[namespace]
    with np.errstate(divide="ignore"), jax.enable_x64(True):
        return [np.asarray(x) for x in merge(convert(outs), convert(lses), dtype)]


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("num_states", [0, 1, 2, 5])
def test_merge_equals_the_definition(namespace, num_states):
    outs, lses = states_of(num_states)
    want, want_lse = np.zeros((2, 3, 2, 16)), np.full((2, 2, 3), -np.inf)
    for b, s, h in np.ndindex(2, 3, 2):
        weights = np.exp(lses[:, b, h, s])
        for weight, out in zip(weights, outs[:, b, s, h], strict=True):
            if weight > 0:
                want[b, s, h] += weight / weights.sum() * out
        if weights.sum() > 0:
            want_lse[b, h, s] = math.log(weights.sum())
    close(run_merge(namespace, outs, lses), (want, want_lse))


def test_merge_of_lses_that_overflow_exp():
    outs, lses = states_of(3)
    for shift in (-2000.0, 2000.0):
        shifted = run_merge("numpy", outs, lses + shift)
        want, want_lse = run_merge("numpy", outs, lses)
        close(shifted, (want, want_lse + shift))


@pytest.mark.parametrize("dlse_is_given", [True, False])
def test_gradients_of_a_merge_are_those_of_its_formula(dlse_is_given):
    make = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64)

    states = [normal(4, 2, 3, 5, 16).requires_grad_(), normal(4, 2, 5, 3).requires_grad_()]
    dout, dlse = normal(2, 3, 5, 16), normal(2, 5, 3) if dlse_is_given else None
    given = dout, torch.zeros(2, 5, 3) if dlse is None else dlse
    want = torch.autograd.grad(merge(*states, torch.float64), states, given)
    outs, lses = (x.detach() for x in states)
    got = merge_backward(dout, dlse, outs, lses, torch.float64)
    for x, y in zip(got, want, strict=True):
        close(x.numpy(), y.numpy())
    # A part that saw nothing, wherever it stands, has gradients 0 and changes no other's.
    outs = torch.cat([outs[:2], torch.full_like(outs[:1], torch.nan), outs[2:]])
    lses = torch.cat([lses[:2], torch.full_like(lses[:1], -torch.inf), lses[2:]])
    found = merge_backward(dout, dlse, outs, lses, torch.float64)
    for x, y in zip(found, got, strict=True):
        assert (x[2] == 0).all()
        close(x[[0, 1, 3, 4]].numpy(), y.numpy())
    nothing = merge_backward(dout, dlse, outs[2:3], lses[2:3], torch.float64)
    assert all((x == 0).all() for x in nothing)


def codes(cache):
    if cache.dtype == "int8":
        return np.arange(-127, 128)
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return np.unique(every[np.isfinite(every)])


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("cache", [INT8, FLOAT8], ids=lambda cache: cache.dtype)
@pytest.mark.parametrize("scale", [np.float32(1), np.float32([0.25, 3.0])], ids=["one", "heads"])
def test_quantize_gives_the_nearest_number_that_the_cache_holds(namespace, cache, scale):
    """Ties go to the even one; too large numbers to the largest."""
    convert, _ = NAMESPACES[namespace]
    numbers = codes(cache)
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(np.float32(ties), np.float32(to)) for to in (-np.inf, np.inf)]
    beyond = [2 * numbers[0], 2 * numbers[-1], 1e30, -1e30]
    x = np.concatenate([numbers, ties, *near, beyond]).astype(np.float32)
    x = np.resize(x, (1, -(-x.size // 32), 2, 16))
    dtype = getattr(torch, cache.dtype) if namespace == "torch" else np.dtype(cache.dtype)
    scaled = convert(x * np.reshape(scale, (-1, 1)))
    got = quantize(scaled, convert(np.asarray(scale)), cache, dtype)
    got = np.asarray(got.float() if namespace == "torch" else got).astype(np.float32)
    index = np.searchsorted(numbers, x).clip(1, numbers.size - 1)
    below, above = numbers[index - 1], numbers[index]
    below_is_even = (index - 1 - numbers.size // 2) % 2 == 0  # numbered from 0, as their bits are
    nearer_below = (x - below < above - x) | ((x - below == above - x) & below_is_even)
    np.testing.assert_array_equal(got, np.where(nearer_below, below, above))
