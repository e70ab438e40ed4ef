from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl

from pallas_attn import check_offsets, flash_attention, flash_attention_varlen
from pallas_attn.kernels.explicit import sequences as scalars
from pallas_attn.kernels.gradients import sinks_gradient
from pallas_attn.kernels.library import sequences as library
from pallas_attn.kernels.library.sequences import count_sequence_tiles
from pallas_attn.kernels.library.tiles import ROW_PADDING
from tests.oracle import assert_within_budget
from twin_attention.interop.parity.cases import VarlenCase
from twin_attention.interop.parity.inputs import make_inputs

TOKENS_Q, TOKENS_KV = 70, 90
OPTIONS = {"causal": True, "return_lse": True}
portable_or_reference = pytest.mark.parametrize("implementation", ["reference", "triton"])
CASES = [
    VarlenCase("padding", ((35, 50), (0, 3), (1, 30), (5, 0)), (29, 7)),
    VarlenCase("no padding", ((1, 1), (33, 20), (0, 0), (36, 69)), (0, 0)),
]
CASES = [
    replace(case, heads_q=4, head_dim=16, head_dim_v=24, dtype="float32", sinks=True)
    for case in CASES
]
NAMES = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "sinks", "dout", "dlse"


def results_and_gradients(implementation, q, k, v, cu_q, cu_kv, sinks, dout, dlse):
    def attention(q, k, v, sinks):
        options = {**OPTIONS, "sinks": sinks, "implementation": implementation}
        return flash_attention_varlen(q, k, v, cu_q, cu_kv, **options)

    results, pullback = jax.vjp(attention, q, k, v, sinks)
    return *results, *pullback((dout, dlse))


def assert_right(got, case):
    tensors = [torch.from_numpy(np.array(x)) for x in got]
    assert_within_budget(tensors, make_inputs(case, "cpu"), case.spec)


@pytest.fixture(scope="module")
def problems():
    inputs = [make_inputs(case, "cpu") for case in CASES]
    return [[jnp.asarray(each[name].numpy()) for name in NAMES] for each in inputs]


def stacked(problems):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *problems)


@portable_or_reference
def test_one_trace_serves_all_offsets(implementation, problems):
    traces = []

    @jax.jit
    def run(*inputs):
        traces.append(inputs)
        return results_and_gradients(implementation, *inputs)

    run(*problems[0])  # the first interpreted kernel of a process leaves jax 0.11 another context
    assert_right(run(*problems[0]), CASES[0])
    traces.clear()
    assert_right(run(*problems[1]), CASES[1])
    assert traces == []


@portable_or_reference
def test_vmap_over_batches_of_sequences(implementation, problems):
    got = jax.jit(jax.vmap(partial(results_and_gradients, implementation)))(*stacked(problems))
    for i, case in enumerate(CASES):
        assert_right([x[i] for x in got], case)


@portable_or_reference
def test_recomputed_in_a_scan(implementation, problems):
    def run(q, k, v, cu_q, cu_kv, sinks, dout, dlse):
        @jax.checkpoint
        def step(_, each):
            q, k, v, sinks, cu_q, cu_kv = each
            options = {**OPTIONS, "sinks": sinks, "implementation": implementation}
            return None, flash_attention_varlen(q, k, v, cu_q, cu_kv, **options)

        def scanned(*floats):
            return jax.lax.scan(step, None, (*floats, cu_q, cu_kv))[1]

        results, pullback = jax.vjp(scanned, q, k, v, sinks)
        return *results, *pullback((dout, dlse))

    got = jax.jit(run)(*stacked(problems))
    for i, case in enumerate(CASES):
        assert_right([x[i] for x in got], case)


def test_one_sequence_is_flash_attention_bit_for_bit(problems):
    """With padding on both axes, and sequences without tokens around it."""
    q, k, v, _, _, sinks, *_ = problems[1]
    options = {**OPTIONS, "implementation": "triton"}
    cu_q, cu_kv = jnp.array([0, 0, 37, 37], jnp.int32), jnp.array([0, 0, 50, 50], jnp.int32)
    got = flash_attention_varlen(q, k, v, cu_q, cu_kv, sinks=sinks, **options)
    dense = jax.jit(partial(flash_attention, **options))
    out, lse = dense(q[None, :37], k[None, :50], v[None, :50], sinks=sinks)
    np.testing.assert_array_equal(got[0][:37], out[0])
    np.testing.assert_array_equal(got[1][:, :37], lse[0])
    assert (got[0][37:] == 0).all()
    of_padding = np.broadcast_to(sinks[:, None], (4, 33))
    np.testing.assert_allclose(got[1][:, 37:], of_padding, rtol=1e-6)


