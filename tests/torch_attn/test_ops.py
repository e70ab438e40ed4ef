"""`torch_attn.flash_attention` as a torch operator: every way in which PyTorch may call it.

These tests guard the private torch API that `torch_attn/autograd.py` uses. When those of
`torch.func` or of forward mode fail after an update of torch, compare its `_record` with
``torch.autograd.Function.apply`` and ``torch/_functorch/autograd_function.py``.
"""

import gc
import importlib
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.library import opcheck

from torch_attn import explain, flash_attention
from torch_attn.dispatch import choose
from torch_attn.flash_ops import DENSE
from torch_attn.operands import rows_aligned
from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.spec import AttentionSpec

BATCH, SEQ, HEADS, DIM = 2, 21, 2, 16
OPTIONS = (0.25, 5, 0, 3.0, True, "ieee", False, 0.0, False, "reference")


@pytest.fixture
def qkv(torch_device):
    torch.manual_seed(0)
    shape = (BATCH, SEQ, HEADS, DIM)
    return tuple(torch.randn(shape, device=torch_device, requires_grad=True) for _ in range(3))


@pytest.fixture(params=[False, True], ids=["", "sinks"])
def operands(request, qkv):
    sinks = torch.randn(HEADS, device=qkv[0].device, requires_grad=True)
    return (*qkv, sinks) if request.param else qkv


def loss(q, k, v, sinks=None, **options):
    out, lse = flash_attention(
        q, k, v, sinks=sinks, causal=True, return_lse=True, implementation="reference", **options
    )
    return out.square().sum() + lse.sin().sum()


def plain_loss(q, k, v, sinks=None):
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    seen = torch.ones(SEQ, SEQ, dtype=torch.bool, device=q.device).tril()
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(len(q), -1, SEQ, 1)], dim=-1)
    out = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1)[..., :SEQ], v)
    return out.square().sum() + s.logsumexp(-1).sin().sum()


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def backward_arguments(operands, with_dlse=True):
    given = FlashOperands(*(x.detach() for x in operands))
    out, lse = DENSE.fwd(*given, *OPTIONS)
    dlse = torch.randn_like(lse) if with_dlse else None
    return torch.randn_like(out), dlse, *given, out, lse, None, "", *OPTIONS


def test_opcheck_forward(operands):
    opcheck(DENSE.fwd, (*FlashOperands(*operands), *OPTIONS))


@pytest.mark.parametrize("with_dlse", [True, False])
def test_opcheck_backward(operands, with_dlse):
    opcheck(DENSE.bwd, backward_arguments(operands, with_dlse))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_forward_and_backward(torch_device, dynamic):
    torch._dynamo.reset()
    traces = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=traces, dynamic=dynamic)
    def compiled(*operands):
        return loss(*operands, softcap=4.0, window_size=(9, None))

    for batch, seq in ((3, 21), (4, 34)):
        shapes = [(batch, seq, HEADS, DIM)] * 3 + [(HEADS,)]
        eager = [torch.randn(x, device=torch_device, requires_grad=True) for x in shapes]
        inputs = [x.detach().clone().requires_grad_() for x in eager]
        got, want = compiled(*inputs), loss(*eager, softcap=4.0, window_size=(9, None))
        got.backward()
        want.backward()
        assert_same([got, *(x.grad for x in inputs)], [want, *(x.grad for x in eager)])
    assert traces.frame_count == (1 if dynamic else 2)


def test_every_backend_has_the_operators():
    importlib.import_module("torch_attn.decode_ops")
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    for op in ("flash_fwd", "flash_bwd", "paged_decode", "append_kv", "merge_states"):
        for backend in ("CPU", "CUDA", "MPS", "XPU", "HPU", "PrivateUse1", "Meta"):
            assert has_kernel(f"twin_attention::{op}", backend), (op, backend)


def test_kernels_are_refused_where_there_are_none():
    spec = AttentionSpec(1, 8, 8, 2, 2, 64, 64, "float32", 0.125)
    for kind in ("mps", "xpu"):
        device = torch.device(kind)
        for asked in (None, "reference"):
            backend, _ = choose(asked, "flash_fwd", device, spec)
            assert backend.family.name == "reference"
        message = (
            "^implementation: expected None, or the name of .*, got 'triton': its kernels compile"
        )
        with pytest.raises(NotImplementedError, match=message):
            choose("triton", "flash_fwd", device, spec)


