"""On a GPU: order and lifetime without making the host wait.

Each test queues slow work on one side, hands over at once, and checks that the result is right and
that the slow work was still running when all was queued. Memory holds NaN beforehand, so that
reading early, or after the memory was given away, cannot pass.

What a process does for the first time makes the host wait. So `seed` does all of it beforehand, on
the same streams, shapes and dtypes; extend it with the tests.
"""

import functools
import gc
import math
import subprocess
import sys
import time
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch

from twin_attention.interop.exchange import to_jax, to_torch
from twin_attention.interop.exchange.lifetime import jax_stream
from twin_attention.interop.parity.environment import choose_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SIZE = 4096
SHAPE = (SIZE, SIZE)
SLOW_CYCLES = 3_000_000_000  # about 1.5 s
SLOW_MATMULS = 450  # about 1.2 s: 137 GFLOP each, without TF32


@jax.jit
def slow_ones(seed):
    mean = jnp.full(SHAPE, 1 / SIZE)
    step = functools.partial(jnp.matmul, b=mean, precision="highest")
    return jax.lax.fori_loop(0, SLOW_MATMULS, lambda _, x: step(x), seed)


@jax.jit
def slow_then_read(x, seed):
    return x * slow_ones(seed)


@jax.jit
def jax_doubled(x):
    return 2 * x


@pytest.fixture(scope="module")
def side():
    """Another stream than the current one: torch keeps free memory by stream."""
    return torch.cuda.Stream()


@pytest.fixture(scope="module")
def seed(side):
    """Compile, load and allocate whatever would make the host wait in a test."""
    assert choose_device() == "cuda"
    ones = jnp.ones(SHAPE)
    poison = [jnp.full(SHAPE, math.nan) for _ in range(16)]
    slow = [slow_ones(ones), slow_then_read(to_jax(torch.ones(SHAPE, device="cuda")), ones)]
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1)
            blocks = [torch.full(SHAPE, math.nan, device="cuda").fill_(1) for _ in range(8)]
            strided = torch.full((SIZE, 2 * SIZE), math.nan, device="cuda")[:, ::2].fill_(1)
            imported = [to_jax(blocks[0]), to_jax(strided, copy=True)]
            arrays = slow + [jax_doubled(array) for array in imported]
            tensors = [to_torch(array, copy=copy) for array in arrays for copy in (None, True)]
            assert [(x.detach()[:] * 2).mean().item() for x in tensors] == [2] * 4 + [4] * 4
    jax.block_until_ready(poison)
    return ones


@pytest.fixture(scope="module")
def quick_collections():
    """Let `gc.collect` see only what the test made, which saves half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def idle(seed, quick_collections):
    gc.collect()
    torch.cuda.synchronize()


def all_equal(tensor, value):
    return bool((tensor == value).all())


def torch_occupies(address):
    torch.empty(1, device="cuda")  # torch looks for finished events when it allocates
    blocks = [block for part in torch.cuda.memory_snapshot() for block in part["blocks"]]
    here = [block for block in blocks if 0 <= address - block["address"] < block["size"]]
    return any(block["state"] != "inactive" for block in here)


def eventually(condition, seconds=5.0):
    """Give JAX's own threads a moment to notice that the card has finished."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class TestOrder:
    def test_jax_waits_for_a_side_stream_of_torch(self, side):
        buffer = torch.full(SHAPE, math.nan, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW_CYCLES)
            buffer.fill_(3)
            result = jax_doubled(to_jax(buffer))
        assert not side.query(), "the host waited"
        assert bool((result == 6).all())

    @pytest.mark.parametrize("copy", [None, True])
    def test_torch_side_stream_waits_for_jax(self, copy, seed, side):
        jnp.full(SHAPE, math.nan).block_until_ready()  # freed again: JAX's next output is NaN
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
        tensor = torch.ones(SHAPE, device="cuda")
        address = tensor.data_ptr()
        storage = weakref.ref(tensor.untyped_storage())
        result = slow_then_read(to_jax(tensor), seed)
        del tensor
        assert torch_occupies(address)
        result.block_until_ready()
        assert eventually(lambda: storage() is None)
        assert eventually(lambda: not torch_occupies(address))

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
    """`lifetime` needs this."""
    stream = jax_stream(jax.devices()[0])
    assert stream.query()
    result = slow_ones(seed)
    assert not stream.query()
    stream.synchronize()
    assert eventually(result.is_ready)


def test_pinned_memory():
    tensor = torch.arange(64.0).pin_memory()
    assert to_jax(tensor).tolist() == tensor.tolist()


@two_gpus
@pytest.mark.parametrize("copy", [None, True])
def test_a_device_that_is_not_the_current_one(copy):
    second = jax.devices()[1]
    tensor = torch.arange(64.0, device="cuda:1")
    array = to_jax(tensor, copy=copy)
    assert torch.cuda.current_device() == 0
    assert array.devices() == {second}
    computed, placed = jax_doubled(array), jax.device_put(2 * jnp.arange(64.0), second)
    for array in (computed, placed):
        torch.cuda.set_device(0)  # JAX leaves current what it worked on
        result = to_torch(array, copy=copy)
        assert torch.cuda.current_device() == 0
        assert result.device == tensor.device
        assert all_equal(result, 2 * tensor)


@two_gpus
@pytest.mark.parametrize("gpu", [0, 1])
def test_the_first_hand_over_starts_jax(gpu):
    script = f"""
import torch
from twin_attention.interop.exchange import to_jax
tensor = torch.arange(64.0, device="cuda:{gpu}")
assert to_jax(tensor).tolist() == tensor.tolist()
assert torch.cuda.current_device() == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True)
