"""Choose a kernel's configuration; compile or interpret it, and launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import triton.language as tl
import triton.runtime.errors as triton_errors

from torch_attn.driver import launcher_of
from torch_attn.layouts import bind, layouts_of, leaves, placeholders_of
from torch_attn.overlap import build_launcher_beside, wait_for
from torch_attn.replay import Launcher, current_capture
from torch_attn.targets import shared_memory
from twin_attention.contract.spec import AttentionSpec, PartialSpec, ScoreRule, VarlenSpec
from twin_attention.targets.config import compile_to_fit
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import KernelConfig, Spec
from twin_attention.targets.sm90 import portable_uses_wgmma
from twin_attention.targets.target import SHARED_MEMORY_LIMIT

# Arguments that change from call to call: one compiled kernel serves all values. Triton specialises
# every number in a tuple, so none of these is in one.
UNSPECIALIZED = [
    "seq_q", "seq_kv", "diagonal", "num_sequences", "together", "window_left", "window_right",
]  # fmt: skip

# What Triton raises if ptxas fails; without such a name, its error is left alone.
_PTXAS_ERRORS = getattr(triton_errors, "PTXASError", ())

_recorded: tuple[Callable[[str], float], list[tuple[str, KernelConfig, Any]]] | None = None


def flash_arguments(spec: AttentionSpec) -> dict[str, Any]:
    window = spec.bounded_window
    return {
        "seq_q": spec.seq_q,
        "seq_kv": spec.seq_kv,
        "diagonal": spec.diagonal,
        "num_sequences": num_sequences(spec),
        "heads_q": spec.heads_q,
        "rule": rule_argument(spec.scores),
        "window_left": window.left,
        "window_right": window.right,
        "GROUP_SIZE": spec.group_size,
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_V": spec.head_dim_v,
    }


def num_sequences(spec: AttentionSpec) -> int | None:
    """Return the number of packed sequences, None for a dense batch."""
    return spec.num_sequences if isinstance(spec, VarlenSpec) else None


def has_carry(spec: AttentionSpec) -> bool:
    """Return True if a kernel's output holds a result over other keys, to merge with."""
    return isinstance(spec, PartialSpec)


def rule_argument(rule: ScoreRule) -> ScoreRule:
    """Return a rule as kernels take it: non-numeric fields are constexprs."""
    return rule._replace(
        scale_first=tl.constexpr(rule.scale_first),
        precision=tl.constexpr(rule.precision),
        small_cap=tl.constexpr(rule.small_cap),
    )


# The grid, and arguments by name other than operands and tile sizes. A `Layout` or `TensorMap`
# stands for its operand; an argument with an operand's name replaces it.
Prepared = tuple[tuple[int, ...], dict[str, Any]]


class KernelCall(NamedTuple):
    """All that a kernel's code, grid and arguments depend on, except the operands' values.

    `constants` is what else the arguments depend on, `target` is None in the interpreter, `layouts`
    come in the operands' tuples.
    """

    spec: Spec
    constants: tuple[Hashable, ...]
    config: KernelConfig
    target: str | None
    device: torch.device
    layouts: tuple[Any, ...]


class Launch(NamedTuple):
    """A kernel and all that its launch depends on, except the operands' addresses."""

    name: str
    kernel: Any
    prepare: Callable[[KernelCall], Prepared]
    spec: Spec
    backend: Backend
    constants: tuple[Hashable, ...]
    config: KernelConfig
    options: tuple[tuple[str, Hashable], ...]
    device: torch.device
    layouts: tuple[Any, ...]

    def prepared(self, config: KernelConfig) -> tuple[tuple[int, ...], list[Any]]:
        """Return the grid and all arguments in order, with the configuration's numbers."""
        target = self.backend.target
        call = KernelCall(self.spec, self.constants, config, target, self.device, self.layouts)
        return arguments_of(self.kernel, self.prepare, call)

    def compile_on(self, device: torch.device) -> tuple[KernelConfig, Any]:
        """Compile for a CUDA device, which keeps the kernel; otherwise as `compile`."""
        assert self.backend.target is not None
        with torch.cuda.device(device):
            build_launcher_beside(self.kernel)
            return self.compile(warm_up, shared_memory(self.backend.target, device))

    def compile(self, compile: Callable[..., Any], limit: float) -> tuple[KernelConfig, Any]:
        """Compile with the configuration, or with one that needs less shared memory.

        Args:
            compile: such as `warm_up`; its arguments have placeholders for the operands.
            limit: bytes of shared memory that a block may have (see `compile_to_fit`).

        Returns:
            The configuration that fits, and what was compiled.

        Raises:
            NotImplementedError: none fits.
            RuntimeError: ptxas fails.
        """
        name, spec, backend, config, target = (
            self.name, self.spec, self.backend, self.config, self.backend.target,
        )  # fmt: skip
        assert target is not None
        options = {"enable_fp_fusion": True} | dict(self.options)  # Triton 3.10 turns it off
        if target == "sm80" or not portable_uses_wgmma(name, spec):
            options["arch"] = "sm80"

        operands = placeholders_of(self.layouts)

        def compiled(config: KernelConfig) -> Any:
            numbers = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            grid, arguments = self.prepared(config)
            arguments = [bind(x, operands) for x in arguments]
            try:
                return compile(self.kernel, grid, arguments, numbers | options)
            except _PTXAS_ERRORS as error:
                raise RuntimeError(
                    f"{name}: ptxas does not compile this kernel ({str(error).splitlines()[0]}). "
                    "TRITON_PTXAS_PATH names another ptxas, and another `implementation` takes "
                    "other kernels"
                ) from error

        smaller = partial(backend.smaller_configs, spec, name, config)
        return compile_to_fit(name, compiled, config, target, limit, smaller)


