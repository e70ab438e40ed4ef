"""PyTorch's own attention on `torch_attn`: results, gradients and layouts are aten's.

The overrides are registered for the CPU too, where aten has no kernels for most of these operators.
"""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import varlen
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import torch_attn
from torch_attn import aten as adapter
from torch_attn import flash_attention, flash_attention_varlen
from torch_attn.aten import NAME, activate, override, restore
from twin_attention.contract.tolerances import compare_to_reference

aten = torch.ops.aten
ORDERS = {"BSHD": (0, 2, 1, 3), "BHSD": (0, 1, 2, 3), "SBHD": (1, 2, 0, 3)}
OFFSETS = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 6, 14], dtype=torch.int32)
HAS_PAGES = "block_table" in inspect.signature(varlen.varlen_attn).parameters
needs_pages = pytest.mark.skipif(not HAS_PAGES, reason="varlen_attn of torch 2.11 has no pages")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="PyTorch's flash attention runs on CUDA only"
)


def registered(device: str = "CUDA") -> list[bool]:
    tables = [torch._C._dispatch_dump_table(f"aten::{name}") for name in adapter.OVERRIDES]
    line = re.compile(rf"^{device}: .*aten\.py", re.MULTILINE)
    return [line.search(table) is not None for table in tables]


@pytest.fixture
def on_cpu():
    overrides = override("CPU")
    yield
    assert any(registered("CPU"))
    overrides.remove()
    assert not any(registered("CPU"))


def draw(order: str, *shape: int, **options) -> torch.Tensor:
    """Draw [B, H, S, D] that lies in memory in this order."""
    axes = ORDERS[order]
    inner = torch.randn([shape[axes.index(axis)] for axis in range(4)], **options)
    return inner.permute(axes).requires_grad_()


def plain(q, k, v, causal, scale):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(s.shape[2:], device=s.device).tril(s.shape[3] - s.shape[2]).bool()
        s = s.masked_fill(~seen, -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize(
    ("size", "seq_kv", "causal", "scale"),
    [(16, 10, True, None), (16, 13, True, 0.3), (8, 13, False, None)],
)
def test_sdpa(on_cpu, order, heads_kv, size, seq_kv, causal, scale):
    qkv = [draw(order, 2, h, s, size) for h, s in ((4, 10), (heads_kv, seq_kv), (heads_kv, seq_kv))]
    out, lse, cum_q, cum_k, max_q, max_k, *_ = aten._scaled_dot_product_flash_attention(
        *qkv, 0.0, causal, scale=scale
    )
    wanted, wanted_lse = plain(*qkv, causal, scale)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 10, seq_kv)
    dout = draw("BSHD", *out.shape)
    gradients = torch.autograd.grad(out, qkv, dout)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, qkv, dout))
    for x, like in zip((out, *gradients), (qkv[0], *qkv), strict=True):
        assert x.stride() == torch.empty_like(like).stride()


@pytest.mark.parametrize("order", ORDERS)
def test_sdpa_copies_nothing(monkeypatch, order):
    calls = []

    def attend(q, k, v, **_):
        calls.append((q, k, v))
        return torch.empty(q.shape), torch.empty(q.shape[0], *q.shape[2:0:-1])

    monkeypatch.setattr(adapter, "flash_attention", attend)
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    with torch.no_grad():
        qkv = draw(order, 6, 4, 10, 16).chunk(3)
        adapter.sdpa_forward(*qkv)
        padded = [draw(order, 2, 4, 10, 48)[..., :16] for _ in range(3)]
        adapter.sdpa_forward(*padded)
    for x, y in zip((*qkv, *padded), (*calls[0], *calls[1]), strict=True):
        assert x.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("order", ORDERS)
def test_dropout_repeats_in_the_backward(on_cpu, order):
    q, k, v = qkv = [draw(order, 2, 4, 10, 16) for _ in range(3)]
    torch.manual_seed(5)
    out, *_, state, _, _ = aten._scaled_dot_product_flash_attention(*qkv, 0.4, True)
    seed = state.view(torch.int32)[:2]
    ours = [x.transpose(1, 2) for x in (q, k, v)]
    wanted = flash_attention(*ours, causal=True, dropout_rate=0.4, dropout_seed=seed)
    wanted = wanted.transpose(1, 2)
    torch.testing.assert_close(out, wanted)
    gradients = torch.autograd.grad(out.sum(), qkv)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted.sum(), qkv))
    again = aten._scaled_dot_product_flash_attention(*qkv, 0.4, True)[0]
    assert not torch.equal(again, out)
    torch.manual_seed(5)
    assert torch.equal(aten._scaled_dot_product_flash_attention(*qkv, 0.4, True)[0], out)


