import gc
import inspect
import sys
import warnings
from textwrap import dedent
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import torch_attn
from tests.torch_attn.operators import check_operator
from torch_attn import append_kv, merge_states, paged_decode

ops = torch.ops.twin_attention
PAGE_SIZE, MAX_PAGES, HEADS_Q, HEADS_KV, DIM, DIM_V = 4, 3, 4, 2, 32, 16
LENGTHS = (0, 1, 5, 12, 7)
NO_GRADIENT = "{}: a gradient is not supported; give it operands that need none"
ALL = pytest.mark.parametrize("function", ["paged_decode", "append_kv", "merge_states"])
FOR_INFERENCE = pytest.mark.parametrize("function", ["paged_decode", "append_kv"])


class Problem(NamedTuple):
    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    sinks: Tensor
    scale: Tensor | None
    tree_ends: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def cache(self) -> tuple[Tensor, ...]:
        return self.k_pages, self.v_pages, self.block_tables, self.seq_lens

    @property
    def decode_arguments(self) -> tuple:
        window_left = 6 if self.tree_ends is None else None
        value_dim, scales = (None, (self.scale,) * 2)
        if self.v_pages is None:
            value_dim, scales = DIM_V, (self.scale, None)
        options = (0.25, window_left, 9.0, 2, False, value_dim, False)
        terms = self.tree_ends, self.slopes
        return self.q, *self.cache, self.sinks, *scales, *terms, *options

    @property
    def append_arguments(self) -> tuple:
        left_out = (None,) * 4
        v_scale = None if self.v_pages is None else self.scale
        operands = self.k_new, self.v_new, *self.cache, self.scale, v_scale, *left_out
        return *operands, False

    def merge_arguments(self, implementation: str) -> tuple:
        outs = torch.stack([self.q, -self.q, 2 * self.q])
        lses = outs[..., 0].float()
        return outs, lses.transpose(2, 3) if lses.ndim == 4 else lses, implementation


def problem(
    device: str, lengths: tuple[int, ...] = LENGTHS, tokens: int = 3, kv_dtype: str = "bfloat16"
) -> Problem:
    generator = torch.Generator().manual_seed(0)
    batch, num_pages = len(lengths), len(lengths) * MAX_PAGES + 2

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    pools = (
        normal(num_pages, PAGE_SIZE, HEADS_KV, dim, dtype=torch.float32) for dim in (DIM, DIM_V)
    )
    if kv_dtype == "int8":
        pools = (x.mul(30).clamp(-127, 127) for x in pools)
    tables = torch.randperm(num_pages, generator=generator)[: batch * MAX_PAGES]
    return Problem(
        normal(batch, tokens, HEADS_Q, DIM),
        normal(batch, tokens, HEADS_KV, DIM),
        normal(batch, tokens, HEADS_KV, DIM_V),
        *(x.to(getattr(torch, kv_dtype)) for x in pools),
        tables.reshape(batch, MAX_PAGES).to(device, torch.int32),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        normal(HEADS_Q, dtype=torch.float32),
        None if kv_dtype == "bfloat16" else torch.full((HEADS_KV,), 0.05, device=device),
    )


def call(function: str, p: Problem, **options):
    scales = {"k_scale": p.scale, "v_scale": p.scale}
    if function == "paged_decode":
        return paged_decode(p.q, *p.cache, sinks=p.sinks, return_lse=True, **scales, **options)
    if function == "append_kv":
        return append_kv(p.k_new, p.v_new, *p.cache, **scales, **options)
    return merge_states(*p.merge_arguments("")[:2], **options)


def clone(p: Problem) -> Problem:
    return Problem(*(None if x is None else x.clone() for x in p))


def assert_equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])  # opcheck cannot compare float8
def test_opcheck(torch_device, kv_dtype):
    p = problem(torch_device, kv_dtype=kv_dtype)
    check_operator(ops.paged_decode.default, *p.decode_arguments)
    check_operator(ops.append_kv.default, *p.append_arguments)


def test_opcheck_with_a_tree(torch_device):
    p = problem(torch_device)
    ends = torch.tensor([[3, 2, 3]], dtype=torch.int32, device=torch_device).expand(5, 3)
    check_operator(ops.paged_decode.default, *p._replace(tree_ends=ends).decode_arguments)


def test_opcheck_with_slopes_of_a_latent_cache(torch_device):
    p = problem(torch_device, kv_dtype="int8")._replace(v_new=None, v_pages=None)
    slopes = torch.rand(5, HEADS_Q, device=torch_device)
    check_operator(ops.paged_decode.default, *p._replace(slopes=slopes).decode_arguments)
    check_operator(ops.append_kv.default, *p.append_arguments)


