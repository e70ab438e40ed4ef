"""How a kernel is launched: for which target, with which configuration, compiled or interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from twin_attention.contract.spec import AttentionSpec, DecodeSpec
from twin_attention.targets.config import (
    KernelConfig,
    Spec,
    compile_to_fit,
    find_configs,
    padded_head_dim,
)
from twin_attention.targets.target import MULTIPROCESSORS, SHARED_MEMORY_LIMIT, resolve_target

_CONFIGS = Path(__file__).parent / "configs"

# Arguments that change from call to call: one compiled kernel serves all of their values.
UNSPECIALIZED = ["seq_q", "seq_kv", "window_left", "window_right"]

# Of each problem that was launched, by what its arguments follow from.
_launchers: dict[Hashable, _Launcher] = {}
_LAUNCHERS_MAX = 4096

_recorded: tuple[str, Callable[[str], float], list[tuple[str, KernelConfig, Any]]] | None = None


def target_of(device: torch.device) -> str:
    """The target whose code runs on this CUDA device (see `twin_attention.targets.target`)."""
    if _recorded is not None:
        return _recorded[0]
    return resolve_target(_properties(device)[0])


def _shared_memory(target: str, device: torch.device) -> int:
    """Bytes that a block may have: the target's limit, or a smaller card's own."""
    return min(SHARED_MEMORY_LIMIT[target], _properties(device)[2])


@lru_cache
def _properties(device: torch.device) -> tuple[tuple[int, int], int, int]:
    """Compute capability, number of multiprocessors, and bytes of shared memory a block may have.

    To ask each time takes microseconds.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return capability, properties.multi_processor_count, properties.shared_memory_per_block_optin


@lru_cache(maxsize=1024)
def configs_for(spec: Spec, target: str) -> Mapping[str, KernelConfig]:
    """The shipped configuration of each kernel for a problem."""
    return find_configs(_CONFIGS / f"{target}.toml", spec)


def problem_arguments(spec: AttentionSpec) -> dict[str, Any]:
    """The arguments that describe a problem, as every attention kernel takes them."""
    scale_first = scales_first(spec)
    reach = spec.seq_q + spec.seq_kv
    left, right = spec.window.left, spec.window.right
    return {
        "seq_q": spec.seq_q,
        "seq_kv": spec.seq_kv,
        "heads_q": spec.heads_q,
        "scale": spec.scale,
        "exp2_scale": math.log2(math.e) * (1.0 if scale_first else spec.scale),
        "softcap": 0.0 if spec.softcap is None else spec.softcap,
        "window_left": 0 if left is None else min(left, reach),
        "window_right": 0 if right is None else min(right, reach),
        "GROUP_SIZE": spec.group_size,
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_V": spec.head_dim_v,
        "BLOCK_D": padded_head_dim(spec.head_dim),
        "BLOCK_DV": padded_head_dim(spec.head_dim_v),
        "SCALE_FIRST": scale_first,
        "HAS_SOFTCAP": spec.softcap is not None,
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
    }


def scales_first(spec: AttentionSpec | DecodeSpec) -> bool:
    """Return whether scores are scaled by themselves, not together with the change to base 2.

    Together takes a positive scale whose product with log2(e) is a normal float32: a masked score
    is -inf, and -inf times a product that vanished would be NaN.
    """
    return spec.softcap is not None or not 2.0**-126 <= spec.scale < 2.0**127


def stride_arguments(**tensors: torch.Tensor) -> dict[str, int]:
    """The strides of [B, S, H, D] tensors, as a kernel that calls them by these names takes them.

    The distance of rows is a compile-time constant, so that a tile's addresses are one register
    and constant offsets: at D 128 the dk, dv kernel spills half as much for it. ALIGN, a divisor
    of every stride, tells the compiler how wide a load may be.
    """
    arguments = {}
    for name, x in tensors.items():
        arguments |= {f"{name}_batch": x.stride(0), f"{name}_head": x.stride(2)}
        arguments[f"{name.upper()}_ROW"] = x.stride(1)
    return arguments | {"ALIGN": math.gcd(16, *arguments.values())}


def multiprocessors(device: torch.device, target: str) -> int:
    """How many multiprocessors the device has; without a device, the target's usual number."""
    if device.type != "cuda":
        return MULTIPROCESSORS[target]
    return _properties(device)[1]