def warm_up(
    kernel: Any, grid: tuple[int, ...], arguments: list[Any], options: dict[str, Any]
) -> Any:
    return kernel.warmup(*arguments, grid=grid, **options)


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

    A `torch_attn.replay.Capture` around the call gets a function that relaunches the kernel, or,
    for operands on the "meta" device, the uncompiled `Launch`.

    A kernel writes none of its host function's operands. A buffer that the host function allocates
    may be written by each launch that takes it; the first of these writes it or does not read it.

    Args:
        name: of the kernel in the configuration tables.
        prepare: a module-level function. From the `KernelCall` it returns the grid and, by name,
            the arguments other than operands and tile sizes.
        operands: leading arguments: tensors, None, or named tuples of these.
        constants: what else grid and arguments depend on, compared by value.
        options: Triton's launch options; `num_warps` and `num_stages` replace the configuration's.
    """
    capture = current_capture()
    tensors = tensors_of(operands)
    with nullcontext() if capture is None else capture.paused():
        config = config_of(name, spec, backend, operands[0].device)
        numbers = {x: options.pop(x) for x in ("num_warps", "num_stages") if x in options}
        found = Launch(
            name, kernel, prepare, spec, backend, constants,
            replace(cast(Any, config), **numbers) if numbers else config, tuple(options.items()),
            operands[0].device, layouts_of(operands),
        )  # fmt: skip
        is_described = capture is not None and found.device.type == "meta"
        launcher = found if is_described else _launch(found, tensors)
    if capture is not None and launcher is not None:
        capture.add(launcher, tensors)


def tensors_of(operands: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in leaves(operands) if x is not None)


def _launch(found: Launch, tensors: tuple[torch.Tensor, ...]) -> Launcher | None:
    """Launch a kernel; return what relaunches it, if it was compiled."""
    if found.backend.target is None:
        from torch_attn.interpreter import interpreted

        grid, arguments = found.prepared(found.config)
        interpreted(found.kernel)[grid](*(bind(x, tensors) for x in arguments))
        return None
    if _recorded is not None:
        fitted = found.compile(warm_up, _recorded[0](found.name))
        _recorded[1].append((found.name, *fitted))
        return None
    wait_for(found.kernel)
    config, compiled = found.compile_on(found.device)
    grid, arguments = found.prepared(config)
    with torch.cuda.device(found.device):
        launcher = launcher_of(compiled, (*grid, 1, 1)[:3], arguments)
        stream = torch.cuda.current_stream().cuda_stream
        launcher(stream, tuple(x.data_ptr() for x in tensors))
    return launcher


def config_of(name: str, spec: Spec, backend: Backend, device: torch.device) -> KernelConfig:
    """Return the configuration that a launch starts from; it may end with fewer stages."""
    config, target = backend.configs(spec)[name], backend.target
    if target is None or _shared_memory(name, target, device) >= SHARED_MEMORY_LIMIT[target]:
        return config
    return backend.config_of_smaller_cards(spec, name, config)


def _shared_memory(name: str, target: str, device: torch.device) -> float:
    return shared_memory(target, device) if _recorded is None else _recorded[0](name)


def arguments_of(
    kernel: Any, prepare: Callable[[KernelCall], Prepared], call: KernelCall
) -> tuple[tuple[int, ...], list[Any]]:
    """Return a launch's grid and arguments in order, with layouts for operands."""
    grid, arguments = prepare(call)
    numbers = {name.upper(): value for name, value in vars(call.config).items()}
    places = dict(zip(kernel.arg_names, call.layouts, strict=False))
    arguments = places | arguments | numbers
    return grid, [arguments[name] for name in kernel.arg_names]


@contextmanager
def recording(
    limit: Callable[[str], float] = lambda kernel: math.inf,
) -> Iterator[list[tuple[str, KernelConfig, Any]]]:
    """Compile the kernels that are launched in the block, and launch none.

    It needs a Triton driver that reports their target; operands may be on the "meta" device.
    `limit` is as in `Launch.compile`. Yields a list that grows by (kernel, configuration,
    compiled).
    """
    global _recorded
    before, _recorded = _recorded, (limit, [])
    try:
        yield _recorded[1]
    finally:
        _recorded = before