@pytest.mark.parametrize("implementation", [None, "triton", "reference"])
def test_meta_tensors_have_shapes_alone(implementation):
    q, k, v = torch.empty(3, 2, 5, 4, 16, device="meta", requires_grad=True).unbind()
    out, lse = flash_attention(q, k, v, return_lse=True, implementation=implementation)
    assert (out.shape, lse.shape, out.device.type) == (q.shape, (2, 4, 5), "meta")
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_tensors_that_are_not_dense(qkv):
    q, k, v = (x.detach() for x in qkv)
    jagged = torch.nested.nested_tensor([torch.ones(3, 2, 16)] * 2, layout=torch.jagged)
    for wrong, got in (
        (k.to_sparse(), "layout torch.sparse_coo"),
        (jagged, "a nested tensor"),
        (torch.nested.nested_tensor([torch.ones(3, 2, 16)]), "a nested tensor"),
    ):
        with pytest.raises(TypeError, match=f"^k: expected a dense tensor, got {got}$"):
            flash_attention(q, wrong, v)


def test_gradients_of_out_and_lse(operands):
    want = torch.autograd.grad(plain_loss(*operands), operands)
    assert_same(torch.autograd.grad(loss(*operands), operands), want)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("used", [0, 1], ids=["out", "lse"])
def test_gradients_of_one_output(qkv, used, implementation):
    """The other has none, and this one's is an expanded scalar with strides of 0."""
    outputs = flash_attention(*qkv, return_lse=True, implementation=implementation)
    gradients = torch.autograd.grad(outputs[used].sum(), qkv)
    zeros = torch.zeros_like(outputs[1 - used])
    materialized = [torch.ones_like(outputs[used]), zeros]
    outputs = flash_attention(*qkv, return_lse=True, implementation=implementation)
    want = torch.autograd.grad((outputs[used], outputs[1 - used]), qkv, materialized)
    assert_same(gradients, want)
    assert any(g.abs().max() > 0 for g in gradients)


def plain_jvp(operands, names=(0, 1, 2, 3)):
    """Return the loss's tangent, by operands of these numbers, for their own values."""
    gradients = torch.autograd.grad(plain_loss(*operands), operands)
    pairs = enumerate(zip(operands, gradients, strict=True))
    return sum((x * dx).sum() for i, (x, dx) in pairs if i in names)


def test_opcheck_of_tangents(operands):
    _, _, *more, _, _ = backward_arguments(operands)
    tangents = [x if x is None else torch.randn_like(x) for x in (*more[:4], None, None)]
    opcheck(DENSE.operator.jvp.op, (*tangents, *more[: more.index("")], *OPTIONS))


@pytest.mark.parametrize("way", ["torch.func", "dual", "dual of compiled", "compiled"])
def test_tangents(operands, way):
    """With dual numbers operands also need gradients, for which a compiled function has no jvp."""
    want, alone = plain_jvp(operands), plain_jvp(operands, (1,))
    if way != "dual":
        operands = [x.detach() for x in operands]
    if way.startswith("dual"):
        run = torch.compile(loss, backend="aot_eager") if way == "dual of compiled" else loss
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, x.detach()) for x in operands]
            found = forward_ad.unpack_dual(run(*duals)).tangent
            found_alone = forward_ad.unpack_dual(run(operands[0], duals[1], *operands[2:])).tangent
        assert_same(found_alone, alone)
    else:

        def run(*operands):
            return jvp(loss, operands, operands)[1]

        if way == "compiled":
            run = torch.compile(run, fullgraph=True, backend="aot_eager")
        found = run(*operands)
    assert_same(found, want)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_tangents_of_one_output(qkv, implementation):
    def lse(k):
        _, found = flash_attention(q, k, v, return_lse=True, implementation=implementation)
        return found

    q, k, v = (x.detach() for x in qkv)
    want, *_ = vjp(lse, k)[1](torch.ones(BATCH, HEADS, SEQ, device=k.device))
    assert_same(jvp(lse, (k,), (q,))[1].sum(), (want * q).sum())


def test_jacfwd(operands):
    operands = [x.detach()[:, :3] if x.ndim > 1 else x.detach() for x in operands]
    last = len(operands) - 1  # values, or sinks

    def row(*operands):
        *qkv, sinks = operands if last == 3 else (*operands, None)
        return flash_attention(*qkv, sinks=sinks, implementation="reference")[:, 1, 0]

    assert_same(jacfwd(row, last)(*operands), jacrev(row, last)(*operands))


