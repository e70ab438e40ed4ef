"""On a GPU: order and lifetime without making the host wait.

Each test queues slow work on one side, hands over at once, and checks both that the result is
right and that the slow work was still running when everything had been queued. Memory holds
NaN beforehand, so reading early, or after the memory was given away, cannot pass.
"""

import functools
import gc
import math
import time
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch

from interop.exchange import to_jax, to_torch
from interop.exchange.lifetime import jax_stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SIZE = 4096
SHAPE = (SIZE, SIZE)
SLOW_CYCLES = 1_000_000_000  # about 0.5 s
SLOW_MATMULS = 150  # about 0.4 s: 137 GFLOP each, without TF32


@jax.jit
def slow_ones(seed):
    """Ones of `SHAPE` after a long chain of matmuls; `seed` is ones too."""
    mean = jnp.full(SHAPE, 1 / SIZE)
    step = functools.partial(jnp.matmul, b=mean, precision="highest")
    return jax.lax.fori_loop(0, SLOW_MATMULS, lambda _, x: step(x), seed)


@jax.jit
def slow_then_read(x, seed):
    """`x`, read only once the chain is through."""
    return x * slow_ones(seed)


@jax.jit
def jax_doubled(x):
    return 2 * x


@pytest.fixture(scope="module", autouse=True)
def seed():
    """Ones; compiles and allocates whatever would make the host wait in the middle of a test."""
    ones = jnp.ones(SHAPE)
    imported = to_jax(torch.ones(SHAPE, device="cuda"))
    outputs = [slow_ones(ones), slow_then_read(imported, ones), jax_doubled(imported)]
    jax.block_until_ready([outputs, [jnp.full(SHAPE, math.nan) for _ in range(16)]])
    for output in outputs:
        assert all_equal(to_torch(output, copy=True) / output.max().item(), 1)
    blocks = [torch.full(SHAPE, math.nan, device="cuda") for _ in range(8)]
    del blocks
    return ones


@pytest.fixture(autouse=True)
def idle(seed):
    """Start with nothing queued on the card."""
    torch.cuda.synchronize()


def all_equal(tensor, value):
    return bool((tensor == value).all())


def eventually(condition, seconds=5.0):
    """Give JAX's own threads a moment to notice that the card has finished."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class TestOrder:
    def test_jax_waits_for_a_side_stream_of_torch(self):
        buffer = torch.full(SHAPE, math.nan, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW_CYCLES)
            buffer.fill_(3)
            result = jax_doubled(to_jax(buffer))
        assert not side.query(), "the host waited"
        assert bool((result == 6).all())

    @pytest.mark.parametrize("copy", [None, True])
    def test_torch_side_stream_waits_for_jax(self, copy, seed):
        jnp.full(SHAPE, math.nan).block_until_ready()  # freed again: JAX's next output is NaN
        side = torch.cuda.Stream()
        array = slow_ones(seed)
        with torch.cuda.stream(side):
            result = to_torch(array, copy=copy) * 2
        assert not array.is_ready(), "the host waited"
        side.synchronize()
        assert all_equal(result, 2)

    def test_copy_is_made_after_the_producer(self):
        buffer = torch.full((SIZE, 2 * SIZE), math.nan, device="cuda")[:, ::2]
        torch.cuda._sleep(SLOW_CYCLES)
        buffer.fill_(3)
        result = jax_doubled(to_jax(buffer, copy=True))
        assert not torch.cuda.current_stream().query(), "the host waited"
        assert bool((result == 6).all())

    def test_round_trip_orders_an_in_place_write_after_jax_reads(self, seed):
        buffer = torch.ones(SHAPE, device="cuda")
        result = slow_then_read(to_jax(buffer), seed)
        returned = to_torch(result)
        buffer.fill_(math.nan)
        assert not result.is_ready(), "the host waited"
        assert all_equal(returned, 1)


class TestLifetime:
    def test_torch_does_not_reuse_what_jax_still_reads(self, seed):
        tensor = torch.ones(SHAPE, device="cuda")
        torch.cuda.synchronize()
        array = to_jax(tensor)
        result = slow_then_read(array, seed)
        del tensor, array
        gc.collect()
        poison = [torch.full(SHAPE, math.nan, device="cuda") for _ in range(4)]
        assert not result.is_ready(), "the host waited"
        assert bool((result == 1).all())
        del poison

    def test_torch_gets_its_memory_back(self, seed):
        before = torch.cuda.memory_stats()["active_bytes.all.current"]
        tensor = torch.ones(SHAPE, device="cuda")
        storage = weakref.ref(tensor.untyped_storage())
        result = slow_then_read(to_jax(tensor), seed)
        del tensor
        result.block_until_ready()
        gc.collect()
        assert eventually(lambda: storage() is None)
        torch.cuda.synchronize()
        torch.empty(SHAPE, device="cuda")  # torch looks for finished events when it allocates
        assert torch.cuda.memory_stats()["active_bytes.all.current"] == before

    @pytest.mark.parametrize("use", ["whole", "view"])
    def test_jax_does_not_reuse_what_torch_still_reads(self, use):
        array = jnp.ones(SHAPE)
        address = array.unsafe_buffer_pointer()
        tensor = to_torch(array)
        torch.cuda.synchronize()
        if use == "view":
            tensor = tensor.detach()[:]
        torch.cuda._sleep(SLOW_CYCLES)
        result = tensor * 2
        del tensor, array
        gc.collect()
        poison = [jnp.full(SHAPE, math.nan) for _ in range(8)]
        assert not torch.cuda.current_stream().query(), "the host waited"
        assert address in {array.unsafe_buffer_pointer() for array in poison}, "nothing to see"
        jax.block_until_ready(poison)
        assert all_equal(result, 2)

    def test_jax_does_not_reuse_what_a_copy_still_reads(self):
        array = jnp.ones(SHAPE)
        array.block_until_ready()
        torch.cuda._sleep(SLOW_CYCLES)
        copied = to_torch(array, copy=True)
        del array
        gc.collect()
        poison = [jnp.full(SHAPE, math.nan) for _ in range(8)]
        assert not torch.cuda.current_stream().query(), "the host waited"
        jax.block_until_ready(poison)
        assert all_equal(copied, 1)

    def test_jax_gets_its_memory_back(self):
        device = jax.devices()[0]
        before = device.memory_stats()["bytes_in_use"]
        array = jnp.ones(SHAPE)
        address = array.unsafe_buffer_pointer()
        tensor = to_torch(array)
        del array
        gc.collect()
        assert device.memory_stats()["bytes_in_use"] >= before + SIZE * SIZE * 4
        assert tensor.data_ptr() == address
        del tensor
        torch.cuda.synchronize()
        assert eventually(lambda: device.memory_stats()["bytes_in_use"] == before)


def test_jax_stream_is_where_jax_computes(seed):
    """`lifetime` stands on this: if it fails, JAX no longer runs on the stream that it names."""
    stream = jax_stream(jax.devices()[0])
    assert stream.query()
    result = slow_ones(seed)
    assert not stream.query()
    stream.synchronize()
    assert eventually(result.is_ready)


def test_pinned_memory():
    tensor = torch.arange(64.0).pin_memory()
    assert to_jax(tensor).tolist() == tensor.tolist()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    tensor = torch.arange(64.0, device="cuda:1")
    array = to_jax(tensor)
    assert array.devices() == {jax.devices()[1]}
    assert to_torch(jax_doubled(array)).tolist() == (2 * tensor).tolist()
    assert torch.cuda.current_device() == 0
