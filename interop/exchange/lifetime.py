"""Keep shared GPU memory alive until the other framework's stream is done with it.

DLPack frees memory when the last reference to it goes, which on a GPU says nothing about the
work that is still queued. Each allocator then reuses the block in the order of its own stream.
So the release has to be ordered after the other framework's stream, on the device, without
making the host wait.
"""

from __future__ import annotations

import functools
import weakref

import jax
import jax.numpy as jnp
import torch
from jax.experimental.buffer_callback import buffer_callback


def release_after_jax(tensor: torch.Tensor, array: jax.Array) -> None:
    """Stop torch from reusing `tensor`'s memory before JAX has done what it had queued by then.

    Args:
        tensor: CUDA tensor that was handed to JAX.
        array: the JAX array that shares its memory.
    """
    (device,) = array.devices()
    tensor.record_stream(jax_stream(device))


def release_after_torch(tensor: torch.Tensor, array: jax.Array) -> torch.Tensor:
    """Stop JAX from reusing `array`'s memory before torch has done what it had queued by then.

    Torch's queue is the stream that is current now, as for a tensor that torch allocates itself.

    Args:
        tensor: CUDA tensor that shares the memory of `array`.
        array: the JAX array it came from.

    Returns:
        A tensor to use in place of `tensor`. Its storage is its own, so its end is that of the
        last view of it, whatever happens to the Python objects.
    """
    (device,) = array.devices()
    with torch.cuda.device(tensor.device):
        shared = torch.from_dlpack(tensor)
    torch_stream = torch.cuda.current_stream(tensor.device)
    # `finalize` holds `tensor`, and so JAX's memory, until the callback has returned.
    release = weakref.finalize(
        shared.untyped_storage(), _make_wait, jax_stream(device), torch_stream, tensor
    )
    release.atexit = False
    return shared


@functools.cache
def jax_stream(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]  # JAX builds the class
) -> torch.cuda.ExternalStream:
    """Return the CUDA stream on which JAX runs its computations on `device`.

    The first call for a device runs a small JAX program and waits for it.
    """
    pointers: list[int] = []

    def keep_pointer(context, out, ordering):
        pointers.append(context.stream)

    ask = buffer_callback(keep_pointer, jax.ShapeDtypeStruct((), jnp.int32), has_side_effect=True)
    with jax.ensure_compile_time_eval():
        ask(jax.device_put(jnp.int32(0), device)).block_until_ready()
    return torch.cuda.ExternalStream(pointers[-1], device=device.local_hardware_id)


def _make_wait(waiting: torch.cuda.Stream, awaited: torch.cuda.Stream, owner: torch.Tensor) -> None:
    waiting.wait_stream(awaited)