def test_tangents_and_vmap(operands):
    """Also with a bias, which takes a call for each element."""
    q, k, v, *sinks = (x.detach() for x in operands)
    bias = torch.randn(1, HEADS, SEQ, SEQ, device=q.device)
    qs, ts = torch.stack([q, 2 * q]), torch.stack([v, -k])

    def attend(q):
        return flash_attention(q, k, v, sinks=sinks[0] if sinks else None, return_lse=True)

    def biased(bias):
        return flash_attention(q, k, v, bias=bias, return_lse=True)

    want = [jvp(attend, (x,), (t,))[1] for x, t in zip(qs, ts, strict=True)]
    want = tuple(map(torch.stack, zip(*want, strict=True)))
    assert_same(vmap(lambda x, t: jvp(attend, (x,), (t,))[1])(qs, ts), want)
    assert_same(jvp(vmap(attend), (qs,), (ts,))[1], want)
    biases = torch.stack([bias, -bias])
    found = vmap(lambda t: jvp(biased, (bias,), (t,))[1])(biases)
    assert_same(found, tuple(torch.stack([x, -x]) for x in jvp(biased, (bias,), (bias,))[1]))


def test_grad(operands):
    want = torch.autograd.grad(plain_loss(*operands), operands)
    assert_same(grad(loss, argnums=tuple(range(len(operands))))(*operands), want)


def test_vjp_of_lse(qkv):
    q, k, v = qkv
    _, pullback = vjp(lambda q: flash_attention(q, k, v, return_lse=True)[1], q)
    want = torch.autograd.grad(flash_attention(*qkv, return_lse=True)[1].sum(), q)
    assert_same(pullback(torch.ones(BATCH, HEADS, SEQ, device=q.device)), want)


def test_vmap(qkv):
    q, k, v = (x.detach() for x in qkv)
    qs = torch.stack([q, 2 * q, -q], dim=2)
    got = vmap(flash_attention, in_dims=(2, None, None), out_dims=1)(qs, k, v)
    want = torch.stack([flash_attention(x, k, v) for x in (q, 2 * q, -q)], dim=1)
    assert_same(got, want)


@pytest.mark.parametrize("mapped", ["q", "sinks", "all"])
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_vmap_with_sinks(qkv, mapped, implementation):
    """Each is mapped alone or with the others, and has a gradient of each of its own."""
    q, k, v = (x.detach() for x in qkv)
    one = {"q": q, "k": k, "v": v, "sinks": torch.randn(HEADS, device=q.device)}
    many = [torch.stack([x, 2 * x, -x]) for x in one.values()]
    dims = [0 if mapped in (name, "all") else None for name in one]
    given = [x if dim is None else y for x, y, dim in zip(one.values(), many, dims, strict=True)]

    def attend(q, k, v, sinks):
        out, lse = flash_attention(
            q, k, v, sinks=sinks, causal=True, return_lse=True, implementation=implementation
        )
        return out.square().sum() + lse.sin().sum(), (out, lse)

    run = grad(attend, argnums=(0, 1, 2, 3), has_aux=True)
    got, (out, lse) = vmap(run, in_dims=tuple(dims))(*given)
    for i in range(3):
        each = [x if dim is None else x[i] for x, dim in zip(given, dims, strict=True)]
        want, (want_out, want_lse) = run(*each)
        assert_same((out[i], lse[i]), (want_out, want_lse))
        assert_same(tuple(x[i] for x in got), want)


def test_grad_of_vmap(qkv):
    q, k, v = qkv
    got = grad(lambda k: vmap(loss, in_dims=(0, None, None))(torch.stack([q, 2 * q]), k, v).sum())
    (want,) = torch.autograd.grad(loss(q, k, v) + loss(2 * q, k, v), k)
    assert_same(got(k), want)


def test_batched_gradients(operands):
    q, k, v, *sinks = operands
    douts = torch.randn(3, *q.shape, device=q.device)
    out = flash_attention(q, k, v, sinks=sinks[0] if sinks else None)
    each = [torch.autograd.grad(out, operands, dout, retain_graph=True) for dout in douts]
    got = torch.autograd.grad(out, operands, douts, is_grads_batched=True)
    assert_same(got, tuple(map(torch.stack, zip(*each, strict=True))))


