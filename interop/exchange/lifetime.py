"""Keep shared GPU memory alive until the other framework's stream is done with it.

DLPack frees memory with its last reference, perhaps before queued work has run. So the release is
queued behind the other stream.
"""

from __future__ import annotations

import functools
import weakref

import jax
import jax.numpy as jnp
import torch
from jax.experimental.buffer_callback import buffer_callback


def release_after_jax(tensor: torch.Tensor, array: jax.Array) -> None:
    """Stop torch from reusing `tensor`'s memory before JAX has done its queued work on `array`."""
    (device,) = array.devices()
    tensor.record_stream(jax_stream(device))


def release_after_torch(tensor: torch.Tensor, array: jax.Array) -> torch.Tensor:
    """Stop JAX from reusing `array`'s memory before torch's current stream has done its queued
    work.

    Return a CUDA tensor to use instead of `tensor`. Its storage lives until its last view ends.
    """
    (device,) = array.devices()
    with torch.cuda.device(tensor.device):
        shared = torch.from_dlpack(tensor)
    torch_stream = torch.cuda.current_stream(tensor.device)
    # `finalize` holds `tensor`, and so JAX's memory, until the callback returns.
    release = weakref.finalize(
        shared.untyped_storage(), _make_wait, jax_stream(device), torch_stream, tensor
    )
    release.atexit = False
    return shared


@functools.cache
def jax_stream(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]  # JAX builds the class
) -> torch.cuda.ExternalStream:
    """Return the CUDA stream of JAX's computations; a device's first call runs a small program."""
    pointers: list[int] = []

    def keep_pointer(context, out, ordering):
        pointers.append(context.stream)

    ask = buffer_callback(keep_pointer, jax.ShapeDtypeStruct((), jnp.int32), has_side_effect=True)
    with jax.ensure_compile_time_eval():
        ask(jax.device_put(jnp.int32(0), device)).block_until_ready()
    return torch.cuda.ExternalStream(pointers[-1], device=device.local_hardware_id)


def _make_wait(waiting: torch.cuda.Stream, awaited: torch.cuda.Stream, owner: torch.Tensor) -> None:
    waiting.wait_stream(awaited)
