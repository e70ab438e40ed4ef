"""Hold ranks and shards on four virtual devices to the whole problem.

A process of its own runs this, since JAX makes its devices once.
"""

import os
from dataclasses import replace
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)

import jax
import torch
from jax import P

from pallas_attn import append_kv, flash_attention, paged_decode
from pallas_attn.distributed import (
    context_attention,
    context_plan,
    shard_sequence,
    unshard_sequence,
)
from tests.oracle import assert_within_budget, poison_padding
from tests.pallas_attn import test_decode as decoding
from tests.pallas_attn import test_transformations as dense
from twin_attention.contract import transfers
from twin_attention.contract.transfers import equal_hops
from twin_attention.interop.exchange import to_jax
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = FlashCase("", batch=2, seq_q=64, seq_kv=64, heads_q=4, heads_kv=4, head_dim=16, causal=True)
OPTIONS = replace(CASE, heads_kv=2, softcap=4.0, sinks=True, window_size=(20, None), head_dim_v=24)
DOCUMENTS = (0, 13, 13, 40, 60)
AUTO = jax.sharding.AxisType.Auto


def attend(case, plan, inputs, **options):
    devices = jax.devices()[: plan.size]
    mesh = jax.make_mesh((plan.size,), ("context",), axis_types=(AUTO,), devices=devices)
    names = [name for name in ("q", "k", "v", "sinks") if name in inputs]
    everywhere = jax.NamedSharding(mesh, jax.P())

    def place(name):
        return jax.device_put(to_jax(inputs[name]), everywhere)

    operands, gradients = list(map(place, names)), tuple(map(place, ("dout", "dlse")))

    def run(q, k, v, sinks=None):
        q, k, v = (shard_sequence(x, plan) for x in (q, k, v))
        out, lse = context_attention(
            q, k, v, plan=plan, axis_name="context", mesh=mesh, sinks=sinks, return_lse=True,
            **case.options | options,
        )  # fmt: skip
        return unshard_sequence(out, plan), unshard_sequence(lse, plan, 2)

    def results(*operands):
        found, pull = jax.vjp(run, *operands)
        return *found, *pull(gradients)

    found = jax.jit(results)(*operands)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    found = (jax.device_put(x, jax.devices()[0]) for x in found)
    return {name: torch.from_dlpack(x) for name, x in zip(names, found, strict=False)}


def check(case, plan, **options):
    inputs, spec = make_inputs(case, "cpu"), case.spec
    if plan.cu_seqlens is not None:
        ids = torch.from_numpy(plan.document_ids).expand(case.batch, -1).contiguous()
        inputs |= {"q_segment_ids": ids, "kv_segment_ids": ids}
        spec = replace(spec, segmented=True)
        poison_padding(inputs)
    got = attend(case, plan, inputs, **options)
    assert_within_budget(got, inputs, spec)


def check_placed(plan):
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AUTO,))
    x = jax.numpy.arange(64.0).reshape(1, 64)
    placed = jax.device_put(
        shard_sequence(x, plan), jax.NamedSharding(mesh, jax.P(None, "context"))
    )
    assert (unshard_sequence(placed, plan) == x).all()
    assert (shard_sequence(placed, plan) == shard_sequence(shard_sequence(x, plan), plan)).all()


def shard(function, in_specs, out_specs):
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(AUTO,) * 2)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def check_shards():
    case = replace(dense.CASE, batch=2, dtype="float32", name="sharded")
    inputs = make_inputs(case, "cpu")
    options = {**case.options, "return_lse": True, "implementation": "triton"}
    rows, lse, batch, heads = P("batch", None, "heads"), P("batch", "heads"), P("batch"), P("heads")
    attend = shard(
        lambda q, k, v, sinks: flash_attention(q, k, v, sinks=sinks, **options),
        (rows, rows, rows, heads), (rows, lse),
    )  # fmt: skip
    got = dense.results_and_gradients(jax.jit(attend), *dense.to_jax(inputs))
    assert all(len(x.devices()) == 4 for x in got)
    assert_within_budget([dense.to_torch(x) for x in got], inputs, case.spec)
    operands, new = decoding.operands(decoding.CASE), decoding.new_tokens()
    q, *cache = operands.values()
    options = {**decoding.CASE.options, "return_lse": True, "implementation": "triton"}
    pool = P(None, None, "heads")
    decode = shard(partial(paged_decode, **options), (rows, pool, pool, batch, batch), (rows, lse))
    got = jax.jit(decode)(q, *cache)
    assert all(len(x.devices()) == 4 for x in got)
    decoding.assert_right(got, operands, decoding.CASE.spec)
    append = partial(append_kv, implementation="triton")
    append = jax.jit(shard(append, (*[pool] * 4, P(), P()), pool))
    decoding.assert_same(append(*new, *cache), decoding.written(new, *cache))


if __name__ == "__main__":
    transfers.BLOCK = 4  # few rows, so that some of them stay
    window = replace(CASE, window_size=(7, None))
    contiguous = context_plan(64, 4, "contiguous")
    balanced = context_plan(64, 4, "balanced", DOCUMENTS)
    for case, plan in ((window, contiguous), (CASE, balanced)):
        assert any(hop.sent is not None for hop in equal_hops(plan, case.spec.window))
    check_placed(context_plan(64, 4))
    check(OPTIONS, context_plan(64, 2), exchange="ring", implementation="triton")
    check(replace(OPTIONS, dtype="float32"), context_plan(64, 4), exchange="gather")
    check(CASE, balanced, exchange="ring")
    check(CASE, context_plan(64, 4, "stripe", DOCUMENTS), exchange="heads")
    check(window, contiguous, exchange="ring")
    check_shards()
    print("ok")
