"""Ranks on devices of JAX, in this process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.job import Call
from bench.ours import for_target
from torch_attn.distributed import shard_sequence, unshard_sequence
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.parity.torch_calls import leaves
from twin_attention.targets.target import use_target


def need_devices(size: int) -> None:
    import jax

    if jax.device_count() < size:
        raise Absent(f"needs {size} GPUs")


def make_call(
    target: str, case: Any, operation: str, tensors: list[Tensor], exchange: str = "ring"
) -> Call:
    import jax

    from pallas_attn.distributed import context_attention
    from twin_attention.interop.exchange import to_jax
    from twin_attention.interop.parity.jax_calls import prepare_jax

    need_devices(case.ranks)
    devices = jax.devices()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((case.ranks,), ("context",), auto, devices=devices[: case.ranks])
    placement = jax.NamedSharding(mesh, jax.P(None, "context"))
    options = {"plan": case.plan, "mesh": mesh, "axis_name": "context", "exchange": exchange}
    attend = partial(context_attention, **case.options | options)

    def place(x: Tensor) -> Any:
        batch = to_jax(x if x.ndim == 4 else x[None])
        return jax.device_put(shard_sequence(batch, case.plan), placement)

    here = tensors[0].device

    def come_back() -> None:
        if here.type == "cuda":  # JAX leaves another device current
            torch.cuda.set_device(here)

    def result(found: Any) -> list[Any]:
        whole = [jax.device_put(unshard_sequence(x, case.plan), devices[0]) for x in leaves(found)]
        results = jax.block_until_ready([x[0] if tensors[0].ndim == 3 else x for x in whole])
        come_back()
        return results

    *inputs, dout = map(place, tensors)
    with use_target(target):
        prepared = prepare_jax(attend, operation, inputs, dout)

    def run() -> Any:
        found = prepared()
        come_back()
        return found

    return for_target(Call(run, result), target)
