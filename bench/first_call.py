"""Make the first calls of a process, and print how long each took.

Run ``python -m bench.first_call SIDE FAMILY CASE``, the case as JSON; it prints seconds as JSON, of
imports ("import"), the first call ("forward") and the first backward ("backward", in JAX with a
forward); then of gradients with another length ("new shape") and another mask ("new class").
Nothing that a side imports may be imported before the clock starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any

_LONGER = 128  # rows, of the same kernels
FRAMEWORKS = {"torch_attn": "torch", "pallas_attn": "jax"}


def main(side: str, family: str, case: dict[str, Any]) -> dict[str, float]:
    names = FRAMEWORKS[side], side
    found = {"import": _seconds(lambda: [*map(import_module, names)])}
    framework, api = map(import_module, names)
    make = _steps_of_torch if side == "torch_attn" else _steps_of_jax

    def steps(longer: int, causal: bool) -> list[Callable[[], Any]]:
        attend = partial(api.flash_attention, causal=causal, implementation=family)
        rows = case["batch"], case["seq_q"] + longer, case["heads_q"], case["head_dim"]
        others = case["batch"], case["seq_kv"] + longer, case["heads_kv"], case["head_dim"]
        return make(framework, attend, [rows, others, others, rows], case["dtype"])

    forward, backward, _ = steps(0, case["causal"])
    found |= {"forward": _seconds(forward), "backward": _seconds(backward)}
    *_, shape = steps(_LONGER, case["causal"])
    *_, kind = steps(0, not case["causal"])
    return found | {"new shape": _seconds(shape), "new class": _seconds(kind)}


def _seconds(step: Callable[[], Any]) -> float:
    start = perf_counter()
    step()
    return perf_counter() - start


def _steps_of_torch(torch: Any, attend: Any, shapes: Any, dtype: str) -> list[Callable[[], Any]]:
    on_cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_cuda else lambda: None
    kind = {"dtype": getattr(torch, dtype), "device": "cuda" if on_cuda else "cpu"}
    *operands, dout = (torch.randn(shape, **kind) for shape in shapes)
    for x in operands:
        x.requires_grad_()
    (2 * operands[0]).backward(operands[0].detach())  # torch imports a second's worth for its first
    operands[0].grad = None
    results = []

    def forward() -> None:
        results.append(attend(*operands))
        wait()

    def backward() -> None:
        torch.autograd.backward(results, [dout])
        wait()

    def both() -> None:
        forward()
        backward()

    wait()
    return [forward, backward, both]


def _steps_of_jax(jax: Any, attend: Any, shapes: Any, dtype: str) -> list[Callable[[], Any]]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]

    def gradients(*arrays: Any) -> Any:
        *operands, dout = arrays
        return jax.vjp(attend, *operands)[1](dout)

    jax.block_until_ready(arrays)
    forward, both = jax.jit(attend), jax.jit(gradients)

    def backward() -> None:
        jax.block_until_ready(both(*arrays))

    return [lambda: jax.block_until_ready(forward(*arrays[:3])), backward, backward]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