def located(locate_tile, cu_q, cu_kv, block, tokens_q=TOKENS_Q, tokens_kv=TOKENS_KV):
    tiles = count_sequence_tiles(tokens_q, len(cu_q) - 1, block)

    def kernel(cu_q_ref, cu_kv_ref, found_ref):
        tile = pl.program_id(0)
        found = locate_tile(cu_q_ref, cu_kv_ref, tile, tokens_q, tokens_kv, block)
        for i, x in enumerate(found):
            found_ref[tile, i] = x

    shape = jax.ShapeDtypeStruct((tiles, 6), jnp.int32)
    call = pl.pallas_call(kernel, grid=(tiles,), out_shape=shape, interpret=True)
    return np.asarray(call(jnp.asarray(cu_q, jnp.int32), jnp.asarray(cu_kv, jnp.int32)))


both_searches = pytest.mark.parametrize(
    "locate_tile", [library.locate_tile, scalars.locate_tile], ids=["library", "scalars"]
)


@both_searches
@pytest.mark.parametrize("num_sequences", [0, 1, 3, 127, 300])
@pytest.mark.parametrize("block", [16, 128])
def test_tiles_have_each_token_of_each_sequence_once(locate_tile, num_sequences, block):
    rng = np.random.default_rng(num_sequences)
    tokens_q, tokens_kv = 1000, 900
    cu_q, cu_kv = (
        np.sort([0, *rng.choice(rng.integers(0, total + 1, 50), num_sequences)])
        for total in (tokens_q, tokens_kv)
    )
    owner = np.full(tokens_q, -1)
    for sequence, first, start, end, first_kv, size_kv in located(
        locate_tile, cu_q, cu_kv, block, tokens_q, tokens_kv
    ):
        rows = slice(start, min(start + block, end))
        assert (owner[rows] == -1).all()
        owner[rows] = sequence
        if end > first and sequence < num_sequences:
            assert (first, end) == tuple(cu_q[sequence : sequence + 2])
            assert (first_kv, first_kv + size_kv) == tuple(cu_kv[sequence : sequence + 2])
        elif end > first:  # padding
            assert (end, size_kv) == (tokens_q, 0)
    lengths = np.diff([*cu_q, tokens_q])
    np.testing.assert_array_equal(owner, np.repeat(np.arange(num_sequences + 1), lengths))


@both_searches
@pytest.mark.parametrize(
    "bad",
    [[0, 500, -9, 30, 2], [-5, -4, -3, 1, 1], [2**31 - 1] * 5, [7, 6, -(2**31), 4, 3]],
    ids=str,
)
def test_wrong_offsets_stay_inside_the_tensors(bad, locate_tile):
    for cu_q, cu_kv in ((bad, [0, 1, 2, 3, 4]), ([0, 1, 2, 3, 4], bad), (bad, bad)):
        sequence, first, start, end, first_kv, size_kv = located(locate_tile, cu_q, cu_kv, 16).T
        assert ((sequence >= 0) & (sequence <= 4)).all()
        assert ((first >= 0) & (first <= start) & (start <= end) & (end <= TOKENS_Q)).all()
        assert ((first_kv >= 0) & (size_kv >= 0) & (first_kv + size_kv <= TOKENS_KV)).all()
        assert (size_kv[end == first] == 0).all()


def test_check_offsets_names_the_first_bad_one():
    good = jnp.array([0, 40, 100], jnp.int32)
    check_offsets(good, good, tokens_q=100, tokens_kv=128)
    with pytest.raises(ValueError, match=r"cu_seqlens_kv\[2\]: expected .* to 99, got 100"):
        check_offsets(good, good, tokens_q=100, tokens_kv=99)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(partial(check_offsets, tokens_q=100, tokens_kv=100))(good, good)


def test_rows_that_do_not_exist_may_hold_anything_for_the_sinks():
    offsets, num_rows = jnp.array([0, 2], jnp.int32), 2
    padded = count_sequence_tiles(num_rows, 1, ROW_PADDING) * ROW_PADDING
    lse2, delta = jnp.full((2, 1, 3, padded), jnp.nan).at[..., :num_rows].set(1.0)
    sinks = jnp.ones(3)
    got = sinks_gradient(sinks, lse2, delta, offsets, num_rows)
    dense = sinks_gradient(sinks, lse2[..., :num_rows], delta[..., :num_rows])
    np.testing.assert_array_equal(got, dense)
