"""The oracle, against a loop over rows and against automatic derivatives."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.reference.attention import attention_backward, attention_forward
from twin_attention.contract.spec import AttentionSpec, Window

SPEC = AttentionSpec(
    batch=2, seq_q=5, seq_kv=7, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24,
    dtype="float32", scale=0.3,
)  # fmt: skip


def attention_by_rows(q, k, v, sinks, q_ids, kv_ids, spec):
    """A sink is a key of value 0."""
    outs, lses = [], []
    for b in range(spec.batch):
        for h in range(spec.heads_q):
            kv_head = h // (spec.heads_q // spec.heads_kv)
            for i in range(spec.seq_q):
                keys = list(spec.visible_keys(i))
                if q_ids is not None:
                    keys = [j for j in keys if 0 <= q_ids[b, i] == kv_ids[b, j]]
                if not keys and sinks is None:
                    outs.append(q.new_zeros(spec.head_dim_v))
                    lses.append(q.new_tensor(float("-inf")))
                    continue
                s = spec.scale * k[b, keys, kv_head] @ q[b, i, h]
                if spec.softcap is not None:
                    s = spec.softcap * torch.tanh(s / spec.softcap)
                values = v[b, keys, kv_head]
                if sinks is not None:
                    s = torch.cat([s, sinks[h, None]])
                    values = torch.cat([values, torch.zeros_like(v[b, :1, kv_head])])
                lses.append(torch.logsumexp(s, dim=0))
                outs.append(torch.softmax(s, dim=0) @ values)
    out = torch.stack(outs).reshape(spec.batch, spec.heads_q, spec.seq_q, spec.head_dim_v)
    lse = torch.stack(lses).reshape(spec.batch, spec.heads_q, spec.seq_q)
    return out.transpose(1, 2), lse


def inputs_of(spec, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = (
        (spec.batch, spec.seq_q, spec.heads_q, spec.head_dim),
        (spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim),
        (spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim_v),
        (spec.batch, spec.seq_q, spec.heads_q, spec.head_dim_v),
        (spec.batch, spec.heads_q, spec.seq_q),
    )
    return [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]


def sinks_of(spec):
    return torch.linspace(-1, 1.5, spec.heads_q, dtype=torch.float64)


def ids_of(spec, seed=1):
    make = torch.Generator().manual_seed(seed)
    sizes = (spec.batch, spec.seq_q), (spec.batch, spec.seq_kv)
    ids = [torch.randint(-2, 3, size, generator=make, dtype=torch.int32) for size in sizes]
    return ids if spec.segmented else [None, None]


def problem(spec, sinks=False):
    *qkv, dout, dlse = (x.numpy() for x in inputs_of(spec))
    return FlashOperands(*qkv, sinks_of(spec).numpy() if sinks else None), dout, dlse


def present(operands):
    return [x for x in operands if x is not None]


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
    segmented=st.booleans(),
)


@given(specs, st.booleans())
def test_forward_and_backward_equal_the_definition(spec, with_sinks):
    q, k, v, dout, dlse = inputs_of(spec)
    ids = ids_of(spec)
    operands = FlashOperands(q, k, v, sinks_of(spec) if with_sinks else None, *ids)
    given = [x.requires_grad_() for x in present(operands[:4])]
    out, lse = attention_by_rows(*operands[:6], spec)
    seen = torch.isfinite(lse)
    # The lse of a row without keys is a constant.
    objective = (out * dout).sum() + (lse[seen] * dlse[seen]).sum()
    wanted = (
        torch.autograd.grad(objective, given, materialize_grads=True)
        if objective.requires_grad
        else [torch.zeros_like(x) for x in given]
    )

    for x, of in zip((q, k, v, dout), (0, 1, 1, 0), strict=True):
        if spec.segmented:  # what padding holds does not matter
            x.detach()[ids[of] < 0] = torch.nan
    arrays = operands._make(None if x is None else x.detach().numpy() for x in operands)
    got_out, got_lse = attention_forward(arrays, spec, np.float64)
    close(got_out, out.detach())
    close(got_lse, lse.detach())
    gradients = attention_backward(dout.numpy(), dlse.numpy(), arrays, spec, np.float64)
    for got, want in zip(present(gradients), wanted, strict=True):
        close(got, want)


@pytest.mark.parametrize("sink", [-800.0, -300.0, 0.0, 700.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_without_keys_has_its_sink_as_lse(sink, dtype):
    """However far the sink is from 0: its exponential may be 0 or infinite."""
    spec = replace(SPEC, seq_q=7, seq_kv=4, window=Window(None, 0))
    operands, dout, dlse = problem(spec)
    operands = operands._replace(sinks=np.full(spec.heads_q, sink))
    out, lse = attention_forward(operands, spec, dtype)
    assert (out[:, :3] == 0).all()
    assert (lse[:, :, :3] == sink).all()
    dq, _dk, _dv, dsinks, *_ = attention_backward(dout, dlse, operands, spec, dtype)
    assert (dq[:, :3] == 0).all()
    if sink == -800:  # too small to count in a row with keys
        np.testing.assert_allclose(dsinks, dlse[:, :, :3].sum((0, 2)), rtol=1e-5)


def test_the_dtype_of_every_operation_is_the_callers():
    q, k, v, *_ = (x.bfloat16() for x in inputs_of(SPEC))
    exact, _ = attention_forward(FlashOperands(q, k, v), SPEC, torch.float64)
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        out, lse = attention_forward(FlashOperands(q, k, v), SPEC, dtype)
        assert out.dtype == lse.dtype == dtype
        errors[dtype] = float((out.double() - exact).abs().max())
    assert errors[torch.float32] < 1e-5 < 1e-3 < errors[torch.bfloat16]


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_tf32_products_round_their_operands(library):
    """Those in float64 keep all bits."""
    import jax

    xp = import_module(library)
    q, k, v, dout, dlse = (x.float() for x in inputs_of(SPEC))
    half = 1 << 12
    rounded = [
        ((x.view(torch.int32) + half) & -(2 * half)).view(torch.float32) for x in (q, k, v, dout)
    ]
    in_tf32 = replace(SPEC, precision="tf32")

    def run(spec, dtype, q, k, v, dout):
        x = FlashOperands(*(xp.asarray(x.numpy()) for x in (q, k, v)))
        given = (xp.asarray(y.numpy()) for y in (dout, dlse))
        out, lse = attention_forward(x, spec, dtype)
        return [
            np.asarray(y) for y in (out, lse, *present(attention_backward(*given, x, spec, dtype)))
        ]

    with jax.default_matmul_precision("highest"), jax.enable_x64(True):
        found = run(in_tf32, xp.float32, q, k, v, dout)
        of_rounded = run(in_tf32, xp.float32, *rounded)
        of_ieee = run(SPEC, xp.float32, q, k, v, dout)
        in_float64 = [run(spec, xp.float64, q, k, v, dout) for spec in (SPEC, in_tf32)]
    for a, b, c in zip(found, of_rounded, of_ieee, strict=True):
        np.testing.assert_array_equal(a, b)
        assert 1e-5 < np.abs(a - c).max() < 1e-2 * max(1, np.abs(c).max())
    for a, b in zip(*in_float64, strict=True):
        np.testing.assert_array_equal(a, b)
