"""Relaunch a compiled Triton kernel with minimal host work.

Triton's `JITFunction.run` ends in a C function that launches. This module calls it with arguments
looked up beforehand, addresses for operands, and TMA descriptors cached by address. Arguments come
without tuples, in which Triton 3.6 finds no descriptor. Where a part of this private API is
missing, Triton itself launches, more slowly. Checked with Triton 3.6 and 3.9
(``tests/torch_attn/test_launch.py``, ``test_driver.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from inspect import getclosurevars, signature
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from torch_attn.layouts import Layout, bind
from torch_attn.overlap import flat_signature
from torch_attn.private import find, note_missing
from torch_attn.replay import Launcher
from torch_attn.tensor_maps import TensorMap

# Encoded descriptors cached per operand, and in all; each takes about 400 bytes.
_ADDRESSES_MAX = 256
_DESCRIPTORS_MAX = 65536

_runtime = find("triton", "knobs.runtime")
_make_tensordesc_arg = find("triton.backends.nvidia.driver", "make_tensordesc_arg")
_hooks = [find("triton", f"knobs.runtime.launch_{x}_hook.calls") for x in ("enter", "exit")]


def launcher_of(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> Launcher:
    """Return a function that launches a kernel; addresses replace the layouts of `arguments`."""
    kinds = _flatten_signature(compiled.src)
    if kinds is not None:
        arguments = [x for x, kind in pairs(arguments, kinds) if kind != "constexpr"]
    through_triton = compiled[grid]  # loads the kernel on the current device

    def launch_through_triton(stream: int, addresses: tuple[int, ...]) -> None:
        through_triton(*bind(tuple(arguments), tuple(map(_Address, addresses))), stream=stream)

    if kinds is None or None in (_runtime, _make_tensordesc_arg, *_hooks):
        return launch_through_triton
    try:
        has_maps = any(isinstance(x, TensorMap) for x in arguments)
        launch_kernel, options, is_nested = _entry(compiled, has_maps)
        place = _placing(compiled, arguments)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        note_missing(f"what launches a kernel in Triton ({error})")
        return launch_through_triton
    x, y, z = grid
    runtime = _runtime

    def launch(stream: int, addresses: tuple[int, ...]) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # a profiler listens
            launch_through_triton(stream, addresses)
        elif is_nested:
            launch_kernel(x, y, z, stream, *options, place(addresses))
        else:
            launch_kernel(x, y, z, stream, *options, *place(addresses))

    return launch


def _flatten_signature(source: Any) -> tuple[Any, ...] | None:
    """Return all arguments' kinds, in tuples, by the launcher's signature, or None."""
    try:
        names = vars(source)
        kinds = names.setdefault("all_kinds", tuple(source.signature.values()))
        source.signature = flat_signature(kinds)
    except (AttributeError, TypeError) as error:
        note_missing(f"what a kernel's launcher is made for in Triton ({error})")
        return None
    return kinds


def pairs(arguments: Any, kinds: Any) -> Iterator[tuple[Any, Any]]:
    for x, kind in zip(arguments, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from pairs(x, kind)
        else:
            yield x, kind


def _entry(compiled: Any, has_maps: bool) -> tuple[Callable[..., None], list[Any], bool]:
    """Return the function below Triton's `CudaLauncher`, which looks for scratch memory first.

    Also return its arguments between the stream and the kernel's, and whether it takes the latter
    as one tuple, as since Triton 3.9.
    """
    run = copy(compiled.run)
    # Below the part that encodes descriptors.
    function = getclosurevars(run.launch).nonlocals["launcher"] if has_maps else run.launch
    options = [compiled.function, compiled.packed_metadata, None, None, None]
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        run.launch = function
        return run, options, False
    seen: list[Any] = []
    run.launch = lambda *arguments: seen.extend(arguments)
    argument, grid = object(), (2, 1, 0)  # no program, should another function be called
    run(*grid, 0, *options, argument)
    *before, last = seen
    is_nested = last is not argument
    if before[:5] != [*grid, 0, compiled.function] or (is_nested and tuple(last) != (argument,)):
        raise ValueError("the launcher passes other arguments on")
    return function, before[4:], is_nested


def _placing(compiled: Any, arguments: Sequence[Any]) -> Callable[[tuple[int, ...]], list[Any]]:
    """Return a function that makes a kernel's arguments from addresses.

    Equal integers share one object, because every launch increments reference counts.
    """
    integers: dict[int, int] = {}

    def shared(value: Any) -> Any:
        return integers.setdefault(value, value) if type(value) is int else value

    prepared: list[Any] = []
    pointers: list[tuple[int, int]] = []
    maps: list[tuple[int, int, _Descriptors]] = []
    metadata = iter(compiled.metadata.tensordesc_meta or ())
    for x in arguments:
        if isinstance(x, TensorMap):
            maps.append((len(prepared), x.operand, _Descriptors(x, next(metadata))))
            prepared += [None, *map(shared, x.fields["shape"]), *map(shared, x.fields["strides"])]
        elif isinstance(x, Layout):
            pointers.append((len(prepared), x.operand))
            prepared.append(None)
        else:
            prepared.append(shared(x))

    def place(addresses: tuple[int, ...]) -> list[Any]:
        values = prepared.copy()
        for i, operand in pointers:
            values[i] = addresses[operand]
        for i, operand, descriptors in maps:
            values[i] = descriptors[addresses[operand]]
        return values

    return place


class _Descriptors(dict[Any, Any]):
    """An operand's encoded descriptors by address; all are forgotten if there are too many."""

    _all: ClassVar[WeakValueDictionary[int, _Descriptors]] = WeakValueDictionary()
    _made: ClassVar[int] = 0  # since the cache was cleared

    def __init__(self, tensor_map: TensorMap, metadata: Any) -> None:
        self._tensor_map, self._metadata = tensor_map, metadata
        _Descriptors._all[id(self)] = self

    def __missing__(self, address: int) -> Any:
        if len(self) >= _ADDRESSES_MAX:
            self.clear()
        if _Descriptors._made >= _DESCRIPTORS_MAX:
            _Descriptors._made = 0
            for descriptors in list(_Descriptors._all.values()):
                descriptors.clear()
        _Descriptors._made += 1
        self[address] = found = _encode(self._tensor_map, self._metadata, address)
        return found


def _encode(tensor_map: TensorMap, metadata: Any, address: int) -> Any:
    descriptor = tensor_map.bind(_Address(address))
    further = [None] * (len(signature(_make_tensordesc_arg).parameters) - 2)  # since Triton 3.9
    try:
        return _make_tensordesc_arg(descriptor, metadata, *further)[0]
    except RuntimeError:  # a new thread has no CUDA context yet
        torch.cuda.mem_get_info()  # gives it one
        return _make_tensordesc_arg(descriptor, metadata, *further)[0]


class _Address(int):
    """An address, which Triton takes for a tensor."""

    def data_ptr(self) -> int:
        return int(self)
