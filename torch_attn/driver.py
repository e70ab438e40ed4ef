"""Launch a compiled Triton kernel again, with the least work for the host.

This is what Triton's `JITFunction.run` ends with, in `CompiledKernel.__getitem__`: the same call of
the kernel's launcher, whose arguments were looked up beforehand, with operands as addresses, so
that the launcher asks neither the tensor nor the driver for them. It is the one place of
`torch_attn` that uses this private Triton API; of torch's it asks for the current device and
stream. Checked with Triton 3.6 and 3.9;
``tests/torch_attn/test_launch.py`` guards it, and says what to do when it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton import knobs

from torch_attn.tensor_maps import TensorMap


def launcher_of(
    compiled: Any,
    grid: tuple[int, ...],
    arguments: list[Any],
    num_operands: int,
    device: torch.device,
) -> Callable[..., None]:
    """Return a function of the operands that launches a kernel on the current stream.

    Args:
        compiled: Triton's compiled kernel.
        grid: three numbers.
        arguments: all arguments, the operands first; those are replaced by each call's.
        num_operands: how many operands there are.
        device: where the operands are, on a CUDA device.
    """
    rest = arguments[num_operands:]
    maps = [(i, x) for i, x in enumerate(arguments) if isinstance(x, TensorMap)]
    through_triton = compiled[grid]  # loads the kernel on the current device
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    index = torch.cuda.current_device() if device.index is None else device.index
    runtime = knobs.runtime
    current_device, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def launch(*operands: torch.Tensor | None) -> None:
        if current_device() != index:
            with torch.cuda.device(index):
                launch(*operands)
        elif (
            runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        ):  # a profiler listens
            through_triton(*with_maps([*operands, *rest], operands))
        else:
            values = [None if x is None else x.data_ptr() for x in operands]
            values = with_maps(values + rest, operands)
            stream = stream_of(index)
            run(*grid, stream, function, packed, None, None, None, *values)

    def with_maps(values: list[Any], operands: tuple[torch.Tensor | None, ...]) -> list[Any]:
        for i, tensor_map in maps:
            values[i] = tensor_map.bind(operands)
        return values

    return launch
