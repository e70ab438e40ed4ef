"""Launch kernels of `pallas_attn` on torch tensors; Python stands in for C."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._C._dynamo.guards import _empty_strided_cpu

from pallas_attn.kernels.gradients import sinks_gradient
from torch_attn import private
from torch_attn.operands import COMPACT, compact, is_compact
from torch_attn.replay import capture
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.interop.exchange import to_torch
from twin_attention.interop.kernels import jax_host, mosaic, run_in_torch
from twin_attention.interop.kernels.mosaic import (
    CompiledModule,
    LaunchFunction,
    compile_module,
    launcher_of,
)
from twin_attention.interop.kernels.plan import Kernel, Operation, Plan, Value
from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.targets.family import FOREIGN, Backend

PAGED = Backend(FOREIGN["torch_attn"][2], "sm80")
SPEC = AttentionSpec(1, 4, 4, 2, 2, 64, 64, "bfloat16", 0.1)
STREAM = 5


class C:
    def __init__(self, num_buffers):
        self.calls = []
        self.compiled = CompiledModule(77, LaunchFunction(self._launch), num_buffers, 0)

    def _launch(self, kernel, stream, addresses):
        count = self.compiled.num_buffers
        pointers = (mosaic.ctypes.c_void_p * count).from_address(addresses)
        self.calls.append((kernel, stream, tuple(pointers)))


@pytest.fixture(autouse=True)
def contexts(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked.append)
    monkeypatch.setattr(mosaic, "_threads", threading.local())
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


def launch(code, inputs, results):
    numbers = [*range(len(inputs) + len(results))]
    read, written = tuple(numbers[: len(inputs)]), tuple(numbers[len(inputs) :])
    return Kernel(code, (*inputs, *results), read, written)


def plan_of_decode(function, operands, card):
    """The second kernel merges parts into what the first has written."""
    x, bits = Value(0, (4, 64), "float32"), Value(1, (4, 128), "int16")
    out, part = Value(2, (64,), "float32"), Value(3, (4, 64), "float32")
    steps = (
        Operation("bitcast", (x,), {}, (bits,)),
        launch("second", (bits, x), (out, part)),
        launch("third", (part, out), (out,)),
    )
    return Plan(steps, (out,))


def plan_of(function, operands, card):
    assert [x.shape for x in operands] == [(4, 64), (4, 64)]
    x, y = Value(0, (4, 64), "float32"), Value(1, (4, 64), "float32")
    viewed, sums = Value(2, (1, 4, 64), "float32"), Value(3, (64,), "float32")
    filled, last = Value(4, (64,), "float32"), Value(7, (4, 64), "float32")
    out, reshaped = Value(5, (1, 4, 64), "bfloat16"), Value(8, (4, 64), "bfloat16")
    constant = np.arange(6, dtype=np.int32)
    steps = (
        Operation("reshape", (x,), {}, (viewed,)),
        Operation("full", (0.0,), {}, (sums,)),
        Operation("full", (2.0,), {}, (filled,)),
        launch("first", (viewed, constant, filled, sums), (out, sums)),
        launch("second", (y, sums, out), (last,)),
        Operation("reshape", (out,), {}, (reshaped,)),
    )
    return Plan(steps, (reshaped, None, last, sums))


@pytest.fixture
def kernels(monkeypatch):
    found = {"first": C(6), "second": C(4), "third": C(3)}
    monkeypatch.setattr(mosaic, "COMPACT", 1)  # a CPU's copies are not as aligned

    monkeypatch.setattr(mosaic, "plugin", lambda: "a path")
    monkeypatch.setattr(mosaic, "lower", lambda call: call)
    monkeypatch.setattr(mosaic, "compile_module", lambda module, *_: found[module].compiled)
    monkeypatch.setattr(jax_host, "plan_of", plan_of)
    monkeypatch.setattr(run_in_torch, "card_of", lambda device: None)
    monkeypatch.setattr("twin_attention.targets.family._function", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: torch.cuda.ExternalStream)
    monkeypatch.setattr(torch.cuda.ExternalStream, "cuda_stream", STREAM, raising=False)
    monkeypatch.setattr(
        run_in_torch, "new_tensor", lambda value, like: aligned(value.shape, value.dtype)
    )
    run_in_torch.compiled_plan.cache_clear()
    yield found
    run_in_torch.compiled_plan.cache_clear()


def aligned(shape, dtype="float32"):
    x = torch.full((2 * torch.Size(shape).numel() + COMPACT,), torch.nan)
    x = x[-x.data_ptr() % COMPACT // 4 :].view(getattr(torch, dtype))
    return x[: torch.Size(shape).numel()].view(shape)


def test_a_call_allocates_and_launches_what_the_plan_says(kernels):
    family, *_ = FOREIGN["torch_attn"]
    attend, backend = family.function("flash_fwd"), Backend(family, "sm80")
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
    family, *_ = FOREIGN["torch_attn"]
    attend, backend = family.function("flash_fwd"), Backend(family, "sm80")
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
    monkeypatch.setattr(jax_host, "plan_of", plan_of_decode)
    x = aligned((4, 64))
    family, *_ = FOREIGN["torch_attn"]
    (out,) = family.function("flash_fwd")(x, SPEC, Backend(family, "sm80"))
    (_, _, (bits, of_x, first, part)), *_ = kernels["second"].calls
    assert bits == of_x == x.data_ptr()
    assert kernels["third"].calls == [(77, STREAM, (part, first, out.data_ptr()))]
    assert first == out.data_ptr()


def test_a_pool_is_not_copied():
    case = DecodeCase("", (3, 4))
    pool = torch.zeros(8, 16, 4, 64)[:, :, ::2]
    operands = DecodeOperands(pool[0], pool, pool, pool, pool)
    with pytest.raises(NotImplementedError, match=r"k_pages: expected a contiguous pool"):
        run_in_torch.run(PAGED, "paged_decode", case.spec, operands)


# ---- What torch does in the place of XLA between kernels, against XLA. ----

HEADS, LENGTHS = 3, [33, 0, 130, 60]  # the last are padding
NUM_ROWS = sum(LENGTHS)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def row_exists(count):
    exists, start = np.zeros(count, bool), 0
    for number, length in enumerate(LENGTHS):
        first = (start // 128 + number) * 128
        exists[first : first + length] = True
        start += length
    return exists


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_the_gradient_of_sinks(is_packed):
    sinks, offsets = normal(0, HEADS), ()
    rows = NUM_ROWS
    if is_packed:
        offsets = (jnp.cumsum(jnp.array([0, *LENGTHS[:-1]], jnp.int32)), NUM_ROWS)
        rows = (NUM_ROWS // 128 + len(LENGTHS)) * 128
    lse2, delta = (normal(seed, 2, HEADS, rows) for seed in (1, 2))
    lse2 = jnp.where(lse2 > 1, jnp.inf, lse2)
    if is_packed:  # rows that do not exist may hold anything
        lse2, delta = (jnp.where(row_exists(rows), x, jnp.nan) for x in (lse2, delta))
    args = sinks, lse2, delta, *offsets
    given = [to_torch(x) if isinstance(x, jnp.ndarray) else x for x in args]
    (dsinks,) = run_in_torch.FUSIONS["sinks_gradient"](*given)
    assert dsinks.isfinite().all()
    torch.testing.assert_close(dsinks, to_torch(sinks_gradient(*args)), rtol=1e-4, atol=1e-5)
