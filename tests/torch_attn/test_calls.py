from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_attn import append_kv, calls, flash_attention, paged_decode, private
from torch_attn.calls import CALLS, Call, Guard, is_recorded
from torch_attn.dispatch import choose
from torch_attn.flash_ops import DENSE
from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.spec import AttentionSpec, FlashOptions
from twin_attention.targets.config import use_configs
from twin_attention.targets.target import use_target

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="calls are kept on a GPU")
SPEC = AttentionSpec(1, 4, 4, 2, 2, 64, 64, "float16", 0.125)
LEFT_OUT = FlashOperands("q", "k", "v")[3:]  # what a call has no operand for
OPTIONS = (True, 0.5, (1, 0), None)


class Fake:
    is_cuda = True

    def __init__(self, shape=(1, 4, 2, 64), strides=(512, 128, 64, 1), dtype=torch.float16,
                 device=0, pointer=256, negative=False, requires_grad=False):  # fmt: skip
        self.requires_grad = requires_grad
        self.shape, self.dtype, self.itemsize = shape, dtype, dtype.itemsize
        self.is_neg, self._is_zerotensor = lambda: negative, lambda: False
        self.device = torch.device("cuda", device)
        self.stride, self.data_ptr = lambda: strides, lambda: pointer
        self.get_device = lambda: device


@pytest.fixture
def no_calls():
    CALLS.clear()
    yield
    CALLS.clear()


@pytest.fixture
def hopper(no_calls, monkeypatch):
    monkeypatch.setattr("torch_attn.targets._properties", lambda device: ((9, 0), 132, 227 * 1024))
    monkeypatch.setattr("twin_attention.targets.target._environment", None)


@pytest.fixture
def gpu(hopper, monkeypatch):
    monkeypatch.setattr(calls, "_PLAIN", (Fake,))
    monkeypatch.setattr(calls, "Guard", lambda *_: lambda others: False)


def remember(*operands, options=OPTIONS, spec=SPEC, implementation=None):
    call = Call("flash_fwd", DENSE.run, spec, operands[0].device, (implementation,))
    return CALLS.keep("f", operands, options, call)


def test_the_same_call_is_recognised(gpu):
    assert CALLS.find("f", (Fake(), None), OPTIONS) is None
    remember(Fake(), None)
    call = CALLS.find("f", (Fake(pointer=512), None), OPTIONS)
    assert (call.spec, call.backend.target, call.backend.family.name) == (SPEC, "sm90", "gluon")
    assert CALLS.find("g", (Fake(), None), OPTIONS) is None
    assert CALLS.find("f", (Fake(), Fake()), OPTIONS) is None


def test_another_layout_or_option_is_looked_at_anew(gpu):
    remember(Fake())
    assert CALLS.find("f", (Fake(),), OPTIONS) is not None
    for change in (
        {"shape": (1, 5, 2, 64)}, {"strides": (512, 64, 128, 1)}, {"dtype": torch.bfloat16},
        {"device": 1}, {"pointer": 258}, {"negative": True},
        {"requires_grad": True},
    ):  # fmt: skip
        assert CALLS.find("f", (Fake(**change),), OPTIONS) is None, change
    for options in (
        (1, 0.5, (1, 0), None), (True, np.float64(0.5), (1, 0), None),
        (True, 0.5, (True, False), None), (True, 0.5, [1, 0], None),
        (True, 0.5, (1, 0), "triton"), (True, 0.25, (1, 0), None),
    ):  # fmt: skip
        assert CALLS.find("f", (Fake(),), options) is None, options


def test_the_switches_are_a_part_of_the_call(gpu, monkeypatch):
    remember(Fake())
    with use_target("sm80"):
        assert CALLS.find("f", (Fake(),), OPTIONS) is None
        remember(Fake())
        assert CALLS.find("f", (Fake(),), OPTIONS).backend.target == "sm80"
    with use_configs({"flash_fwd": {"block_q": 16}}):
        assert CALLS.find("f", (Fake(),), OPTIONS) is None
    assert CALLS.find("f", (Fake(),), OPTIONS).backend.target == "sm90"
    monkeypatch.setattr("twin_attention.targets.target._environment", "sm80")
    assert CALLS.find("f", (Fake(),), OPTIONS).backend.target == "sm80"


class DispatchMode(TorchDispatchMode):
    pass


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [DispatchMode, FunctionMode])
def test_what_changes_a_call_from_outside_is_looked_at_anew(gpu, mode):
    remember(Fake())
    with mode():
        assert CALLS.find("f", (Fake(),), OPTIONS) is None


def test_a_transformation_is_looked_at_anew(gpu):
    remember(Fake())
    found = []
    torch.func.vmap(lambda x: found.append(CALLS.find("f", (Fake(),), OPTIONS)) or x)(torch.ones(2))
    torch.compile(
        lambda x: x + (1 if CALLS.find("f", (Fake(),), OPTIONS) is None else 2), backend="eager"
    )
    assert found == [None]


