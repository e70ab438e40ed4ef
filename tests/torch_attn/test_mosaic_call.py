"""Launch kernels of `pallas_attn` on torch tensors; Python stands in for what C launches."""

import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch._C._dynamo.guards import _empty_strided_cpu

from interop.parity.cases import DecodeCase
from torch_attn import foreign, mosaic_call, private
from torch_attn.mosaic_call import Compiled, LaunchFunction, compile_module, launcher_of
from torch_attn.operands import COMPACT, compact, is_compact
from torch_attn.replay import capture
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import FOREIGN, Backend

SPEC = AttentionSpec(1, 4, 4, 2, 2, 64, 64, "bfloat16", 0.1)
STREAM = 5


class C:
    """The C function that launches, and what it was called with."""

    def __init__(self, num_buffers):
        self.calls = []
        self.compiled = Compiled(77, LaunchFunction(self._launch), num_buffers, 0)

    def _launch(self, kernel, stream, addresses):
        count = self.compiled.num_buffers
        pointers = (mosaic_call.ctypes.c_void_p * count).from_address(addresses)
        self.calls.append((kernel, stream, tuple(pointers)))


@pytest.fixture(autouse=True)
def contexts(monkeypatch):
    """Return the devices whose context was asked for."""
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked.append)
    monkeypatch.setattr(mosaic_call, "_threads", threading.local())
    return asked


def test_buffers_are_tensors_and_constants_in_the_kernels_order(contexts):
    c, constant = C(5), torch.zeros(3)
    launch = launcher_of(c.compiled, [1, 2, 0, 1, 0], (constant,))
    launch(STREAM, (512, 1024))
    at = constant.data_ptr()
    assert c.calls == [(77, STREAM, (1024, at, 512, 1024, 512))]
    launch(STREAM, (256, 768))
    assert c.calls[1] == (77, STREAM, (768, at, 256, 768, 256))
    assert contexts == [0]
    thread = threading.Thread(target=launch, args=(STREAM, (256, 768)))
    thread.start()
    thread.join()
    assert (contexts, len(c.calls)) == ([0, 0], 3)


def test_what_c_would_end_the_process_for_is_refused():
    c = C(2)
    with pytest.raises(NotImplementedError, match=r"at multiples of 256 bytes, got 0x110$"):
        launcher_of(c.compiled, [0, 1], ())(STREAM, (512, 272))
    with pytest.raises(NotImplementedError, match=r"expected 2 buffers of a kernel, got 3"):
        launcher_of(c.compiled, [0, 1, 0], ())
    assert c.calls == []


def test_a_plugin_without_the_compiler_is_refused():
    with pytest.raises(NotImplementedError, match=r"to have the function MosaicGpuCompile"):
        compile_module(b"", torch._C.__file__, 2, 0)


