"""Calls of one attention function, in both frameworks, without a GPU."""

from functools import partial

import jax.numpy as jnp
import pytest
import torch

from bench.calls import compiled, jax_call, torch_call
from interop.exchange import to_torch

SHAPE = (2, 24, 3, 16)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(4)]


def in_torch(q, k, v):
    return torch.einsum("bqhk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1), v)


def in_torch_heads_first(q, k, v):
    return (q @ k.transpose(2, 3)).softmax(-1) @ v


def in_jax(q, k, v):
    s = jnp.einsum("bqhd,bkhd->bqhk", q, k)
    p = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("bqhk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


CALLS = {
    "torch": partial(torch_call, in_torch),
    "torch, heads first": partial(torch_call, in_torch_heads_first, heads_first=True),
    "torch, compiled": lambda *args: torch_call(compiled(in_torch, backend="aot_eager"), *args),
    "JAX": partial(jax_call, in_jax),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("operation", "names"),
    [("forward", ["out"]), ("backward", ["dq", "dk", "dv"]), ("both", ["out", "dq", "dk", "dv"])],
)
def test_a_call_gives_the_same_arrays_every_time(make, operation, names, tensors):
    *qkv, dout = (x.clone() for x in tensors)
    leaves = [x.requires_grad_() for x in qkv]
    out = in_torch(*leaves)
    expected = dict(zip(["dq", "dk", "dv"], torch.autograd.grad(out, leaves, dout), strict=True))
    expected["out"] = out.detach()
    call = make(operation, tensors)
    for _ in range(2):
        arrays = call.result(call.run())
        assert len(arrays) == len(names)
        for name, array in zip(names, arrays, strict=True):
            got = array if isinstance(array, torch.Tensor) else to_torch(array)
            torch.testing.assert_close(got, expected[name], msg=lambda text, n=name: f"{n}: {text}")
    assert not any(x.requires_grad for x in tensors)


def test_more_problems_than_dynamos_limit_of_graphs_stay_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    function = compiled(lambda x: x + 1, backend=backend)
    for size in range(2, 22):
        function(torch.zeros(size))
    assert len(graphs) == 20, (
        "torch ran a function uncompiled: look for what became of "
        "torch._dynamo.config.recompile_limit, which bench.calls.compiled sets"
    )


def test_a_compiled_backward_may_run_again_though_it_first_ran_once(tensors):
    function = compiled(lambda *qkv: in_torch(*qkv), backend="aot_eager")  # compiled here alone
    torch_call(function, "both", tensors).run()
    call = torch_call(function, "backward", tensors)
    first, second = call.run(), call.run()
    assert all(map(torch.equal, first, second)), (
        "look for what became of torch._functorch.config.donated_buffer, which "
        "bench.calls.compiled sets"
    )