def test_only_calls_of_compiled_kernels_are_kept(gpu):
    assert not remember(Fake(), implementation="reference")
    assert not remember(Fake(), spec=AttentionSpec(0, 4, 4, 2, 2, 64, 64, "float16", 0.125))
    assert not remember(torch.zeros(1, 4, 2, 64))  # on a CPU
    assert not CALLS.by_key


def test_what_is_kept_has_a_limit(gpu, monkeypatch):
    monkeypatch.setattr(CALLS.by_key, "most", 2)
    monkeypatch.setattr(CALLS.last, "most", 2)
    for scale in range(5):
        remember(Fake(), options=(float(scale),))
        assert len(CALLS.by_key) <= 2 >= len(CALLS.last)


def tensor(*shape, **options):
    return torch.zeros(shape or (1, 4, 2, 64), **options)


def test_a_guard_recognises_other_tensors_of_the_same_layouts():
    guard = Guard((tensor(), None, tensor(3)))
    assert guard((tensor() + 1, None, tensor(3)))
    assert Guard((None, tensor()))((None, tensor()))


@pytest.mark.parametrize(
    "other",
    [
        lambda: tensor(1, 5, 2, 64),
        lambda: tensor(1, 2, 4, 64).transpose(1, 2),
        lambda: tensor(dtype=torch.float16),
        lambda: tensor(device="meta"),
        lambda: tensor(requires_grad=True),
        lambda: tensor(513)[1:].view(1, 4, 2, 64),
        lambda: torch.nn.Parameter(tensor(), requires_grad=False),
        lambda: torch._neg_view(tensor()),
        lambda: torch._efficientzerotensor((1, 4, 2, 64)),
        lambda: tensor().to_sparse(),
        lambda: None,
        lambda: 1,
    ],
)
def test_a_guard_does_not_recognise(other):
    first = tensor()
    guard = Guard((first, first + 1))
    assert guard((first, tensor()))
    assert not guard((first, other()))


def test_a_guard_knows_which_operands_are_left_out():
    x, y = tensor(), tensor(3)
    guard = Guard((x, None, y))
    assert not guard((x, y, None))
    assert not guard((x, tensor(), y))
    assert not guard((x, None, None))


def test_a_guard_recognises_nothing_in_other_modes():
    x = tensor()
    guard, found = Guard((x,)), []
    with DispatchMode():
        assert not guard((x,))
    with torch.autocast("cpu"):
        assert not guard((x,))
    torch.func.grad(lambda y: found.append(guard((x,)) or guard((y,))) or y.sum())(tensor())
    assert found == [False]
    assert guard((x,))


@pytest.fixture
def cpu(hopper, monkeypatch):
    monkeypatch.setattr(Tensor, "is_cuda", True)


def remember_tensors(*operands):
    call = Call("flash_fwd", DENSE.run, SPEC, torch.device("cuda", 0), (None,))
    assert CALLS.keep("f", operands, OPTIONS, call)
    return call


def test_the_last_call_is_found_without_a_key(cpu, monkeypatch):
    x, y = tensor(dtype=torch.float16), tensor(1, 5, 2, 64, dtype=torch.float16)
    of_x, of_y = remember_tensors(x), remember_tensors(y)
    asked, make = [], calls._key
    monkeypatch.setattr(calls, "_key", lambda *a: asked.append(a) or make(*a))
    assert [CALLS.find("f", (z,), OPTIONS) for z in (y, y, x, x, x, y)] == [
        of_y, of_y, of_x, of_x, of_x, of_y
    ]  # fmt: skip
    assert len(asked) == 2  # where the layout changes
    with FunctionMode():
        assert CALLS.find("f", (y,), OPTIONS) is None


def test_a_call_that_autograd_records_is_another(cpu):
    x = tensor(requires_grad=True)
    recorded = remember_tensors(x)
    assert recorded.is_recorded
    with torch.no_grad():
        assert CALLS.find("f", (x,), OPTIONS) is None
        alone = remember_tensors(x)
        assert not alone.is_recorded
        assert CALLS.find("f", (x,), OPTIONS) is alone
    assert CALLS.find("f", (x,), OPTIONS) is recorded
    with forward_ad.dual_level():
        assert CALLS.find("f", (x,), OPTIONS) is None


def test_forward_mode_finds_calls_of_what_has_no_tangent(cpu):
    x = tensor()
    call = remember_tensors(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tensor())
        assert CALLS.find("f", (x,), OPTIONS) is call
        assert CALLS.find("f", (dual,), OPTIONS) is None
        assert not CALLS.keep("f", (dual,), OPTIONS, call)


