"""Launch a compiled Triton kernel again, with the least work for the host.

This is what Triton's `JITFunction.run` ends with, in `CompiledKernel.__getitem__`: the same call of
the kernel's launcher, whose arguments were looked up beforehand, with operands as addresses, so
that the launcher asks neither the tensor nor the driver for them. Triton's launcher encodes the TMA
descriptors of each launch anew; here the function below it gets those that earlier launches encoded
for the same addresses. It is the one place of `torch_attn` that uses this private Triton API; of
torch's it asks for the current device and stream. Checked with Triton 3.6 and 3.9;
``tests/torch_attn/test_launch.py`` guards it, and says what to do when it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import lru_cache, partial
from inspect import getclosurevars, signature
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia.driver import make_tensordesc_arg

from torch_attn.replay import Launcher
from torch_attn.tensor_maps import TensorMap

# Encoded descriptors that a launch keeps of an operand, of 128 bytes each.
_ADDRESSES_MAX = 256


def launcher_of(
    compiled: Any, grid: tuple[int, ...], arguments: list[Any], num_operands: int
) -> Launcher:
    """Return what launches a kernel on the current device.

    Args:
        compiled: Triton's compiled kernel.
        grid: three numbers.
        arguments: all arguments, the operands first; their addresses replace those.
        num_operands: how many operands there are.
    """
    rest = arguments[num_operands:]
    maps = [(i, x) for i, x in enumerate(arguments) if isinstance(x, TensorMap)]
    through_triton = compiled[grid]  # loads the kernel on the current device
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    place = None
    if maps:
        run, place = _below_descriptors(compiled, arguments, num_operands)
    runtime = knobs.runtime

    def launch(stream: int, addresses: tuple[int | None, ...]) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # a profiler listens
            values = [*addresses, *rest]
            for i, tensor_map in maps:
                values[i] = _at(tensor_map, addresses[tensor_map.operand])
            through_triton(*values, stream=stream)
        else:
            values = (*addresses, *rest) if place is None else place(addresses)
            run(*grid, stream, function, packed, None, None, None, *values)

    return launch


def _below_descriptors(
    compiled: Any, arguments: list[Any], num_operands: int
) -> tuple[Any, Callable[[tuple[int | None, ...]], list[Any]]]:
    """Return a kernel's launcher without the part of it that encodes descriptors.

    Returns:
        The launcher, and a function that returns its arguments from the operands' addresses.
    """
    run = copy(compiled.run)
    run.launch = getclosurevars(run.launch).nonlocals["launcher"]
    prepared, places = [], []
    metadata = iter(compiled.metadata.tensordesc_meta)
    for i, x in enumerate(arguments):
        if isinstance(x, TensorMap):
            value_of = lru_cache(_ADDRESSES_MAX)(partial(_encode, x, next(metadata)))
            places.append((len(prepared), x.operand, value_of))
            prepared += [None, *x.fields["shape"], *x.fields["strides"]]
        else:
            if i < num_operands and x is not None:
                places.append((len(prepared), i, int))
            prepared.append(x)

    def place(addresses: tuple[int | None, ...]) -> list[Any]:
        values = prepared.copy()
        for i, operand, value_of in places:
            values[i] = value_of(addresses[operand])
        return values

    return run, place


def _encode(tensor_map: TensorMap, metadata: Any, address: int) -> Any:
    """Return the encoded descriptor of an operand at an address."""
    descriptor = _at(tensor_map, address)
    further = [None] * (len(signature(make_tensordesc_arg).parameters) - 2)  # since Triton 3.9
    try:
        return make_tensordesc_arg(descriptor, metadata, *further)[0]
    except RuntimeError:  # a new thread has no CUDA context yet
        torch.cuda.mem_get_info()  # gives it one
        return make_tensordesc_arg(descriptor, metadata, *further)[0]


def _at(tensor_map: TensorMap, address: int | None) -> Any:
    """Return Triton's descriptor of an operand at an address."""
    return tensor_map.bind(SimpleNamespace(data_ptr=lambda: address))
