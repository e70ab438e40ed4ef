from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_attn.targets import Device
from twin_attention.contract.validate.errors import fail, not_a_tensor
from twin_attention.contract.validate.operands import Operand


def operand(name: str, x: Any) -> Operand:
    """Describe an array to the argument checks.

    Raises:
        TypeError: `x` is not a `jax.Array`.
    """
    if not isinstance(x, jax.Array):
        not_a_tensor(name, "a jax.Array", x)
    device = device_of(x)
    return Operand(name, x.shape, x.dtype.name, None if device is None else _name(device))


def in_float32(x: Any) -> Any:
    """Return sinks or slopes in float32; a model may have them in 16 bits."""
    is_narrow = isinstance(x, jax.Array) and x.dtype in (jnp.float16, jnp.bfloat16)
    return x.astype(jnp.float32) if is_narrow else x


def check_sizes(operands: Any) -> None:
    """Refuse symbolic dimensions of `jax.export`, for which no kernel can be compiled."""
    for name, x in zip(operands._fields, operands, strict=True):
        if x is not None and not all(isinstance(size, int) for size in x.shape):
            expected = "numbers as sizes: export a program for each, or pass"
            expected = f"{expected} implementation='reference', whose sizes may be symbolic"
            fail(NotImplementedError, name, expected, x.shape)


def device_of(x: jax.Array) -> Device | None:
    """Return the one device that holds `x`; None for a tracer or an array over several devices."""
    if isinstance(x, Tracer) or len(x.devices()) != 1:
        return None
    return next(iter(x.devices()))


def _name(device: Device) -> str:
    """Return a device's name as torch writes it: "cpu", "cuda:0"."""
    platform = "cuda" if device.platform == "gpu" else device.platform
    return platform if (platform, device.id) == ("cpu", 0) else f"{platform}:{device.id}"