def test_a_tensor_that_begins_elsewhere_has_a_call_of_its_own(cpu):
    memory = torch.zeros(1, 4, 2, 65)
    aligned, other = memory.flatten()[:512], memory.flatten()[1:513]
    remember_tensors(aligned)
    assert CALLS.find("f", (other,), OPTIONS) is None
    call = remember_tensors(other)
    for _ in range(2):
        assert CALLS.find("f", (other,), OPTIONS) is call
        assert CALLS.find("f", (aligned,), OPTIONS) is not call


def test_what_autograd_records():
    x = torch.ones(2, requires_grad=True)
    assert is_recorded((None, x))
    assert not is_recorded((x.detach(), None, 1.0))
    with torch.no_grad():
        assert not is_recorded((x,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones(2))
        assert is_recorded((dual,))
        with private.below_autograd():  # where an operator runs inside a dispatch mode
            assert not is_recorded((dual,))


def rows():
    return tensor(1, 16, 2, 64, dtype=torch.float16)


@pytest.fixture
def backwards(cpu, monkeypatch):
    """Run a kept forward and its backward without kernels; return the backward's calls."""
    monkeypatch.setattr(Tensor, "get_device", lambda x: 0)
    spec = replace(SPEC, seq_q=16, seq_kv=16)
    others = (*FlashOptions(spec.scale, deterministic=False), None)
    forward, made = Call("flash_fwd", DENSE.run, spec, torch.device("cuda", 0), others), []

    def run(call, *tensors):
        if call is forward:
            return rows(), torch.zeros(1, 2, 16)
        made.append(call)
        return [rows() for _ in range(3)] + [None] * len(LEFT_OUT)

    def backward(unpack=lambda x: x, dout=None):
        qkv = [rows().requires_grad_() for _ in range(3)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out, _ = DENSE.attend(forward, (*qkv, *LEFT_OUT), False)
            dout = torch.ones_like(out) if dout is None else dout
            torch.autograd.grad(out, qkv, dout)
        return made

    monkeypatch.setattr(Call, "__call__", run)
    cuda = torch.device("cuda", 0)
    init = Call.__init__
    monkeypatch.setattr(Call, "__init__", lambda call, *args: init(call, *args[:3], cuda, args[4]))
    forward.is_recorded = True
    return backward, forward


def unaligned(x):
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype)
    return memory[1:].view(x.shape).copy_(x)


def heads_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_a_backward_follows_the_layouts_of_all_that_was_saved(backwards):
    backward, _ = backwards
    for unpack in (lambda x: x, heads_first, unaligned) * 2:
        made = backward(unpack)
    assert [made.index(call) for call in made] == [0, 1, 2] * 2  # recognised, each as its own
    assert [call.spec.rows_aligned for call in made[:3]] == [True, True, False]
    assert [call.backend.family.name for call in made[:3]] == ["gluon", "gluon", "triton"]


@pytest.mark.parametrize(
    ("unpack", "name"),
    [
        (lambda x: x.float(), "q: expected the saved dtype float16, got float32"),
        (lambda x: x.half(), "lse: expected the saved dtype float32, got float16"),
        (lambda x: x[:, :2], "out: expected the saved shape"),
    ],
    ids=["dtype", "log-sum-exp", "shape"],
)
def test_what_comes_back_as_another_tensor_is_refused(backwards, unpack, name):
    backward, _ = backwards
    backward()
    with pytest.raises((TypeError, ValueError), match=name):
        backward(unpack)


def test_the_reference_refuses_what_comes_back_in_another_dtype():
    q, k, v = (rows().requires_grad_() for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.float()):
        out = flash_attention(q, k, v)
        with pytest.raises(TypeError, match="q: expected the saved dtype float16"):
            out.sum().backward()


def test_a_family_asked_for_by_name_reads_a_copy_of_what_is_not_aligned(backwards):
    backward, forward = backwards
    forward.others = (*forward.others[:-1], "gluon")
    (call,) = backward(dout=unaligned(rows()))
    assert call.backend.family.folder == "sm90"
    read = []

    def function(dout, dlse, operands, out, lse, rest, spec, backend):
        read.extend((dout, *operands[:3], out))

    x, odd = rows(), unaligned(rows() + 2)
    DENSE.run_backward(
        function, call.spec, call.backend, odd, None, x, odd, x, *LEFT_OUT, odd, None, None
    )
    assert all(y.data_ptr() % 16 == 0 for y in read)
    assert all(torch.equal(y, odd) for y in (read[0], read[2], read[4]))
    assert read[1] is x
    assert read[3] is x


# On a GPU: the second call, which is recognised, against the first.


def inputs(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.randn(3, 2, 40, 4, 64, device="cuda", dtype=dtype).unbind()


@needs_a_gpu
def test_the_second_call_gives_the_same_bits():
    q, k, v = (x.requires_grad_() for x in inputs())
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    dout = torch.randn_like(q)
    results = []
    for _ in range(3):
        out, lse = flash_attention(
            q, k, v, sinks=sinks, causal=True, deterministic=True, return_lse=True
        )
        results.append(
            (out, lse, *torch.autograd.grad((out, lse.sum()), (q, k, v, sinks), (dout, None)))
        )
    for again in results[1:]:
        for x, y in zip(results[0], again, strict=True):
            assert torch.equal(x, y)


@needs_a_gpu
def test_checks_are_made_after_a_call_was_kept():
    q, k, v = inputs()
    flash_attention(q, k, v, causal=True)
    with pytest.raises(TypeError, match=r"^causal: expected a bool"):
        flash_attention(q, k, v, causal=1)
    with pytest.raises(TypeError, match=r"^k: expected"):
        flash_attention(q, k.float(), v, causal=True)
    with pytest.raises(ValueError, match=r"^v: expected"):
        flash_attention(q, k, v[:, :-1], causal=True)


@needs_a_gpu
def test_a_negative_view_is_read_as_its_values():
    q, k, v = inputs()
    want = flash_attention(-q, k, v)
    flash_attention(q, k, v)
    assert torch.equal(flash_attention(torch._neg_view(q), k, v), want)


@needs_a_gpu
def test_a_second_derivative_is_refused_after_a_call_was_kept():
    q, k, v = (x.requires_grad_() for x in inputs())
    for _ in range(2):
        out = flash_attention(q, k, v)
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="a second derivative"):
            torch.autograd.grad(dq.sum(), q)


@needs_a_gpu
def test_a_decode_that_requires_grad_is_refused_after_a_call_was_kept():
    pages = torch.zeros(4, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    tables = torch.zeros(1, 2, device="cuda", dtype=torch.int32)
    lengths = torch.ones(1, device="cuda", dtype=torch.int32)
    q = torch.zeros(1, 4, 64, device="cuda", dtype=torch.bfloat16)
    paged_decode(q, pages, pages, tables, lengths)
    append_kv(q[:, :2], q[:, :2], pages, pages.clone(), tables, lengths)
    with pytest.raises(NotImplementedError):
        paged_decode(q.clone().requires_grad_(), pages, pages, tables, lengths)
    with pytest.raises(NotImplementedError):
        append_kv(q[:, :2].clone().requires_grad_(), q[:, :2], pages, pages, tables, lengths)


@needs_a_gpu
def test_threads_may_call_at_once(no_calls):
    problems = [inputs() for _ in range(4)] + [
        [x[:, : 8 * n] for x in inputs()] for n in range(1, 5)
    ]
    wanted = [flash_attention(*qkv, causal=True) for qkv in problems]
    CALLS.clear()

    def work(start):
        for step in range(200):
            i = (start + step) % len(problems)
            assert torch.equal(flash_attention(*problems[i], causal=True), wanted[i])

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, start) for start in range(8)]:
            done.result(60)


