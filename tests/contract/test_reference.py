"""The oracle, held to attention written as one loop over rows, and to its automatic derivative."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.reference import attention_backward, attention_forward, visibility
from twin_attention.contract.spec import AttentionSpec, Window

SPEC = AttentionSpec(
    batch=2, seq_q=5, seq_kv=7, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24,
    dtype="float32", scale=0.3,
)  # fmt: skip


def attention_by_rows(q, k, v, spec):
    """The definition: each row by itself, over the keys that it sees."""
    outs, lses = [], []
    for b in range(spec.batch):
        for h in range(spec.heads_q):
            kv_head = h // (spec.heads_q // spec.heads_kv)
            for i in range(spec.seq_q):
                keys = list(spec.visible_keys(i))
                if not keys:
                    outs.append(q.new_zeros(spec.head_dim_v))
                    lses.append(q.new_tensor(float("-inf")))
                    continue
                s = spec.scale * k[b, keys, kv_head] @ q[b, i, h]
                if spec.softcap is not None:
                    s = spec.softcap * torch.tanh(s / spec.softcap)
                lses.append(torch.logsumexp(s, dim=0))
                outs.append(torch.softmax(s, dim=0) @ v[b, keys, kv_head])
    out = torch.stack(outs).reshape(spec.batch, spec.heads_q, spec.seq_q, spec.head_dim_v)
    lse = torch.stack(lses).reshape(spec.batch, spec.heads_q, spec.seq_q)
    return out.transpose(1, 2), lse


def inputs_of(spec, seed=0):
    """q, k, v, dout, dlse in float64."""
    make = torch.Generator().manual_seed(seed)
    shapes = (
        (spec.batch, spec.seq_q, spec.heads_q, spec.head_dim),
        (spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim),
        (spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim_v),
        (spec.batch, spec.seq_q, spec.heads_q, spec.head_dim_v),
        (spec.batch, spec.heads_q, spec.seq_q),
    )
    return [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]


def close(got, want):
    torch.testing.assert_close(torch.as_tensor(got), want, rtol=1e-11, atol=1e-11)


sides = st.none() | st.integers(0, 8)
specs = st.builds(
    replace,
    st.just(SPEC),
    batch=st.integers(1, 2),
    seq_q=st.integers(1, 7),
    seq_kv=st.integers(1, 7),
    heads_q=st.sampled_from([2, 4, 6]),
    scale=st.sampled_from([0.0, 0.3, -0.5, 2.0]),
    window=st.builds(Window, sides, sides),
    softcap=st.none() | st.sampled_from([0.5, 5.0]),
)


@given(specs)
def test_forward_and_backward_equal_the_definition(spec):
    q, k, v, dout, dlse = inputs_of(spec)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = attention_by_rows(q, k, v, spec)
    seen = torch.isfinite(lse)
    # Where a row sees no key its lse is a constant, so its gradient drops out.
    objective = (out * dout).sum() + (lse[seen] * dlse[seen]).sum()
    wanted = (
        torch.autograd.grad(objective, (q, k, v), materialize_grads=True)
        if objective.requires_grad
        else [torch.zeros_like(x) for x in (q, k, v)]
    )

    arrays = [x.detach().numpy() for x in (q, k, v)]
    got_out, got_lse = attention_forward(FlashOperands(*arrays), spec, np.float64)
    close(got_out, out.detach())
    close(got_lse, lse.detach())
    gradients = attention_backward(
        dout.numpy(), dlse.numpy(), FlashOperands(*arrays), spec, np.float64
    )
    for got, want in zip(gradients, wanted, strict=True):
        close(got, want)


def test_no_gradient_of_the_lse_means_zero():
    q, k, v, dout, dlse = (x.numpy() for x in inputs_of(SPEC))
    without = attention_backward(dout, None, FlashOperands(q, k, v), SPEC, np.float64)
    zero = attention_backward(dout, 0 * dlse, FlashOperands(q, k, v), SPEC, np.float64)
    other = attention_backward(dout, dlse, FlashOperands(q, k, v), SPEC, np.float64)
    assert all(np.array_equal(a, b) for a, b in zip(without, zero, strict=True))
    assert not np.allclose(without[0], other[0])


def test_a_row_without_keys_gives_nothing_and_takes_nothing():
    spec = replace(SPEC, seq_q=7, seq_kv=4, window=Window(None, 0))
    q, k, v, dout, dlse = (x.numpy() for x in inputs_of(spec))
    out, lse = attention_forward(FlashOperands(q, k, v), spec, np.float64)
    assert (out[:, :3] == 0).all()
    assert (lse[:, :, :3] == -np.inf).all()
    assert np.isfinite(lse[:, :, 3:]).all()
    dq, dk, dv = attention_backward(dout, dlse, FlashOperands(q, k, v), spec, np.float64)
    assert (dq[:, :3] == 0).all()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))
    poisoned = dout.copy()
    poisoned[:, :3] = 1e6
    again = attention_backward(poisoned, dlse, FlashOperands(q, k, v), spec, np.float64)
    assert all(np.array_equal(a, b) for a, b in zip((dq, dk, dv), again, strict=True))


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"seq_q": 0},
        {"seq_kv": 0},
        {"seq_q": 0, "seq_kv": 0},
        {"heads_q": 0},
        {"heads_q": 0, "heads_kv": 0},
    ],
)
@pytest.mark.parametrize("window", [Window(), Window(3, 0)])
def test_empty_problems_keep_their_shapes(sizes, window):
    spec = replace(SPEC, window=window, **sizes)
    q, k, v, dout, dlse = (x.numpy() for x in inputs_of(spec))
    out, lse = attention_forward(FlashOperands(q, k, v), spec, np.float64)
    assert out.shape == dout.shape
    assert lse.shape == dlse.shape
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    gradients = attention_backward(dout, dlse, FlashOperands(q, k, v), spec, np.float64)
    for got, x in zip(gradients, (q, k, v), strict=True):
        assert got.shape == x.shape
        assert (got == 0).all()


def test_scores_that_overflow_exp_do_not_overflow_the_result():
    spec = replace(SPEC, scale=1e4)
    q, k, v, *_ = (x.numpy() for x in inputs_of(spec))
    out, lse = attention_forward(FlashOperands(q, k, v), spec, np.float64)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_the_dtype_of_every_operation_is_the_callers():
    """bfloat16 in, computed in bfloat16: visibly worse than the same numbers in float32."""
    q, k, v, *_ = (x.bfloat16() for x in inputs_of(SPEC))
    exact, _ = attention_forward(FlashOperands(q, k, v), SPEC, torch.float64)
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        out, lse = attention_forward(FlashOperands(q, k, v), SPEC, dtype)
        assert out.dtype == lse.dtype == dtype
        errors[dtype] = float((out.double() - exact).abs().max())
    assert errors[torch.float32] < 1e-5 < 1e-3 < errors[torch.bfloat16]


def test_namespaces_agree():
    """The same function serves numpy, torch and JAX arrays."""
    import jax
    import jax.numpy as jnp

    q, k, v, dout, dlse = (x.float().numpy() for x in inputs_of(SPEC))
    spec = replace(SPEC, window=Window(3, 1), softcap=4.0)

    def run(convert, dtype):
        x = FlashOperands(*map(convert, (q, k, v)))
        out, lse = attention_forward(x, spec, dtype)
        gradients = attention_backward(convert(dout), convert(dlse), x, spec, dtype)
        return [np.asarray(a) for a in (out, lse, *gradients)]

    by_numpy, by_torch = run(np.asarray, np.float32), run(torch.asarray, torch.float32)
    with jax.default_matmul_precision("highest"):  # JAX's default on a GPU is TF32
        by_jax = run(jnp.asarray, jnp.float32)
    for other in (by_torch, by_jax):
        for a, b in zip(by_numpy, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_visibility_is_the_specs_rule():
    assert visibility(np, SPEC, None) is None
    spec = replace(SPEC, window=Window(2, 1))
    seen = visibility(np, spec, None)
    for query in range(spec.seq_q):
        assert np.flatnonzero(seen[query]).tolist() == list(spec.visible_keys(query))
