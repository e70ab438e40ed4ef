"""Launch a compiled Triton kernel again, with the least work for the host.

This is what Triton's `JITFunction.run` ends with, in `CompiledKernel.__getitem__`: the same call of
the kernel's launcher, whose arguments were looked up beforehand, with operands as addresses, so
that the launcher asks neither the tensor nor the driver for them. It is the one place of
`torch_attn` that uses this private Triton API; of torch's it asks for the current device and
stream. Checked with Triton 3.6 and 3.9;
``tests/torch_attn/test_launch.py`` guards it, and says what to do when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import knobs


def launcher_of(
    compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any], device: torch.device
) -> Callable[..., None]:
    """Return a function of the operands that launches a kernel on the current stream.

    Args:
        compiled: Triton's compiled kernel.
        grid: three numbers.
        arguments: all arguments after the operands.
        device: where the operands are, on a CUDA device.
    """
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
            through_triton(*operands, *arguments)
        else:
            addresses = [None if x is None else x.data_ptr() for x in operands]
            stream = stream_of(index)
            run(*grid, stream, function, packed, None, None, None, *addresses, *arguments)

    return launch
