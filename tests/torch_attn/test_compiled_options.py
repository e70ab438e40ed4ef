from functools import partial

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import torch_attn

OPTIONS = {
    "flash_attention": {
        "scale": [float("nan")],
        "softcap": [1e-60],
        "window_size": [4, {1: 2, 3: 4}, (True, False), (3, -7)],
        "return_lse": [None],
        "implementation": ["cudnn"],
        "causal": [[]],
        "deterministic": ["yes"],
        "precision": ["bf16"],
    },
    "paged_decode": {"num_splits": [True, 257], "cascade": [1]},
    "append_kv": {"implementation": [1], "rotary_interleaved": [None]},
    "merge_states": {"implementation": ["cudnn"]},
}
WRONG = [
    (function, {name: value})
    for function, options in OPTIONS.items()
    for name, values in options.items()
    for value in values
]


def operands(function):
    pages = torch.zeros(3, 4, 2, 16, dtype=torch.bfloat16)
    cache = (pages, pages.clone(), torch.zeros(2, 3).int(), torch.ones(2).int())
    new = torch.ones(2, 2, 16, dtype=torch.bfloat16)
    return {
        "flash_attention": (torch.ones(1, 5, 2, 16),) * 3,
        "paged_decode": (new, *cache),
        "append_kv": (new, new, *cache),
        "merge_states": (torch.ones(3, 2, 4, 16), torch.zeros(3, 2, 4)),
    }[function]


def raised_by(call, *args):
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call(*args)
    return raised.value


@pytest.mark.parametrize(("function", "option"), WRONG, ids=str)
def test_a_wrong_option_raises_the_same_error_compiled(function, option):
    torch._dynamo.reset()
    call = partial(getattr(torch_attn, function), **option)
    eager = raised_by(call, *operands(function))
    assert isinstance(eager, TypeError | ValueError)
    compiled = raised_by(
        torch.compile(lambda *args: call(*args), backend="eager"), *operands(function)
    )
    assert (type(compiled), str(compiled)) == (type(eager), str(eager))


def test_fullgraph_quotes_the_error():
    """Torch has one exception for all that stops a whole graph."""
    torch._dynamo.reset()
    call = torch.compile(
        lambda q: torch_attn.flash_attention(q, q, q, causal="no"), backend="eager", fullgraph=True
    )
    message = raised_by(call, torch.ones(1, 5, 2, 16))
    assert isinstance(message, Unsupported)
    assert "causal: expected a bool, got str" in str(message)


def traces_of(function, option, values):
    """Compare with the eager function; return how often it was traced."""
    torch._dynamo.reset()
    traces = CompileCounterWithBackend("aot_eager")
    call = getattr(torch_attn, function)
    compiled = torch.compile(
        lambda value, *args: call(*args, **{option: value}), backend=traces, fullgraph=True
    )
    for value in values:
        got = compiled(value, *operands(function))
        torch.testing.assert_close(got, call(*operands(function), **{option: value}))
    return traces.frame_count


@pytest.mark.parametrize("function", ["flash_attention", "paged_decode"])
def test_a_window_is_traced_for_all_values_at_once(function):
    assert traces_of(function, "window_size", [(1, 0), (2, 0), (3, 0), (4, 0), (40, 0)]) == 2


def test_splits_are_traced_for_all_values_at_once():
    assert traces_of("paged_decode", "num_splits", [2, 3, 4, 5, 6]) == 2


def test_determinism_is_known_while_tracing():
    assert traces_of("flash_attention", "deterministic", [None, True, False, True]) == 3


def test_precision_is_known_while_tracing():
    assert traces_of("flash_attention", "precision", ["ieee", "tf32", "ieee"]) == 2


def test_torchs_own_determinism_is_a_guard():
    """Without the option, each setting of torch's has a trace."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(torch_attn.flash_attention, backend=backend, fullgraph=True)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for setting in (False, True, False):
            torch.use_deterministic_algorithms(setting)
            compiled(*operands("flash_attention"))
    finally:
        torch.use_deterministic_algorithms(before)
    calls = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert [call.args[-6] for call in calls if "flash_fwd" in str(call.target)] == [False, True]


def test_gradients_with_a_window_that_is_not_known_while_tracing():
    torch._dynamo.reset()
    traces = CompileCounterWithBackend("aot_eager")

    def loss(q, left):
        return torch_attn.flash_attention(q, q, q, window_size=(left, 1)).square().sum()

    compiled = torch.compile(loss, backend=traces, fullgraph=True)
    for left in (2, 3, 4, 5):
        q = torch.randn(1, 7, 2, 16, requires_grad=True)
        (got,) = torch.autograd.grad(compiled(q, left), q)
        (want,) = torch.autograd.grad(loss(q, left), q)
        torch.testing.assert_close(got, want)
    assert traces.frame_count == 2