def config_for(name: str, spec: Spec, device: torch.device) -> tuple[str, KernelConfig]:
    """Target and configuration of a kernel on a device; a CPU has the SM80 configurations."""
    target = "sm80" if device.type == "cpu" else target_of(device)
    return target, configs_for(spec, target)[name]


def launch(
    name: str,
    kernel: Any,
    grid: Callable[[KernelConfig], tuple[int, ...]],
    operands: tuple[Any, ...],
    problem: Callable[[], Mapping[str, Any]],
    spec: Spec,
    *details: Hashable,
    **launch_options: Any,
) -> None:
    """Launch a kernel on its first operand's device; a CPU tensor goes to Triton's interpreter.

    On a CUDA device the first launch of a problem goes through Triton, which compiles, with fewer
    stages where the configured ones do not fit (`compile_to_fit`); what is the same in all of its
    launches is then kept, so that the others cost the host half as much.

    Args:
        name: the kernel's name in the configuration tables.
        kernel: the `triton.jit` function.
        grid: programs to launch, from the configuration.
        operands: leading arguments, tensors or None.
        problem: makes the other arguments but the tile sizes, by name. They, and the grid, follow
            from the layout of the operands, from `spec`, and from `details` alone.
        spec: the problem, which chooses the configuration.
        details: what else the arguments follow from.
        launch_options: further options of Triton's, for a CUDA device.
    """
    device = operands[0].device
    target, config = config_for(name, spec, device)
    key = None
    if device.type == "cuda" and _recorded is None:
        layouts = tuple(map(_layout, operands))
        key = (kernel.fn, spec, details, config, target, device.index, layouts)
        launcher = _launchers.get(key)
        if launcher is not None:
            with _current(device):
                launcher(*operands)
            return
    tiles = {"BLOCK_Q": config.block_q, "BLOCK_KV": config.block_kv}
    arguments = {**problem(), **{key: tiles[key] for key in tiles if key in kernel.arg_names}}
    if device.type == "cpu":
        from torch_attn.interpreter import interpreted

        interpreted(kernel)[grid(config)](*operands, **arguments)
        return
    options = {"enable_fp_fusion": True} | launch_options  # Triton 3.10 turns it off unless asked
    if target == "sm80":
        options["arch"] = "sm80"

    def compile(config: KernelConfig) -> Any:
        options.update(num_warps=config.num_warps, num_stages=config.num_stages)
        return kernel.warmup(*operands, grid=grid(config), **arguments, **options)

    if _recorded is not None:
        _, limit, compiled = _recorded
        compiled.append((name, *compile_to_fit(name, compile, config, target, limit(name))))
        return
    with _current(device):
        limit = _shared_memory(target, device)
        _, compiled = compile_to_fit(name, compile, config, target, limit)
        rest = [arguments[name] for name in kernel.arg_names[len(operands) :]]
        launcher = _Launcher(compiled, (*grid(config), 1, 1)[:3], rest)
        launcher(*operands)
    if len(_launchers) >= _LAUNCHERS_MAX:
        _launchers.clear()
    _launchers[key] = launcher


class _Launcher:
    """Launches a compiled kernel again on operands of the same layout.

    This is what Triton's `JITFunction.run` ends with. It uses `CompiledKernel.__getitem__`, which
    is public but not documented; ``tests/torch_attn/test_launch.py`` guards it.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        self._run, self._arguments = compiled[grid], arguments

    def __call__(self, *operands: Any) -> None:
        self._run(*operands, *self._arguments)


def _layout(x: torch.Tensor | None) -> Hashable:
    """All that Triton compiles for, of an operand whose shape is known."""
    return None if x is None else (x.dtype, x.stride(), x.data_ptr() % 16 == 0)


@contextmanager
def recording(
    target: str, limit: Callable[[str], float] = lambda kernel: math.inf
) -> Iterator[list[tuple[str, KernelConfig, Any]]]:
    """Compile for `target` instead of launching.

    Needs a Triton driver that reports that target; operands may be on the "meta" device.

    Args:
        limit: bytes of shared memory that a block of a kernel may have (see `compile_to_fit`).

    Yields a list that grows by (kernel, configuration, compiled).
    """
    global _recorded
    before, _recorded = _recorded, (target, limit, [])
    try:
        yield _recorded[2]
    finally:
        _recorded = before


def _current(device: torch.device):
    """Make `device` current: Triton launches on the current one. Costs nothing if it is already."""
    if torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