def latent_step(p: Problem, slopes: Tensor) -> Tensor:
    append_kv(p.k_new, None, p.k_pages, None, *p.cache[2:])
    pool = p.k_pages, None, *p.cache[2:]
    return paged_decode(p.q, *pool, value_dim=DIM_V, alibi_slopes=slopes)


def test_compile_a_latent_cache(torch_device):
    torch._dynamo.reset()
    p = problem(torch_device)._replace(v_new=None, v_pages=None)
    eager, slopes = clone(p), torch.rand(HEADS_Q, device=torch_device)
    compiled = torch.compile(latent_step, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(p, slopes), latent_step(eager, slopes))
    assert_equal(p.k_pages, eager.k_pages)


def test_opcheck_merge(torch_device):
    outs, lses, _ = problem(torch_device, (3, 4), 2).merge_arguments("")
    check_operator(ops.merge_states_bwd.default, torch.ones_like(outs[0]), None, outs, lses)
    check_operator(ops.merge_states.default, outs.requires_grad_(), lses.requires_grad_())


def problem_of_a_tree(device: str, lengths: tuple[int, ...] = LENGTHS, tokens: int = 3) -> Problem:
    ends = torch.full((len(lengths), tokens), 2, dtype=torch.int32, device=device)
    return problem(device, lengths)._replace(tree_ends=ends)


def decode_twice(p: Problem, tokens: bool) -> tuple[tuple[Tensor, ...], ...]:
    q, k_new, v_new = (x if tokens else x[:, 0] for x in (p.q, p.k_new, p.v_new))
    append_kv(k_new, v_new, *p.cache)
    near = paged_decode(q, *p.cache, window_size=(5, 0), return_lse=True)
    options = {"sinks": p.sinks, "tree_ends": p.tree_ends, "return_lse": True}
    return near, paged_decode(q, *p.cache, softcap=8.0, scale=0.3, **options)


def step(p: Problem, tokens: bool) -> tuple[Tensor, ...]:
    outs, lses = (torch.stack(parts) for parts in zip(*decode_twice(p, tokens), strict=True))
    return merge_states(outs, lses)


@pytest.mark.parametrize(
    ("step", "backend", "dynamic", "tokens"),
    [
        (step, "aot_eager", False, True),
        (step, "aot_eager", None, True),
        (step, "aot_eager", True, False),
        (decode_twice, "inductor", True, True),  # for `stack` it would start a compiler of C++
    ],
)
def test_compile(torch_device, step, backend, dynamic, tokens):
    torch._dynamo.reset()
    traces = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=traces, dynamic=dynamic)
    # Where sizes are not dynamic yet, other lengths need no other trace.
    for lengths in (LENGTHS, (12, 7, 5, 1, 0) if dynamic is None else (3, 7, 9, 1, 0, 12)):
        p = problem_of_a_tree(torch_device, lengths, 3 if tokens else 1)
        eager = clone(p)
        assert_equal(compiled(p, tokens), step(eager, tokens))
        assert_equal((p.k_pages, p.v_pages), (eager.k_pages, eager.v_pages))
    assert traces.frame_count == (2 if dynamic is False else 1)


def test_append_refuses_one_memory_as_both_pools(torch_device, implementation):
    p = problem(torch_device)
    p = p._replace(v_new=p.k_new)
    pool, other = p.k_pages.clone(), p.k_pages.clone()
    both = torch.stack([pool, other], 1)
    options = {"implementation": implementation}
    message = "^v_pages: expected memory of its own, got k_pages' memory$"
    for _ in range(2):  # also once a call of such operands is kept
        for same in (pool, pool.view(pool.shape), pool[:]):
            with pytest.raises(ValueError, match=message):
                call("append_kv", p._replace(k_pages=pool, v_pages=same), **options)
        assert_equal(pool, p.k_pages)
        call("append_kv", p._replace(k_pages=pool.clone(), v_pages=other), **options)
    call("append_kv", p._replace(k_pages=both[:, 0], v_pages=both[:, 1]), **options)
    append = torch.compile(append_kv, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=message[1:-1]):
        append(p.k_new, p.v_new, pool, pool, p.block_tables, p.seq_lens)
    assert_equal(pool, p.k_pages)


def test_autograd_sees_that_append_changed_the_pools(torch_device, implementation):
    p = problem(torch_device)
    x = torch.ones_like(p.k_pages, requires_grad=True)
    product = (x * p.k_pages).sum()
    call("append_kv", p, implementation=implementation)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def losses(function: str, p: Problem):
    if function == "append_kv":
        return lambda x: append_kv(x, p.v_new, *p.cache)[0].sum(), p.k_new
    if function == "paged_decode":
        return lambda x: paged_decode(x, *p.cache).sum(), p.q
    outs, lses, _ = p.merge_arguments("")
    return lambda x: merge_states(outs, x)[0].sum(), lses


