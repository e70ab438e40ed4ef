"""Run a family of `pallas_attn` inside torch: its Mosaic GPU kernels, on torch's current stream.

The host function is planned once for given shapes (`jax_host`), and its kernels are compiled
(`mosaic`). Torch computes what XLA would compute between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import Tensor

from torch_attn.kernels.gradients import sinks_gradient
from torch_attn.kernels.library.tiles import ROW_PADDING
from torch_attn.launch import tensors_of
from torch_attn.layouts import replace_leaves
from torch_attn.operands import compact, dtype_name, is_compact
from torch_attn.replay import Launcher, current_capture
from torch_attn.targets import card_of
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.validate.errors import fail
from twin_attention.interop.kernels import jax_host, mosaic
from twin_attention.interop.kernels.plan import Kernel, Operation, Value
from twin_attention.targets.config import repeat_configs, requested_configs
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import Spec


class _Launch(NamedTuple):
    launcher: Launcher
    tensors: tuple[Value, ...]


def run(backend: Backend, operation: str, spec: Spec, *operands: Any) -> Any:
    """Run an operation's function of a family of `pallas_attn`, on tensors in tuples.

    A tensor that is not compact is copied; such a pool of pages is refused.
    """
    if isinstance(spec, DecodeSpec):
        _check_pools(operands[0])
    operands = tuple(replace_leaves(operands, lambda x: None if x is None else compact(x)))
    tensors = tensors_of(operands)
    device = tensors[0].device
    types = replace_leaves(operands, _type_of)
    capture, changes = current_capture(), requested_configs()
    values = dict(enumerate(tensors))
    with torch.cuda.device(device):
        with nullcontext() if capture is None else capture.paused():
            steps, results = compiled_plan(operation, types, spec, backend, device, changes)
        for step in steps:
            if isinstance(step, _Launch):
                _launch(step, values, tensors[0])
            else:
                _operate(step, values, tensors[0])
    return _with_tensors(results, values)


def _check_pools(operands: DecodeOperands[Tensor]) -> None:
    for name in ("k_pages", "v_pages"):
        x = getattr(operands, name)
        if not is_compact(x):
            expected = "a contiguous pool that begins at a multiple of 256 bytes, for Mosaic"
            fail(NotImplementedError, name, expected, f"strides {x.stride()}")


def _type_of(x: Tensor | None) -> jax.ShapeDtypeStruct | None:
    return None if x is None else jax.ShapeDtypeStruct(tuple(x.shape), dtype_name(x.dtype))


def _launch(step: _Launch, values: dict[int, Tensor], like: Tensor) -> None:
    for x in step.tensors:
        if x.number not in values:
            values[x.number] = new_tensor(x, like)
    tensors = tuple(values[x.number] for x in step.tensors)
    stream = torch.cuda.current_stream().cuda_stream
    step.launcher(stream, tuple(x.data_ptr() for x in tensors))
    capture = current_capture()
    if capture is not None:
        capture.add(step.launcher, tensors)


def _operate(step: Operation, values: dict[int, Tensor], like: Tensor) -> None:
    """Do what XLA does between kernels."""
    args = _with_tensors(step.args, values)
    results = step.results
    if step.name == "full":
        (number,) = args
        found = new_tensor(results[0], like)
        computed: tuple[Tensor, ...] = (found.zero_() if number == 0 else found.fill_(number),)
    elif step.name == "reshape":
        computed = (args[0].view(results[0].shape),)
    elif step.name == "bitcast":
        dtype = getattr(torch, results[0].dtype)
        computed = (args[0].view(dtype).view(results[0].shape),)
    else:
        computed = FUSIONS[step.name](*args)
    for result, x in zip(results, computed, strict=True):
        values[result.number] = x


def _sinks_gradient(
    sinks: Tensor,
    lse2: Tensor,
    delta: Tensor,
    cu_seqlens_q: Tensor | None = None,
    num_rows: int = 0,
    rest2: Tensor | None = None,
) -> tuple[Tensor, ...]:
    assert rest2 is None  # Mosaic's kernels take no terms
    if cu_seqlens_q is not None:
        exists = _rows_of_sequences(cu_seqlens_q, num_rows, lse2.shape[-1])
        lse2, delta = (x.masked_fill(~exists, value) for x, value in ((lse2, inf), (delta, 0.0)))
    found = sinks_gradient(sinks, lse2, delta)
    assert found is not None
    return (found,)


def _rows_of_sequences(cu_seqlens: Tensor, num_rows: int, padded_rows: int) -> Tensor:
    """Return which rows of lse2 and delta belong to a token, padding tokens included."""
    padding = ROW_PADDING.value
    starts = cu_seqlens.clamp(0, num_rows)
    numbers = torch.arange(len(starts), device=starts.device, dtype=starts.dtype)
    begins = (starts.div(padding, rounding_mode="floor") + numbers) * padding
    ends = torch.constant_pad_nd(starts[1:], (0, 1), num_rows)
    rows = torch.arange(padded_rows, device=starts.device, dtype=starts.dtype)
    sequence = (torch.searchsorted(begins, rows, right=True) - 1).clamp(min=0)
    return rows - begins.take(sequence) < (ends - starts).take(sequence)


# What XLA compiles to kernels (`pallas_attn.fusions`), by its name there.
FUSIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {"sinks_gradient": _sinks_gradient}


def new_tensor(value: Value, like: Tensor) -> Tensor:
    return like.new_empty(value.shape, dtype=getattr(torch, value.dtype))


def _with_tensors(x: Any, values: dict[int, Tensor]) -> Any:
    return replace_leaves(x, lambda x: values[x.number] if isinstance(x, Value) else x)


@lru_cache(maxsize=1024)
def compiled_plan(
    operation: str, types: Any, spec: Spec, backend: Backend, device: torch.device, changes: Any
) -> tuple[tuple[_Launch | Operation, ...], Any]:
    """Plan a host function, compile its kernels; return steps and results."""
    # JAX starts on the card to compile for it; it must not reserve most of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    function = backend.family.function(operation)
    with repeat_configs(changes):
        found = jax_host.plan_of(
            lambda *operands: function(*operands, spec, backend), types, card_of(device)
        )
    steps = [_compile(x, device) if isinstance(x, Kernel) else x for x in found.steps]
    return tuple(steps), found.results


def _compile(kernel: Kernel, device: torch.device) -> _Launch:
    plugin = mosaic.plugin()
    assert plugin is not None, "the family supports nothing without it"
    module = mosaic.lower(kernel.code)
    with torch.cuda.device(device):  # JAX may have started, and made another one current
        number = torch.cuda.current_device()
        compiled = mosaic.compile_module(module, plugin, len(kernel.operands), number)
        constants = tuple(
            compact(torch.from_numpy(np.array(x)).to(device))
            for x in kernel.operands
            if not isinstance(x, Value)
        )
    # A kernel may take the same memory several times, in other shapes.
    tensors = list({x.number: x for x in kernel.operands if isinstance(x, Value)}.values())
    numbers = [x.number for x in tensors]
    of_constants = iter(range(len(tensors), len(tensors) + len(constants)))
    buffers = [
        numbers.index(x.number) if isinstance(x, Value) else next(of_constants)
        for x in kernel.operands
    ]
    return _Launch(mosaic.launcher_of(compiled, buffers, constants), tuple(tensors))
