import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import distributed, explain, flash_attention
from pallas_attn.distributed import context_attention, context_plan
from tests.oracle import assert_within_budget
from tests.sides import PallasSide
from twin_attention.interop.parity.cases import ContextCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import call
from twin_attention.targets.target import use_target

MESH = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
Q, K, V = jax.random.normal(jax.random.key(0), (3, 1, 24, 2, 16))


def attend(**options):
    call = {"plan": context_plan(24, 1), "axis_name": "context", "mesh": MESH, "causal": True}
    return context_attention(Q, K, V, **call | options)


def test_four_devices():
    script = [sys.executable, "-m", "tests.pallas_attn.context_ranks"]
    result = subprocess.run(script, capture_output=True, text=True, timeout=500)
    assert result.stdout.strip().endswith("ok"), result.stderr[-3000:]


def test_one_device():
    assert jnp.allclose(jax.jit(attend)(), flash_attention(Q, K, V, causal=True), atol=1e-4)


def test_calls_without_jit_that_are_alike_are_traced_once(monkeypatch):
    traced = []
    choose = distributed.choose_exchange
    monkeypatch.setattr(
        distributed, "choose_exchange", lambda *x, **more: traced.append(x) or choose(*x, **more)
    )
    for _ in range(2):
        attend(softcap=3.0, exchange="heads")
    assert len(traced) == 1
    with use_target("sm80"):
        attend(softcap=3.0, exchange="heads")
    assert len(traced) == 2


@pytest.mark.parametrize("exchange", ["ring", "gather", "heads"])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "stripe"])
def test_ranks_made_by_vmap(torch_device, exchange, sharding):
    """In a contiguous causal ring some ranks send nothing."""
    case = ContextCase(
        "mapped", 1, 48, 48, 6, 3, 16, dtype="float32", causal=True, ranks=3, sharding=sharding,
        exchange=exchange,
    )  # fmt: skip
    inputs = make_inputs(case, torch_device)
    assert_within_budget(
        call(PallasSide(torch_device), case, inputs, "reference"), inputs, case.spec
    )


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_who_sees_whom_takes_no_loop(exchange):
    """A search on the device would be a loop of many launches."""

    def loss(q, k, v):
        call = {"plan": context_plan(24, 1), "axis_name": "context", "mesh": MESH}
        return context_attention(
            q, k, v, exchange=exchange, implementation="reference", **call
        ).sum()

    assert not re.search(r"while\[|scan\[", str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(Q, K, V)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"plan": context_plan(24, 2)}, ValueError, "plan: expected a plan for the group's 1"),
        ({"plan": 3}, TypeError, "plan: expected a ContextPlan"),
        ({"plan": context_plan(26, 1)}, ValueError, "q: expected 26 tokens along axis 1"),
        ({"exchange": "all"}, ValueError, "exchange: expected None or one of 'ring', 'gather'"),
        ({"softcap": -1.0}, ValueError, "softcap: expected"),
        ({"implementation": "flash"}, ValueError, "implementation: expected None or one of"),
    ],
)
def test_bad_calls(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        attend(**change)


def test_derivatives_that_are_refused():
    def loss(q):
        call = {"plan": context_plan(24, 1), "axis_name": "context", "mesh": MESH}
        return context_attention(q, K, V, **call).sum()

    with pytest.raises(NotImplementedError, match="context_attention: forward mode"):
        jax.jvp(loss, (Q,), (Q,))


@pytest.mark.parametrize(
    ("options", "exchange"),
    [
        ({"exchange": "ring"}, "ring: it was asked for; keys of other ranks come in 0 of up to 0"),
        ({}, "ring: ranks of one program would gather the keys of all; keys of other ranks come"),
        ({"exchange": "heads"}, "heads: it was asked for"),
    ],
)
def test_explain(options, exchange):
    call = {"plan": context_plan(24, 1), "axis_name": "context", "mesh": MESH, "causal": True}
    said = explain(context_attention, Q, K, V, implementation="triton", **call | options)
    assert exchange in str(said)
    assert {"flash_fwd", "flash_bwd_preprocess", "flash_bwd_dq"} <= said.configs.keys()