def test_compile_of_grad_and_vmap(operands):
    operands = [x.detach() for x in operands]
    compiled = torch.compile(grad(loss), fullgraph=True, backend="aot_eager")
    assert_same(compiled(*operands), grad(loss)(*operands))
    many = [torch.stack([x, 2 * x]) for x in operands[:3]]
    compiled = torch.compile(vmap(flash_attention), fullgraph=True, backend="aot_eager")
    assert_same(compiled(*many), vmap(flash_attention)(*many))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_autocast_casts_as_for_sdpa(qkv, dtype, implementation):
    q, k, v = qkv
    mixed = q, k.half(), v.bfloat16()
    options = {"return_lse": True, "implementation": implementation}
    want = flash_attention(*(x.to(dtype) for x in mixed), **options)
    with torch.autocast(q.device.type, dtype):
        got = flash_attention(*mixed, **options)
        sdpa = torch.nn.functional.scaled_dot_product_attention(*mixed)
    assert got[0].dtype == sdpa.dtype == dtype
    assert got[1].dtype == torch.float32
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    (dq,) = torch.autograd.grad(got[0].sum(), q)
    assert dq.dtype == torch.float32


def test_autocast_inside_compile(qkv):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q, k, v):
        with torch.autocast(q.device.type, torch.bfloat16):
            return flash_attention(q, k, v, return_lse=True)

    out, lse = compiled(*qkv)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("shape", [(0, 3, 3, 2), (1, 0, 3, 2), (1, 3, 0, 2), (1, 3, 3, 0)], ids=str)
def test_empty_problems_run_no_kernel(torch_device, monkeypatch, implementation, shape):
    batch, seq_q, seq_kv, heads = shape
    q = torch.randn(batch, seq_q, heads, 16, device=torch_device, requires_grad=True)
    k = torch.randn(batch, seq_kv, heads, 16, device=torch_device, requires_grad=True)
    v = torch.randn(batch, seq_kv, heads, 24, device=torch_device, requires_grad=True)
    if implementation == "triton":
        monkeypatch.setitem(sys.modules, "torch_attn.kernels.portable.flash_fwd", None)
        for name in ("bwd", "jvp"):
            monkeypatch.setitem(sys.modules, f"torch_attn.kernels.portable.flash_{name}", None)
    sinks = torch.full((heads,), 1.5, device=torch_device)
    out, lse = flash_attention(q, k, v, sinks=sinks, return_lse=True, implementation=implementation)
    assert torch.equal(out, torch.zeros(batch, seq_q, heads, 24, device=torch_device))
    assert torch.equal(lse, torch.full((batch, heads, seq_q), 1.5, device=torch_device))
    for x, dx in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(dx, torch.zeros_like(x))

    def attend(q, sinks):
        return flash_attention(q, k, v, sinks=sinks, return_lse=True, implementation=implementation)

    dout, dlse = jvp(attend, (q, sinks), (q, sinks))[1]
    assert torch.equal(dout, out)
    assert torch.equal(dlse, lse)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_capture_in_a_cuda_graph():
    q, k, v = torch.randn(3, 2, 65, 2, 64, device="cuda", dtype=torch.bfloat16).unbind()
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]

    def step():
        out = flash_attention(*inputs, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out.sum(), inputs)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # The default mode, "global", forbids some calls of CUDA to every thread of the process: also to
    # JAX's threads, and to garbage of JAX's.
    gc.collect()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    with torch.no_grad():
        for x in inputs:
            x.mul_(0.5)
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


def test_rows_are_aligned_or_not():
    x = torch.zeros(2 * 8 * 4 * 24, dtype=torch.float16)
    assert x.data_ptr() % 16 == 0
    rows = x.view(2, 8, 4, 24)
    assert rows_aligned(rows, rows[:, 1:, ::2, 8:])
    assert not rows_aligned(rows, rows[..., 4:])  # the first row begins at 8 bytes
    assert not rows_aligned(x[: 2 * 8 * 4 * 20].view(2, 8, 4, 20))  # every other one does
    with FakeTensorMode():  # which has no address
        assert rows_aligned(torch.empty(2, 8, 4, 24))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled kernels need a GPU")
def test_explain_a_gpu():
    q, k, v = torch.randn(3, 1, 8, 2, 64, device="cuda").unbind()
    choice = explain(flash_attention, q, k, v)
    assert (choice.implementation, choice.execution) == ("triton", "compiled")
    assert choice.device == torch.cuda.get_device_name()
    assert choice.target in ("sm80", "sm90")
