"""Launch a kernel: choose its configuration, and compile or interpret it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton.language as tl

from torch_attn.targets import shared_memory
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import compile_to_fit
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import KernelConfig, Spec

# Arguments that change from call to call: one compiled kernel serves all of their values.
UNSPECIALIZED = ["seq_q", "seq_kv", "diagonal", "window_left", "window_right"]

_launchers: dict[KernelCall, _Launcher] = {}
_LAUNCHERS_MAX = 4096

_recorded: tuple[Callable[[str], float], list[tuple[str, KernelConfig, Any]]] | None = None


def flash_arguments(spec: AttentionSpec) -> dict[str, Any]:
    """Return the arguments that describe a problem, as every flash attention kernel takes them."""
    rule, window = spec.scores, spec.bounded_window
    return {
        "seq_q": spec.seq_q,
        "seq_kv": spec.seq_kv,
        "diagonal": spec.diagonal,
        "heads_q": spec.heads_q,
        "rule": rule._replace(scale_first=tl.constexpr(rule.scale_first)),
        "window_left": window.left,
        "window_right": window.right,
        "GROUP_SIZE": spec.group_size,
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_V": spec.head_dim_v,
    }


def stride_arguments(**layouts: Layout) -> dict[str, Any]:
    """Return the strides of [B, S, H, D] tensors, ``q_strides`` for a tensor named q.

    The distance of rows is a compile-time constant, so that a tile's addresses are one register
    and constant offsets: at D 128 the dk, dv kernel spills half as much for it. ALIGN, a divisor
    of every stride, tells the compiler how wide a load may be.
    """
    arguments: dict[str, Any] = {}
    for name, layout in layouts.items():
        batch, row, head, _ = layout.strides
        arguments[f"{name}_strides"] = (batch, tl.constexpr(row), head)
    strides = (stride for layout in layouts.values() for stride in layout.strides[:3])
    return arguments | {"ALIGN": math.gcd(16, *strides)}


class Layout(NamedTuple):
    """All that a launch depends on of an operand, which is neither its values nor its address."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_aligned: bool  # to 16 bytes, which Triton compiles for


# Grid, and arguments by name other than operands and tile sizes.
Prepared = tuple[tuple[int, ...], dict[str, Any]]


class KernelCall(NamedTuple):
    """All that a kernel's code, grid and arguments depend on, except for the operands' values.

    `launch` keeps what it prepared for a call under the call itself, and the function that prepares
    sees nothing else. So two launches with the same key have the same arguments, and no value that
    changes can be frozen unnoticed. The function is a part of the key: one that is made for a
    single launch, around a value of that launch, is never found again. The key is cheap, because
    it holds what the arguments follow from: a frozen spec and four fields per operand.

    Attributes:
        function: the kernel's Python function.
        prepare: gives grid and arguments.
        spec: the problem.
        constants: what else the arguments follow from.
        config: the kernel's configuration.
        target: whose code runs, "sm80" or "sm90"; None in the interpreter.
        device: where it runs.
        layouts: of the operands, in order; None for an operand that is None. In the key they are
            plain tuples; `prepare` gets each as a `Layout`.
        options: further launch options of Triton's, for a CUDA device.
    """

    function: Any
    prepare: Callable[[KernelCall], Prepared]
    spec: Spec
    constants: tuple[Hashable, ...]
    config: KernelConfig
    target: str | None
    device: torch.device
    layouts: tuple[Any, ...]
    options: tuple[tuple[str, Hashable], ...]


def launch(
    name: str,
    kernel: Any,
    prepare: Callable[[KernelCall], Prepared],
    operands: tuple[Any, ...],
    spec: Spec,
    backend: Backend,
    *constants: Hashable,
    **options: Hashable,
) -> None:
    """Launch a kernel on its first operand's device, compiled or in Triton's interpreter.

    On a CUDA device the first launch of a problem goes through Triton, which compiles, with fewer
    stages where the configured ones do not fit (`compile_to_fit`). What is the same in all of its
    launches is then kept, so that the others cost the host half as much.

    Args:
        name: the kernel's name in the configuration tables.
        kernel: the `triton.jit` function.
        prepare: a function of a module, not one made for this launch. From the `KernelCall` alone
            it returns the grid and, by name, the arguments other than operands and tile sizes.
        operands: leading arguments, tensors or None.
        spec: the problem, which chooses the configuration.
        backend: the target to compile for, or the interpreter.
        constants: what else grid and arguments follow from, compared by value.
        options: further launch options of Triton's, for a CUDA device.
    """
    device, target = operands[0].device, backend.target
    config = backend.configs(spec)[name]
    call = KernelCall(
        kernel.fn,
        prepare,
        spec,
        constants,
        config,
        target,
        device,
        tuple(map(_layout, operands)),
        tuple(options.items()),
    )
    if target is not None and _recorded is None:
        launcher = _launchers.get(call)
        if launcher is not None:
            with _current(device):
                launcher(*operands)
            return
    layouts = (None if layout is None else Layout(*layout) for layout in call.layouts)
    grid, arguments = prepare(call._replace(layouts=tuple(layouts)))
    tiles = {name.upper(): value for name, value in vars(config).items()}
    arguments = {**arguments, **{key: tiles[key] for key in tiles if key in kernel.arg_names}}
    if target is None:
        from torch_attn.interpreter import interpreted

        interpreted(kernel)[grid](*operands, **arguments)
        return
    options = {"enable_fp_fusion": True} | options  # Triton 3.10 turns it off unless asked
    if target == "sm80":
        options["arch"] = "sm80"

    def compile(config: KernelConfig) -> Any:
        options.update(num_warps=config.num_warps, num_stages=config.num_stages)
        return kernel.warmup(*operands, grid=grid, **arguments, **options)

    if _recorded is not None:
        limit, compiled = _recorded
        compiled.append((name, *compile_to_fit(name, compile, config, target, limit(name))))
        return
    with _current(device):
        _, compiled = compile_to_fit(name, compile, config, target, shared_memory(target, device))
        rest = [arguments[name] for name in kernel.arg_names[len(operands) :]]
        launcher = _Launcher(compiled, (*grid, 1, 1)[:3], rest)
        launcher(*operands)
    if len(_launchers) >= _LAUNCHERS_MAX:
        _launchers.clear()
    _launchers[call] = launcher


class _Launcher:
    """Launches a compiled kernel again on operands of the same layout.

    This is what Triton's `JITFunction.run` ends with. It uses `CompiledKernel.__getitem__`, which
    is public but not documented; ``tests/torch_attn/test_launch.py`` guards it.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        self._run, self._arguments = compiled[grid], arguments

    def __call__(self, *operands: Any) -> None:
        self._run(*operands, *self._arguments)


def _layout(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Return the fields of an operand's `Layout`, which as a plain tuple costs half the time."""
    return None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0)


@contextmanager
def recording(
    limit: Callable[[str], float] = lambda kernel: math.inf,
) -> Iterator[list[tuple[str, KernelConfig, Any]]]:
    """Compile the kernels that are launched in the block, and launch none.

    Needs a Triton driver that reports their target; operands may be on the "meta" device.

    Args:
        limit: bytes of shared memory that a block of a kernel may have (see `compile_to_fit`).

    Yields a list that grows by (kernel, configuration, compiled).
    """
    global _recorded
    before, _recorded = _recorded, (limit, [])
    try:
        yield _recorded[1]
    finally:
        _recorded = before


def _current(device: torch.device):
    """Make `device` current: Triton launches on the current one. Costs nothing if it is already."""
    if torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