@needs_a_gpu
def test_threads_may_make_the_first_call_and_its_backward_at_once():
    drawn = inputs()  # once: the threads share torch's generator

    def problem(n):
        return [x[:, : 8 * n].clone().requires_grad_() for x in drawn]

    def gradients(n):
        q, k, v = problem(n)
        out = flash_attention(q, k, v, causal=True, deterministic=True)
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    def work(start):
        together.wait(60)
        for step in range(20):
            n = 1 + (start + step) % 4
            for x, y in zip(gradients(n), wanted[n], strict=True):
                assert torch.equal(x, y)

    wanted = {n: gradients(n) for n in range(1, 5)}
    together = Barrier(8)
    CALLS.clear()
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, start) for start in range(8)]:
            done.result(120)


@needs_a_gpu
def test_every_backward_follows_the_switches_that_it_runs_under(no_calls, monkeypatch):
    monkeypatch.setattr("twin_attention.targets.target._environment", None)
    native = choose(None, "flash_bwd", torch.device("cuda"), SPEC)[0].target
    q, k, v = (x.requires_grad_() for x in inputs())

    def backward(out):
        found = []
        with monkeypatch.context() as patch:
            patch.setattr(Call, "__call__", lambda call, *x: found.append(call) or run(call, *x))
            torch.autograd.grad(out, q, torch.ones_like(out))
        return found

    run, seen = Call.__call__, []
    for _ in range(2):
        with use_target("sm80"):
            out = flash_attention(q, k, v, implementation="triton")
        seen += backward(out)
        out = flash_attention(q, k, v, implementation="triton")
        with use_target("sm80"), use_configs({"flash_bwd_dq": {"num_stages": 1}}):
            seen += backward(out)
    assert [call.backend.target for call in seen] == [native, "sm80"] * 2
    assert seen[:2] == seen[2:]  # recognised