@FOR_INFERENCE
def test_a_gradient_is_refused(torch_device, function):
    loss, x = losses(function, problem(torch_device))
    message = "^" + NO_GRADIENT.format(function)
    with pytest.raises(NotImplementedError, match=message):
        loss(x.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match=message):
        grad(loss)(x)
    with pytest.raises(NotImplementedError, match=message):
        jvp(loss, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        loss(forward_ad.make_dual(x, x))
    with pytest.raises(Exception, match=message.removeprefix("^")):
        torch.compile(loss, backend="aot_eager")(x.clone().requires_grad_())


@ALL
def test_no_gradient_is_asked_for(torch_device, function):
    """Operands that require grad are taken where gradients are off, or not theirs."""
    loss, x = losses(function, problem(torch_device))
    want = loss(x)
    weights = x.clone().requires_grad_()
    with torch.no_grad():
        assert_equal(loss(weights), want)
    with torch.inference_mode():
        assert_equal(loss(weights), want)
    assert_equal(loss(weights.detach()), want)
    other = torch.ones((), device=torch_device)
    assert_equal(grad(lambda w: w * loss(x).float())(other), want.float())


def merge_loss(outs: Tensor, lses: Tensor) -> Tensor:
    out, lse = merge_states(outs, lses)
    return (out.float() ** 2).sum() + lse.sin().sum()


def test_gradients_of_a_merge_compiled_and_by_torch_func(torch_device):
    torch._dynamo.reset()
    states = problem(torch_device).merge_arguments("")[:2]

    def recorded(loss):
        leaves = [x.clone().requires_grad_() for x in states]
        return torch.autograd.grad(loss(*leaves), leaves)

    want = recorded(merge_loss)
    assert_equal(grad(merge_loss, (0, 1))(*states), want)
    assert_equal(recorded(torch.compile(merge_loss, fullgraph=True, backend="aot_eager")), want)
    others = [-x for x in states]
    many = [torch.stack(pair) for pair in zip(states, others, strict=True)]
    mapped = vmap(grad(merge_loss, (0, 1)))(*many)
    both = zip(want, grad(merge_loss, (0, 1))(*others), strict=True)
    # torch rounds an element as its place in a vector says, which the batch changes.
    torch.testing.assert_close(mapped, tuple(map(torch.stack, both)))


@pytest.mark.parametrize("in_dims", [(0, 0), (3, 2), (None, 1), (2, None)])
def test_vmap_of_a_merge_and_of_its_gradient(in_dims, torch_device):
    states = problem(torch_device).merge_arguments("")[:2]
    many, samples = [], []
    for x, dim in zip(states, in_dims, strict=True):
        each = [x, x, x] if dim is None else [x, -x, x / 2]
        samples.append(each)
        many.append(x if dim is None else torch.stack(each, dim))
    gradients = grad(merge_loss, (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it loops over the samples
        for function in (merge_states, gradients):
            one_by_one = [function(*sample) for sample in zip(*samples, strict=True)]
            want = tuple(map(torch.stack, zip(*one_by_one, strict=True)))
            torch.testing.assert_close(vmap(function, in_dims)(*many), want)
        nested = vmap(vmap(gradients, in_dims))(*(torch.stack([-x, x]) for x in many))
    torch.testing.assert_close(tuple(x[1] for x in nested), want)


def test_a_merge_is_recorded_after_calls_that_were_not(torch_device):
    """On a GPU the first call is kept, and the later ones replay it."""
    states = problem(torch_device).merge_arguments("")[:2]
    want = merge_states(*states)
    assert_equal(merge_states(*states), want)
    others = [-x for x in states]
    leaves = [x.clone().requires_grad_() for x in others]
    got = merge_states(*leaves)
    assert all(x.requires_grad for x in got)
    ones = tuple(map(torch.ones_like, got))
    gradients = torch.autograd.grad(got, leaves, ones)
    assert_equal(gradients, ops.merge_states_bwd(*ones, *others, None))
    assert_equal(tuple(x.detach() for x in got), merge_states(*others))
    assert_equal(merge_states(*states), want)


@pytest.mark.parametrize(
    ("parts", "head_dim", "dtype"),
    [(1, 16, torch.float16), (3, 64, torch.float32), (20, 24, torch.float16)],
)
def test_the_gradients_of_a_merge_by_a_kernel(torch_device, parts, head_dim, dtype):
    """Parts are strided, one has no keys and holds NaN, and a row sees no key at all."""
    torch.manual_seed(0)
    outs = torch.randn(parts, 2, 3, 5, head_dim, device=torch_device).to(dtype)
    lses = 3 * torch.randn(parts, 2, 3, 5, device=torch_device)
    outs[0, 0, 0, 0], lses[0, 0, 0, 0], lses[:, 1, 2, 4] = torch.nan, -torch.inf, -torch.inf
    dout, dlse = torch.randn_like(outs[0]).transpose(1, 2), torch.randn_like(lses[0])
    outs = outs.transpose(2, 3)
    for gradients in ((dout, dlse), (dout, None)):
        got, want = (
            ops.merge_states_bwd(*gradients, outs, lses, name) for name in ("triton", "reference")
        )
        for x, y in zip(got, want, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            torch.testing.assert_close(x, y)


def test_autocast_casts_new_tokens_and_never_the_cache(torch_device, implementation):
    p = problem(torch_device)
    wide = p._replace(q=p.q.float(), k_new=p.k_new.float(), v_new=p.v_new.float())
    want = call("paged_decode", p, implementation=implementation)
    written = call("append_kv", clone(p), implementation=implementation)
    for given in (p, wide):
        with torch.autocast(torch_device, torch.bfloat16):
            assert_equal(call("paged_decode", given, implementation=implementation), want)
            assert_equal(call("append_kv", clone(given), implementation=implementation), written)
    message = "k_pages: expected q's float16, int8, float8_e4m3fn, got bfloat16"
    with torch.autocast(torch_device, torch.float16):
        assert_equal(call("paged_decode", p, implementation=implementation), want)
        with pytest.raises(TypeError, match=message):
            call("paged_decode", wide, implementation=implementation)


@pytest.mark.parametrize(
    "empty", ["batch", "tokens", "heads", "tables", "pool"], ids="no-{}".format
)
def test_empty_problems_run_no_kernel(torch_device, monkeypatch, implementation, empty):
    """tests/semantics holds what they return to the definition."""
    for kernel in ("paged_decode", "append_kv", "combine"):
        monkeypatch.setitem(sys.modules, f"torch_attn.kernels.portable.{kernel}", None)
    p = problem(torch_device)
    changes = {
        "batch": {name: getattr(p, name)[:0] for name in
                  ("q", "k_new", "v_new", "block_tables", "seq_lens")},
        "tokens": {name: getattr(p, name)[:, :0] for name in ("q", "k_new", "v_new")},
        "heads": {name: getattr(p, name)[:, :, :0] for name in
                  ("q", "k_new", "v_new", "k_pages", "v_pages")} | {"sinks": p.sinks[:0]},
        "tables": {"block_tables": p.block_tables[:, :0]},
        "pool": {name: getattr(p, name)[:0] for name in ("k_pages", "v_pages")},
    }  # fmt: skip
    p = p._replace(**changes[empty])
    out, _ = call("paged_decode", p, implementation=implementation)
    assert out.shape == (*p.q.shape[:3], DIM_V)
    before = clone(p)
    call("append_kv", p, implementation=implementation)
    assert_equal((p.k_pages, p.v_pages), (before.k_pages, before.v_pages))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_replay_a_cuda_graph_with_other_lengths():
    p = problem_of_a_tree("cuda")
    start = clone(p)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(p, True)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # As in test_ops.py: the default mode would forbid some calls to JAX's threads as well.
    gc.collect()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step(p, True)
    for lengths in ((12, 11, 4, 0, 5), (3, 0, 9, 7, 12)):
        other = problem("cuda", lengths)
        other.block_tables.copy_(other.block_tables.flip(0))
        for x, y in zip(p, start._replace(seq_lens=other.seq_lens), strict=True):
            if x is not None:
                x.copy_(y)
        p.block_tables.copy_(other.block_tables)
        eager = clone(p)
        graph.replay()
        assert_equal(captured, step(eager, True))
        assert_equal((p.k_pages, p.v_pages), (eager.k_pages, eager.v_pages))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_graph_of_a_cascade_replays_with_other_pages_in_common():
    q = torch.randn(5, 8, 64, dtype=torch.bfloat16, device="cuda")
    k_pages, v_pages = torch.randn(2, 100, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
    tables = torch.arange(95, dtype=torch.int32, device="cuda").view(5, 19)
    lengths = torch.tensor([304, 300, 200, 17, 0], dtype=torch.int32, device="cuda")

    def attend():
        return paged_decode(q, k_pages, v_pages, tables, lengths, cascade=True, return_lse=True)

    attend()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = attend()
    for common in (0, 8, 19):
        tables[1:3, :common] = tables[0, :common]
        graph.replay()
        assert_equal(captured, attend())


@pytest.mark.parametrize("name", torch_attn.__all__)
def test_the_example_of_a_docstring_runs(name):
    _, example = inspect.getdoc(getattr(torch_attn, name)).split("Example::\n")
    exec(compile(dedent(example), name, "exec"), {})
