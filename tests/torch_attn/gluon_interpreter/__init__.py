"""Run the explicit Gluon kernels on a CPU: their own source, in plain Python.

Gluon has no interpreter. Here a kernel's functions run over globals in which the language's
functions are those of `language`, on torch tensors. Layouts are carried as far as the source reads
them; swizzles and registers do not exist.

Partitions run in turn and give way at each instruction that another one could notice. What the
hardware does by itself happens at a time that a `Mode` chooses: TMA loads and cp.async write shared
memory, wgmma and TMA stores read it. A kernel is right if it is right in all modes. The warps of a
partition run in lockstep: a missing barrier between them is not found. Errors are raised for:

- a product that is used before a wait has retired it, so a pending count that is too high;
- shared memory written by a partition and read by a product or by TMA without a fence between;
- shared memory overwritten by a partition that has met its last writer at no barrier since;
- a barrier that more threads arrive at than it has, or with other counts, or twice in a phase;
- stores, products and copies that nobody waits for;
- partitions that all wait: a deadlock, with what each waits for.

Missing waits show in the results: shared memory is NaN at first, and stale later.

    with interpreted(WRITES_FIRST, programs=3):
        grads = flash_bwd(dout, dlse, operands, out, lse, None, spec, Backend(family, "sm90"))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getsource
from itertools import product
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from tests.torch_attn.gluon_interpreter.program import (
    READS_FIRST,
    WRITES_FIRST,
    DeadlockError,
    InterpreterError,
    Mode,
    Program,
)
from tests.torch_attn.gluon_interpreter.source import Source
from tests.torch_attn.gluon_interpreter.values import Descriptor, Pointer, plain, scalar
from torch_attn import interpreter, launch
from torch_attn.layouts import bind
from twin_attention.targets.target import NUM_SMS

__all__ = [
    "READS_FIRST", "WRITES_FIRST", "DeadlockError", "InterpreterError", "Mode", "edited",
    "interpret", "interpreted",
]  # fmt: skip


def interpret(
    kernel: JITFunction,
    grid: tuple[int, ...],
    mode: Mode = WRITES_FIRST,
    num_warps: int = 4,
    replace: dict[Any, Any] | None = None,
    **arguments: Any,
) -> None:
    """Run a `gluon.jit` function on CPU tensors, its programs one after the other.

    `arguments` are tensors, Triton's `TensorDescriptor`, numbers, or tuples of these. `replace`
    maps functions of the kernel or of the language to others in the kernel's language, as `edited`
    makes.

    Raises:
        InterpreterError: see the list above.
    """
    source = Source(replace or {})
    names = {p.name: p.is_constexpr for p in kernel.params}
    values = {name: x if names[name] else argument(x) for name, x in arguments.items()}
    run = source.translate(kernel)
    for index in product(*map(range, grid)):
        program = Program(index, grid, mode, num_warps)
        program.run([(lambda: run(**values), num_warps)])


def edited(function: JITFunction, old: str, new: str) -> FunctionType:
    """Return a kernel's function with other text in its source, which has `old` exactly once."""
    text = getsource(function.fn)
    if text.count(old) != 1:
        raise ValueError(f"{old!r} stands {text.count(old)} times in {function.fn.__name__}")
    text = text[text.index("def ") :].replace(old, new)
    names: dict[str, Any] = {}
    exec(text, function.fn.__globals__, names)
    return names[function.fn.__name__]


@contextmanager
def interpreted(
    mode: Mode, programs: int = 3, replace: dict[Any, Any] | None = None
) -> Iterator[list[str]]:
    """Interpret the kernels that the library launches in the block; operands are on the CPU.

    `programs` is the number of SMs, so that a program takes several work items. Yield a list that
    grows by the names of the kernels.
    """
    launched: list[str] = []

    def run(found, tensors):
        launched.append(found.name)
        interpret_launch(found, tensors, mode, replace)

    with (
        mock.patch.object(launch, "_launch", run),
        mock.patch.dict(NUM_SMS, sm80=programs, sm90=programs),
    ):
        yield launched


def interpret_launch(
    found: launch.Launch,
    tensors: tuple[torch.Tensor | None, ...],
    mode: Mode,
    replace: dict[Any, Any] | None = None,
) -> None:
    """Interpret a launch on tensors of the CPU.

    A tensor may be None that no argument of the kernel has.
    """
    kernel, options = found.kernel, dict[str, Any](found.options)
    grid, values = found.prepared(found.config)
    arguments = dict(zip(kernel.arg_names, bind(tuple(values), tensors), strict=True))
    if not isinstance(kernel, GluonJITFunction):
        interpreter.interpreted(kernel)[grid](**arguments)
        return
    warps = options.get("num_warps", found.config.num_warps)
    interpret(kernel, grid, mode, warps, replace, **arguments)


def argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        size = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
        return Pointer(x.as_strided((size,), (1,)), 0)
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, tuple):
        items = [argument(item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    if isinstance(x, float):
        return torch.tensor(x, dtype=torch.float32).item()
    return scalar(plain(x))
