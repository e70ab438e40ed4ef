"""Problems with their inputs, and the float64 oracle that results are held to."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from interop.parity.cases import FlashCase
from interop.parity.inputs import Tensors
from interop.parity.oracle import evaluate
from twin_attention.contract.reference import attention_backward, attention_forward
from twin_attention.contract.spec import AttentionSpec, DecodeSpec
from twin_attention.contract.tolerances import compare_lse, compare_to_reference, compare_twins

KINDS = {"out": "output", "dq": "gradient", "dk": "gradient", "dv": "gradient"}


class Inputs(NamedTuple):
    """Operands of a forward and of its backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


class Results(NamedTuple):
    """What a forward and its backward give."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def inputs_of(case: FlashCase, device: str, seed: int = 0) -> Inputs:
    """Standard normal inputs of a case, a function of its name and `seed` alone.

    In the "strided" layout q, k, v are views of one tensor whose other elements are NaN.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()) + seed)
    spec, dtype = case.spec, getattr(torch, case.dtype)
    shapes = (
        *case.shapes,
        (spec.batch, spec.seq_q, spec.heads_q, spec.head_dim_v),
        (spec.batch, spec.heads_q, spec.seq_q),
    )
    q, k, v, dout, dlse = (torch.randn(shape, generator=generator) for shape in shapes)
    q, k, v, dout = (x.to(device, dtype) for x in (q, k, v, dout))
    if case.layout == "strided":
        q, k, v = packed(q, k, v)
    return Inputs(q, k, v, dout, dlse.to(device))


def packed(*tensors: Tensor) -> list[Tensor]:
    """The same tensors as views of one [B, S, heads + 1, D] tensor whose last head is NaN."""
    gap = torch.full_like(tensors[0][:, :, :1], float("nan"))
    sizes = [x.shape[2] for x in tensors]
    return list(torch.cat([*tensors, gap], dim=2).split([*sizes, 1], dim=2))[:-1]


def oracle(inputs: Inputs, spec: AttentionSpec, dtype: torch.dtype = torch.float64) -> Results:
    """Forward and backward by the contract's reference, every operation in `dtype`."""
    q, k, v, dout, dlse = inputs
    out, lse = attention_forward(q, k, v, spec, dtype)
    return Results(out, lse, *attention_backward(dout, dlse, q, k, v, spec, dtype))


def assert_within_budget(got: Results, inputs: Inputs, spec: AttentionSpec) -> None:
    """Hold shapes, dtypes and values of a forward and backward to the contract."""
    ref, lp = oracle(inputs, spec), oracle(inputs, spec, inputs.q.dtype)
    for name in Results._fields:
        x, want = getattr(got, name), getattr(ref, name)
        dtype = torch.float32 if name == "lse" else inputs.q.dtype
        assert (name, x.shape, x.dtype) == (name, want.shape, dtype)
        agreement = (
            compare_lse(x, want)
            if name == "lse"
            else compare_to_reference(x, want, getattr(lp, name), spec.dtype, KINDS[name])
        )
        assert agreement.ok, (name, agreement)


def assert_twins(a: Results, b: Results, inputs: Inputs, spec: AttentionSpec) -> None:
    """Hold two results of one problem to the sum of their budgets."""
    ref, lp = oracle(inputs, spec), oracle(inputs, spec, inputs.q.dtype)
    for name, kind in KINDS.items():
        x, y, want = getattr(a, name), getattr(b, name), getattr(ref, name)
        budget = compare_to_reference(x, want, getattr(lp, name), spec.dtype, kind)
        agreement = compare_twins(x, y, budget, budget)
        assert agreement.ok, (name, agreement)
    assert compare_lse(a.lse, b.lse.double()).ok


def assert_decode_within_budget(got: tuple[Tensor, ...], inputs: Tensors, spec: DecodeSpec) -> None:
    """Hold shapes, dtypes and values of a `paged_decode` to the contract."""
    dtype = inputs["q"].dtype
    ref, lp = evaluate(inputs, spec, torch.float64), evaluate(inputs, spec, dtype)
    out, lse = got
    assert (out.shape, out.dtype) == (ref["out"].shape, dtype)
    assert (lse.shape, lse.dtype) == (ref["lse"].shape, torch.float32)
    agreement = compare_to_reference(out, ref["out"], lp["out"], spec.dtype, "output")
    assert agreement.ok, agreement
    agreement = compare_lse(lse, ref["lse"])
    assert agreement.ok, agreement