def test_autograd_records_only_the_operator_of_aten(on_cpu, monkeypatch):
    modes = []

    def attend(*args, **options):
        modes.append(torch.is_grad_enabled())
        return flash_attention(*args, **options)

    monkeypatch.setattr(adapter, "flash_attention", attend)
    x = draw("BSHD", 1, 2, 4, 16)
    aten._scaled_dot_product_flash_attention(x, x, x)[0].sum().backward()
    assert modes == [False]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_varlen_attn(on_cpu, window):
    qkv = [torch.randn(12, 4, 16), torch.randn(14, 2, 16), torch.randn(14, 2, 16)]
    if not HAS_PAGES:  # nor fewer kv heads
        qkv[1:] = (x.repeat_interleave(2, 1) for x in qkv[1:])
    qkv = [x.requires_grad_() for x in qkv]
    options = {"enable_gqa": True} if HAS_PAGES else {}
    out, lse = varlen.varlen_attn(
        *qkv, *OFFSETS, 7, 8, window_size=window, return_aux=varlen.AuxRequest(lse=True), **options
    )
    ours = tuple(None if side == -1 else side for side in window)
    wanted, wanted_lse = flash_attention_varlen(*qkv, *OFFSETS, window_size=ours, return_lse=True)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
    gradients = torch.autograd.grad(out.sum(), qkv)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted.sum(), qkv))


@needs_pages
def test_varlen_attn_over_pages_and_into_a_tensor(on_cpu):
    pages = torch.randn(2, 7, 4, 2, 16).half()
    table = torch.tensor([[3, 0, 5], [6, 1, 4]], dtype=torch.int32)
    q, lengths = torch.randn(12, 4, 16).half(), torch.tensor([7, 9], dtype=torch.int32)
    options = {"enable_gqa": True, "window_size": (4, 0), "seqused_k": lengths}
    arguments = q, *pages, OFFSETS[0], None, 7, 9
    out = varlen.varlen_attn(*arguments, block_table=table, **options)
    wanted = torch_attn.paged_attention(q, *pages, table, lengths, OFFSETS[0], window_size=(4, 0))
    torch.testing.assert_close(out, wanted)
    given = torch.empty_like(q)
    varlen.varlen_attn_out(given, *arguments, block_table=table, **options)
    assert torch.equal(given, out)


def test_nested_tensors(on_cpu, monkeypatch):
    from torch.nested._internal import sdpa

    flash = attention.SDPBackend.FLASH_ATTENTION  # PyTorch chooses it on CUDA
    monkeypatch.setattr(sdpa, "_select_sdp_backend", lambda *_: flash)
    parts = [[torch.randn(n, 4, 16) for n in (5, 3)] for _ in range(3)]
    q, k, v = (torch.nested.nested_tensor(x, layout=torch.jagged).transpose(1, 2) for x in parts)
    outs = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).unbind()
    for out, *one in zip(outs, *parts, strict=True):
        torch.testing.assert_close(out, flash_attention(*(x[None] for x in one), causal=True)[0])


@pytest.mark.parametrize("order", ["BHSD", "SBHD"])
def test_compiled(on_cpu, order):
    def attend(q, k, v):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0] * 2

    qkv = [draw(order, 2, 4, 10, 16) for _ in range(3)]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out, wanted = compiled(*qkv), attend(*qkv)
    torch.testing.assert_close(out, wanted)
    gradients = torch.autograd.grad(out.sum(), qkv)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted.sum(), qkv))


def test_the_backward_is_deterministic_as_torch_says():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.twin_attention.flash_bwd.default:
                named = zip(function._schema.arguments, args, strict=False)
                seen.append({x.name: value for x, value in named}["deterministic"])
            return function(*args, **(kwargs or {}))

    x = torch.randn(1, 4, 2, 16)
    out, lse, state, *_ = adapter.flash_forward(x, x, x, None, None, 4, 4, 0.0, False, False)
    for wanted in (True, False):
        torch.use_deterministic_algorithms(wanted)
        try:
            with Watch():
                adapter.flash_backward(
                    x, x, x, x, out, lse, None, None, 4, 4, 0.0, False, state, state
                )
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [True, False]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("return_debug_mask", {"return_debug_mask": True}),
        ("alibi_slopes", {"alibi_slopes": torch.ones(2)}),
        ("seqused_k", {"seqused_k": torch.ones(1, dtype=torch.int32)}),
        ("num_splits", {"num_splits": 2}),
        ("window_size_right", {"block_table": torch.zeros(1, 1), "window_size_right": 1}),
        ("dropout_p", {"block_table": torch.zeros(1, 1), "is_causal": True, "dropout_p": 0.1}),
        ("block_table", {"block_table": torch.zeros(1, 1), "is_causal": True}),
        ("value", {"value": torch.randn(1, 4, 2, 24)}),
        ("q", {"query": torch.randn(1, 4, 2, 32)[..., ::2]}),
    ],
)
def test_refused_by_name(name, options):
    x = torch.randn(1, 4, 2, 16)
    arguments = {"query": x, "key": x, "value": x, "cum_seq_q": None, "cum_seq_k": None}
    arguments |= {"max_q": 4, "max_k": 4, "dropout_p": 0.0, "is_causal": False}
    with pytest.raises((NotImplementedError, ValueError), match=f"^{name}: expected"):
        adapter.flash_forward(**arguments | {"return_debug_mask": False} | options)