def test_compact():
    x = torch.zeros(4096, dtype=torch.bfloat16)
    x = x[-x.data_ptr() % COMPACT // 2 :][:1024].view(4, 4, 64)
    assert is_compact(x)
    assert compact(x) is x
    for other in (x[:, :2], x.mT, x[1:].view(-1)[8:]):
        assert not is_compact(other)
        assert torch.equal(compact(other), other)


@dataclass(frozen=True)
class Value:
    """A value of an outline."""

    number: int
    shape: tuple
    dtype: str = "float32"


class Step(NamedTuple):
    """An operation of an outline."""

    name: str
    args: tuple
    results: tuple


class Call(NamedTuple):
    """A kernel of an outline."""

    call: str
    operands: tuple
    results: tuple
    num_aliased: int


class Outline(NamedTuple):
    """An outline."""

    steps: tuple
    results: tuple


def outline_of_decode(function, operands, card):
    """Return one whose second kernel merges parts into what the first has written."""
    x, bits = Value(0, (4, 64)), Value(1, (4, 128), "int16")
    out, part, merged = Value(2, (64,)), Value(3, (4, 64)), Value(4, (64,))
    steps = (
        Step("bitcast", (x,), (bits,)),
        Call("second", (bits, x), (out, part), 0),
        Call("third", (part, out), (merged,), 1),
    )
    return Outline(steps, (merged,))


def outline(function, operands, card):
    """Return one with all that there is: a reshape, zeros in place, a constant."""
    assert [x.shape for x in operands] == [(4, 64), (4, 64)]
    x, y = Value(0, (4, 64)), Value(1, (4, 64))
    viewed, sums, filled = Value(2, (1, 4, 64)), Value(3, (64,)), Value(4, (64,))
    out, summed, last = Value(5, (1, 4, 64), "bfloat16"), Value(6, (64,)), Value(7, (4, 64))
    constant = np.arange(6, dtype=np.int32)
    steps = (
        Step("reshape", (x,), (viewed,)),
        Step("full", (0.0,), (sums,)),
        Step("full", (2.0,), (filled,)),
        Call("first", (viewed, constant, filled, sums), (out, summed), 1),
        Call("second", (y, summed, out), (last,), 0),
        Step("reshape", (out,), (Value(8, (4, 64), "bfloat16"),)),
    )
    return Outline(steps, (Value(8, (4, 64), "bfloat16"), None, last, summed))


@pytest.fixture
def kernels(monkeypatch):
    """Return the two kernels of `outline`, on a CPU that stands in for a GPU."""
    found = {"first": C(6), "second": C(4), "third": C(3)}
    monkeypatch.setattr(mosaic_call, "COMPACT", 1)  # a CPU's copies are not as aligned

    class Ahead:
        plugin = staticmethod(lambda: "a path")
        lower_ahead = staticmethod(lambda call: call)
        outline = staticmethod(lambda *args: outlines["made"](*args))

    monkeypatch.setattr(foreign, "import_module", lambda name: Ahead)
    monkeypatch.setattr(foreign, "compile_module", lambda module, *_: found[module].compiled)
    monkeypatch.setattr(foreign, "card_of", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: torch.cuda.ExternalStream)
    monkeypatch.setattr(torch.cuda.ExternalStream, "cuda_stream", STREAM, raising=False)
    monkeypatch.setattr(
        foreign, "new_tensor", lambda value, like: aligned(value.shape, value.dtype)
    )
    monkeypatch.setattr("twin_attention.targets.family.Family.function", lambda *_: None)
    foreign.plan.cache_clear()
    yield found
    foreign.plan.cache_clear()


outlines = {"made": outline}


def aligned(shape, dtype="float32"):
    """Return a compact tensor of NaN."""
    x = torch.full((2 * torch.Size(shape).numel() + COMPACT,), torch.nan)
    x = x[-x.data_ptr() % COMPACT // 4 :].view(getattr(torch, dtype))
    return x[: torch.Size(shape).numel()].view(shape)


def test_a_call_allocates_and_launches_what_the_outline_says(kernels):
    backend = Backend(FOREIGN["torch_attn"][0], "sm80")
    attend = foreign.function_of("flash_fwd")
    x, y = aligned((4, 64)), aligned((64, 4)).mT  # which is copied
    out, nothing, last, summed = attend(x, y, SPEC, backend)
    first, second, _ = (kernels[name].calls for name in kernels)
    (_, stream, (of_x, _constant, filled, sums, of_out, of_sums)), *_ = first
    assert (stream, of_x, of_out) == (STREAM, x.data_ptr(), out.data_ptr())
    assert sums == of_sums == summed.data_ptr() != filled
    assert torch.equal(summed, torch.zeros(64))
    (_, _, (of_y, *others)), *_ = second
    assert of_y != y.data_ptr()
    assert others == [summed.data_ptr(), out.data_ptr(), last.data_ptr()]
    assert (out.shape, out.dtype, nothing) == ((4, 64), torch.bfloat16, None)
    attend(x, y, SPEC, backend)
    assert first[1][2][1] == first[0][2][1]  # the constant


def test_a_call_is_captured_and_replayed(kernels, monkeypatch):
    monkeypatch.setattr(private, "empty_strided_cuda", _empty_strided_cpu)
    monkeypatch.setattr(private, "get_device", lambda: 0)
    monkeypatch.setattr(private, "get_stream", lambda index: STREAM + 1)
    backend = Backend(FOREIGN["torch_attn"][0], "sm80")
    attend = foreign.function_of("flash_fwd")
    x, y = aligned((4, 64)), aligned((4, 64))
    _, again = capture(lambda *tensors: attend(*tensors, SPEC, backend), (x, y))
    new_x, new_y = aligned((4, 64)), aligned((4, 64))
    out, _, last, summed = again(new_x, new_y)
    first, second = (kernels[name].calls[-1] for name in ("first", "second"))
    assert first[1] == second[1] == STREAM + 1
    assert (first[2][0], first[2][4]) == (new_x.data_ptr(), out.data_ptr())
    assert first[2][3] == first[2][5] == summed.data_ptr()
    assert second[2] == tuple(z.data_ptr() for z in (new_y, summed, out, last))
    assert torch.equal(summed, torch.zeros(64))
    assert (out.shape, last.shape) == ((4, 64), (4, 64))


def test_a_kernel_writes_into_what_another_has_written(kernels, monkeypatch):
    monkeypatch.setitem(outlines, "made", outline_of_decode)
    x = aligned((4, 64))
    (out,) = foreign.function_of("flash_fwd")(x, SPEC, Backend(FOREIGN["torch_attn"][0], "sm80"))
    (_, _, (bits, of_x, first, part)), *_ = kernels["second"].calls
    assert bits == of_x == x.data_ptr()
    assert kernels["third"].calls == [(77, STREAM, (part, first, out.data_ptr()))]
    assert first == out.data_ptr()


def test_a_pool_is_not_copied():
    case = DecodeCase("", (3, 4))
    pool = torch.zeros(8, 16, 4, 64)[:, :, ::2]
    operands = DecodeOperands(pool[0], pool, pool, pool, pool)
    with pytest.raises(NotImplementedError, match=r"k_pages: expected a contiguous pool"):
        foreign.function_of("paged_decode")(operands, case.spec, None)
