"""Compile the Triton kernels of one problem for a target, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from torch_attn import launch
from torch_attn.kernels.portable.append_kv import append_kv
from torch_attn.kernels.portable.flash_bwd import flash_bwd
from torch_attn.kernels.portable.flash_fwd import flash_fwd
from torch_attn.kernels.portable.paged_decode import paged_decode
from twin_attention.contract.spec import AttentionSpec, DecodeSpec
from twin_attention.targets.family import Backend, portable_backend
from twin_attention.targets.kernels import KernelConfig


def compile_kernels(
    spec: AttentionSpec | DecodeSpec,
    target: str,
    limit: Callable[[str], float] = lambda kernel: math.inf,
    device: str | None = None,
) -> list[tuple[str, KernelConfig, Any]]:
    """Compile a problem's kernels as `torch_attn` launches them.

    Args:
        target: instruction set to use, "sm80" or "sm90".
        limit: bytes of shared memory that a block of a kernel may have, with fewer stages of the
            pipeline than configured if need be.
        device: what to assemble for, the target's own devices unless given.

    Returns:
        Each kernel's name, its configuration and what Triton compiled.
    """
    backend = portable_backend("torch_attn", target)
    with _driver(device or target), launch.recording(limit) as compiled:
        if isinstance(spec, AttentionSpec):
            _flash(spec, backend)
        else:
            _decode(spec, backend)
    return compiled


def _flash(spec: AttentionSpec, backend: Backend) -> None:
    q = _empty(spec.dtype, spec.batch, spec.seq_q, spec.heads_q, spec.head_dim)
    k = _empty(spec.dtype, spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim)
    v = _empty(spec.dtype, spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim_v)
    out, lse = flash_fwd(q, k, v, spec, backend)
    flash_bwd(out, lse, q, k, v, out, lse, spec, backend)


def _decode(spec: DecodeSpec, backend: Backend) -> None:
    cache = spec.cache
    pages = (cache.num_pages, cache.page_size, cache.heads)
    new = (spec.dtype, spec.batch, spec.tokens, cache.heads)
    k_pages = _empty(cache.dtype, *pages, cache.head_dim)
    v_pages = _empty(cache.dtype, *pages, cache.head_dim_v)
    tables = _empty("int32", spec.batch, cache.max_pages)
    lengths = _empty("int32", spec.batch)
    scale = _empty("float32", cache.heads) if cache.is_quantized else None
    q = _empty(spec.dtype, spec.batch, spec.tokens, spec.heads_q, spec.head_dim)
    sinks = _empty("float32", spec.heads_q)
    paged_decode(q, k_pages, v_pages, tables, lengths, sinks, scale, scale, spec, backend)
    k_new, v_new = _empty(*new, cache.head_dim), _empty(*new, cache.head_dim_v)
    append_kv(k_new, v_new, k_pages, v_pages, tables, lengths, scale, scale, cache, backend)


def _empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


class _Driver:
    """As much of a Triton driver as compiling takes."""

    def __init__(self, device: str) -> None:
        self.device = device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(self.device.removeprefix("sm")), 32)

    def get_current_device(self) -> str:
        return self.device  # a key of the kernels' caches, which never is a real device's

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _driver(device: str) -> Iterator[None]:
    """Make Triton compile for `device`, whatever the machine has.

    Restores the private ``driver._active``: the public `reset_active` asks for a GPU.
    """
    before = driver._active
    driver.set_active(cast(Any, _Driver(device)))
    try:
        yield
    finally:
        driver._active = before
