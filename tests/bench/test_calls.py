import pytest
import torch

from bench.calls import torch_call
from twin_attention.interop.parity.torch_calls import compiled

SHAPE = (2, 24, 3, 16)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(4)]


def in_torch(q, k, v):
    return torch.einsum("bqhk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1), v)


def with_bias(q, k, v, bias):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + bias
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def heads_first(q, k, v, bias):
    return ((q @ k.mT + bias).softmax(-1) @ v).contiguous()


@pytest.mark.parametrize("operation", ["forward", "backward", "both", "jvp"])
def test_a_bias_keeps_its_axes_where_a_library_takes_heads_first(tensors, operation):
    *qkv, dout = tensors
    operands = [*qkv, torch.randn(2, 3, 24, 24), dout]
    results = []
    for attend, first in ((with_bias, False), (heads_first, True)):
        call = torch_call(attend, operation, operands, heads_first=first)
        assert call.result is not None
        results.append(call.result(call.run()))
    torch.testing.assert_close(*results)


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
        "torch._dynamo.config.recompile_limit, which parity.torch_calls.compiled sets"
    )


def test_a_compiled_backward_may_run_again_though_it_first_ran_once(tensors):
    function = compiled(lambda *qkv: in_torch(*qkv), backend="aot_eager")  # compiled here alone
    torch_call(function, "both", tensors).run()
    call = torch_call(function, "backward", tensors)
    first, second = call.run(), call.run()
    assert all(map(torch.equal, first, second)), (
        "look for what became of torch._functorch.config.donated_buffer, which "
        "parity.torch_calls.compiled sets"
    )
