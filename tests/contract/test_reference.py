"""The dtypes of the oracle's operations; test_mask_reference.py has its formula."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.reference.attention import attention_backward, attention_forward
from twin_attention.contract.spec import AttentionSpec, Window

SPEC = AttentionSpec(
    batch=2, seq_q=5, seq_kv=7, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24,
    dtype="float32", scale=0.3,
)  # fmt: skip


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


def present(operands):
    return [x for x in operands if x is not None]


@pytest.mark.parametrize("sink", [-800.0, -300.0, 0.0, 700.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_without_keys_has_its_sink_as_lse(sink, dtype):
    """However far the sink is from 0: its exponential may be 0 or infinite."""
    spec = replace(SPEC, seq_q=7, seq_kv=4, window=Window(None, 0))
    *qkv, dout, dlse = (x.numpy() for x in inputs_of(spec))
    operands = FlashOperands(*qkv, sinks=np.full(spec.heads_q, sink))
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
