"""Check what torch does in the place of XLA between kernels of `pallas_attn`, against XLA."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from interop.exchange import to_torch
from pallas_attn.kernels.gradients import SumsOrder, gradient_of_sums, prepare_rows, sinks_gradient
from torch_attn import foreign
from twin_attention.contract.spec import AttentionSpec, VarlenSpec

# Of the explicit families, whose modules need a newer JAX than some tests run with.
ORDERS = {
    "sm80": SumsOrder((2, 2, 8, 4), rows=(0, 2, 4), columns=(1, 5, 3)),
    "sm90": SumsOrder((4, 8, 4, 2, 2), rows=(0, 2, 5, 3), columns=(1, 4, 6)),
}
BATCH, HEADS, SIZE, COLUMNS = 2, 3, 40, 48
LENGTHS = [33, 0, 130, 60]  # the last are padding


def problem(is_packed):
    numbers = (sum(LENGTHS),) * 2 + (HEADS, HEADS, SIZE, SIZE, "bfloat16", 0.3)
    if is_packed:
        return VarlenSpec(1, *numbers, num_sequences=len(LENGTHS) - 1)
    return AttentionSpec(BATCH, *numbers)


def offsets_of(spec):
    is_packed = isinstance(spec, VarlenSpec)
    return jnp.cumsum(jnp.array([0, *LENGTHS[:-1]], jnp.int32)) if is_packed else None


def run(name, *args, like, spec):
    """Return what torch makes of arrays, NaN where it writes nothing."""
    new = tuple(torch.full(x.shape, torch.nan, dtype=to_torch(x).dtype) for x in like)
    args = [to_torch(x) if isinstance(x, jnp.ndarray) else x for x in args]
    return foreign.FUSIONS[name](*args, new=new, problem=spec, target=None)


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def row_exists(count):
    """Return which rows of lse2 and delta are one of the packed sequences, or of the padding."""
    exists, start = np.zeros(count, bool), 0
    for number, length in enumerate(LENGTHS):
        first = (start // 128 + number) * 128
        exists[first : first + length] = True
        start += length
    return exists


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("target", ORDERS)
def test_sums_are_scaled_and_ordered_to_the_bit(target, is_packed):
    spec = problem(is_packed)
    like = normal(0, spec.batch, spec.seq_q, HEADS, SIZE, dtype="bfloat16")
    rows = (spec.seq_q // 128 + len(LENGTHS)) * 128 if is_packed else 256
    sums = normal(1, spec.batch, HEADS, rows, COLUMNS)
    args = sums, ORDERS[target], like, spec.scale, offsets_of(spec)
    want = gradient_of_sums(*args)
    (got,) = run("gradient_of_sums", *args, like=[want], spec=spec)
    assert torch.equal(got, to_torch(want))


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_rows_and_the_gradient_of_sinks(is_packed, has_dlse):
    spec, cu_seqlens = problem(is_packed), offsets_of(problem(is_packed))
    dout, out = (normal(i, spec.batch, spec.seq_q, HEADS, SIZE, dtype="bfloat16") for i in (0, 1))
    lse, dlse = (normal(i, spec.batch, HEADS, spec.seq_q) for i in (2, 3))
    lse = jnp.where(lse > 1, -jnp.inf, lse)
    mask = SimpleNamespace(offsets=SimpleNamespace(cu_seqlens_q=cu_seqlens))
    args = dout, dlse if has_dlse else None, out, lse, spec, None
    want = prepare_rows(*args, mask)
    if is_packed:
        mask.offsets.cu_seqlens_q = to_torch(cu_seqlens)
    lse2, delta = run("prepare_rows", *args, mask, like=want, spec=spec)
    torch.testing.assert_close(lse2, to_torch(want[0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(delta, to_torch(want[1]), rtol=1e-5, atol=1e-5)

    sinks = normal(4, HEADS)
    if is_packed:  # rows that do not exist may hold anything
        want = tuple(jnp.where(row_exists(want[0].shape[-1]), x, jnp.nan) for x in want)
    args = sinks, *want, cu_seqlens, spec.seq_q
    (dsinks,) = run("sinks_gradient", *args, like=[sinks], spec=spec)
    torch.testing.assert_close(dsinks, to_torch(sinks_gradient(*args)), rtol=1e-4, atol=1e-5)