def test_activation():
    had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    available = [hasattr(aten, name) for name in adapter.OVERRIDES]
    removed = []
    other = SimpleNamespace(remove=lambda: removed.append(True))
    attention.register_flash_attention_impl("other", register_fn=lambda: other)
    restore()  # without effect
    torch_attn.activate()
    assert registered() == available
    assert attention.current_flash_attention_impl() == NAME
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    with torch_attn.activate():
        assert registered() == available
    assert registered() == available  # it was active before
    torch_attn.restore()
    assert not any(registered())
    assert attention.current_flash_attention_impl() is None
    assert torch.backends.cuda.cudnn_sdp_enabled() == had_cudnn

    attention.activate_flash_attention_impl("other")
    with activate():
        assert removed == [True]
    assert attention.current_flash_attention_impl() == "other"
    attention.restore_flash_attention_impl()


def test_a_torch_without_the_hook(monkeypatch):
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    message = r"^activate: expected a PyTorch with torch\.nn\.attention\.register_flash.*, got \d"
    with pytest.raises(NotImplementedError, match=message):
        activate()


def kernels_of(function) -> list[str]:
    function()  # compile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events()]


def run_sdpa(**options):
    q, k, v = torch.randn(3, 2, 4, 300, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    scaled_dot_product_attention(q, k, v, is_causal=True, **options).sum().backward()


def run_lower_right():
    q, k, v = torch.randn(3, 2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    mask = causal_lower_right(100, 300)
    scaled_dot_product_attention(q[:, :, :100], k, v, attn_mask=mask)


def run_varlen():
    q, k, v = torch.randn(3, 500, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    offsets = torch.tensor([0, 200, 500], dtype=torch.int32, device="cuda")
    out = varlen.varlen_attn(q, k, v, offsets, offsets, 300, 300, window_size=(64, 0))
    out.sum().backward()


def run_nested(layout):
    x = [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (200, 300)]
    q, k, v = (torch.nested.nested_tensor(x, layout=layout).transpose(1, 2) for _ in range(3))
    scaled_dot_product_attention(q, k, v)


def run_module():
    layer = torch.nn.MultiheadAttention(256, 4, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, 2, 256, device="cuda", dtype=torch.bfloat16)
    layer(x, x, x, need_weights=False)[0].sum().backward()


@needs_gpu
@pytest.mark.parametrize(
    "call",
    [
        run_sdpa,
        lambda: run_sdpa(dropout_p=0.1),
        torch.compile(run_sdpa),
        run_lower_right,
        run_varlen,
        lambda: run_nested(torch.jagged),
        lambda: run_nested(torch.strided),
        run_module,
    ],
)
def test_the_kernels_are_ours(call):
    with activate():
        names = kernels_of(call)
    assert any("flash_fwd" in name for name in names)
    assert not [x for x in names if re.search("pytorch_flash|cudnn|cutlass.*fmha|fmha_", x)]


@needs_gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("heads_kv", "size"), [(4, 64), (2, 64), (4, 8), (4, 20), (4, 256)])
def test_sdpa_on_a_gpu(order, heads_kv, size):
    """Within the error budget, and laid out as PyTorch's own."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    qkv = [draw(order, 2, h, 200, size, **options) for h in (4, heads_kv, heads_kv)]
    dout = draw("BSHD", 2, 4, 200, size, **options).detach()

    def results(attend, qkv):
        out = attend(*qkv)
        return [x.detach() for x in (out, *torch.autograd.grad(out, qkv, dout.to(out.dtype)))]

    def attend(*qkv):
        return scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=heads_kv == 2)

    def formula(*qkv):
        return plain(*qkv, True, None)[0]

    exact = results(formula, [x.detach().double().requires_grad_() for x in qkv])
    low_precision = results(formula, qkv)
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        theirs = results(attend, qkv)
    with activate():
        ours = results(attend, qkv)
    kinds = "output", "gradient", "gradient", "gradient"
    for x, ref, lp, their, kind in zip(ours, exact, low_precision, theirs, kinds, strict=True):
        assert x.stride() == their.stride()
        assert compare_to_reference(x, ref, lp, "bfloat16", kind).ok
