from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_attn import paged_attention
from pallas_attn.kernels.explicit import sequences as scalars
from pallas_attn.kernels.library.sequences import locate_tokens


def offsets(*lengths):
    return jnp.asarray([0, *accumulate(lengths)], jnp.int32)


DATA = [(offsets(3, 4), [13, 4]), (offsets(0, 9), [1, 16])]


def operands(cu, lengths, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    pools = normal(5, 8, 2, 16), normal(5, 8, 2, 16)
    tables = jnp.array([[3, 1], [0, 4]], jnp.int32)
    return normal(9, 4, 16), *pools, tables, jnp.asarray(lengths, jnp.int32), cu


attend = partial(paged_attention, return_lse=True, implementation="triton")


def assert_close(got, want):
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    np.testing.assert_allclose(*(x[0].astype(jnp.float32) for x in (got, want)), atol=0.02)


def test_one_trace_serves_all_offsets():
    traces = []

    @jax.jit
    def run(*inputs):
        traces.append(inputs)
        return attend(*inputs)

    run(*operands(*DATA[0]))  # the first interpreted kernel of a process leaves another context
    traces.clear()
    for seed, data in enumerate(DATA):
        inputs = operands(*data, seed)
        assert_close(run(*inputs), paged_attention(*inputs, return_lse=True))
    assert len(traces) <= 1


def test_vmap_over_batches():
    both = [operands(*data, seed) for seed, data in enumerate(DATA)]
    got = jax.jit(jax.vmap(attend))(*(jnp.stack(x) for x in zip(*both, strict=True)))
    for i, inputs in enumerate(both):
        assert_close([x[i] for x in got], paged_attention(*inputs, return_lse=True))


def test_a_gradient_is_refused():
    q, *others = operands(*DATA[0])
    message = "^paged_attention: a gradient is not supported"
    with pytest.raises(NotImplementedError, match=message):
        jax.grad(lambda q: paged_attention(q, *others).sum())(q)


def located(cu, num_tokens, rows, block, locate=locate_tokens):
    tiles = num_tokens * rows // block + len(cu)

    def kernel(cu_ref, found_ref):
        tile = pl.program_id(0)
        for i, x in enumerate(locate(cu_ref, tile, num_tokens, rows, block)):
            found_ref[tile, i] = x

    shape = jax.ShapeDtypeStruct((tiles, 4), jnp.int32)
    return np.asarray(pl.pallas_call(kernel, (shape), grid=(tiles,), interpret=True)(cu))


@pytest.mark.parametrize("lengths", [(7, 0, 30, 1, 1), (1,) * 130])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("locate", [locate_tokens, scalars.locate_tokens])
def test_tiles_have_each_row_of_each_sequence_once(lengths, rows, locate):
    cu = offsets(*lengths)
    total, seen = sum(lengths) + 4, []
    ends = [*cu.tolist(), total]
    for sequence, first, tokens, start in located(cu, total, rows, 16, locate):
        assert (first, first + tokens) == (ends[sequence], ends[sequence + 1])
        seen += [first * rows + row for row in range(start, min(start + 16, tokens * rows))]
    assert sorted(seen) == [*range(total * rows)]


def test_the_first_tile_of_each_sequence_comes_before_the_others():
    tiles = located(offsets(30, 0, 1, 17), 52, 1, 16)
    assert [(sequence, start) for sequence, *_, start in tiles[:5]] == [(n, 0) for n in range(5)]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("locate", [locate_tokens, scalars.locate_tokens])
@pytest.mark.parametrize(
    "bad", [[0, 500, -9, 30], [-5, -4, 1, 1], [2**31 - 1] * 4, [7, -(2**31), 4, 3]], ids=str
)
def test_wrong_offsets_stay_inside_the_arrays(bad, rows, locate):
    cu = jnp.asarray(bad, jnp.int32)
    sequence, first, tokens, start = located(cu, 50, rows, 16, locate).T
    assert ((sequence >= 0) & (sequence <= 3)).all()
    assert ((first >= 0) & (tokens >= 0) & (first + tokens <= 50)).all()
    assert (start >= 0).all()
