"""Cache of checked calls, replayed when layouts and options repeat.

The first call is checked and dispatched, and its kernels are compiled. All of that follows from the
call's key, which holds of addresses only their alignment. A later call with the same key replays
allocations and launches (`torch_attn.replay`). Before a key is made, a guard of `torch.compile`
compares the operands, in C++, with the last call that had the same options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from torch_attn import private
from torch_attn.dispatch import choose, log_choice
from torch_attn.operands import ALIGNED
from torch_attn.replay import Replay, capture
from twin_attention.targets.config import requested_configs
from twin_attention.targets.kernels import Spec
from twin_attention.targets.target import requested_target

Key = tuple[Hashable, ...]
# Calls a family's function with problem, backend and operands.
Run = Callable[..., Any]

_PLAIN = (Tensor, Parameter)


class Guard:
    """Recognises operands of the same layouts and modes; one tensor as two operands is rejected."""

    def __init__(self, operands: tuple[Any, ...]) -> None:
        given = [i for i, x in enumerate(operands) if x is not None]
        self._count, first = len(given), given[0]
        # itemgetter(i) returns an item, not a tuple.
        self._tensors = itemgetter(*(given if len(given) > 1 else [slice(first, first + 1)]))
        tensors = self._tensors(operands)
        guards = private.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._check = guards.check

    def __call__(self, operands: tuple[Any, ...]) -> bool:
        tensors = self._tensors(operands)
        return (
            self._check(*tensors)
            and len([x for x in operands if x is not None]) == self._count
            and not [x for x in tensors if x.data_ptr() % ALIGNED]
        )


class Call:
    """An operation for one layout of operands; once cached, it is replayed.

    `others` is what follows the tensors in the operator's arguments; last the requested
    implementation. `guard` recognises the operands, if the call is kept and they are aligned.
    """

    def __init__(
        self, operation: str, run: Run, spec: Spec, device: torch.device, others: tuple[Any, ...]
    ) -> None:
        # An empty problem runs no kernel.
        name = "reference" if spec.is_empty else others[-1]
        self.spec, self.others = spec, others
        if device.type == "cuda" and name != "reference":
            _start_triton()
        self.backend, _ = choose(name, operation, device, spec)
        log_choice(name, operation, device, spec)
        self.is_kept = self.is_recorded = False
        self.guard: Guard | None = None
        self._host = partial(run, self.backend.family.function(operation), spec, self.backend)
        self._replay: Replay | None = None

    @property
    def is_new(self) -> bool:
        return self._replay is None

    def __call__(self, *operands: Any) -> Any:
        """Run the operation; return what `run` does, except for a tuple's type."""
        if self._replay is not None:
            return self._replay(*operands)
        if not self.is_kept:
            return self._host(*operands)
        results, self._replay = capture(self._host, operands)
        return results


def _start_triton() -> None:
    """Start what first launches wait for, while kernels are imported."""
    with suppress(ImportError):  # `choose` says what is missing
        from torch_attn.overlap import start_driver

        start_driver()


def _options_key(function: Hashable, options: tuple[Hashable, ...]) -> Key:
    """Return all that a call depends on except operands and modes; 1 is not True."""
    types = tuple(map(type, options))
    if tuple in types:
        types += tuple([tuple(map(type, x)) for x in options if type(x) is tuple])
    enabled = torch.is_grad_enabled()
    return function, options, types, enabled, requested_target(), requested_configs()


def _key(options_key: Key, operands: tuple[Any, ...]) -> Key | None:
    """Return what a call depends on except values; None if the dispatcher has to see the call."""
    if (
        private.len_dispatch_stack()
        or private.is_function_mode_enabled()
        or private.transforms_active()
    ):
        return None
    layouts = _layouts(operands)
    # In forward mode, operators below the dispatcher are called without tangents.
    if layouts is None or ((recorded := is_recorded(operands)) and private.may_be_dual()):
        return None
    return options_key, layouts, recorded


def _layouts(operands: tuple[Any, ...]) -> Key | None:
    """Return the operands' layouts; None if one is no plain CUDA tensor."""
    if type(operands[0]) not in _PLAIN or not operands[0].is_cuda:
        return None
    layouts: list[Any] = []
    try:
        for x in operands:
            if x is None:
                layouts.append(None)
            elif type(x) in _PLAIN and not (x.is_neg() or x._is_zerotensor()):
                aligned = x.data_ptr() % ALIGNED == 0
                place = x.get_device(), aligned
                layouts.append((x.shape, x.stride(), x.dtype, *place, x.requires_grad))
            else:
                return None
    except RuntimeError:  # a tensor without strides or memory, such as a sparse one
        return None
    return tuple(layouts)


class Kept(dict[Any, Any]):
    """A dictionary that forgets all before it exceeds `most` entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)


class Calls:
    """The cached calls, and the last one with given options."""

    def __init__(self) -> None:
        # A call with its launches takes about 64 kB on the host.
        self.by_key, self.last = Kept(1024), Kept(1024)

    def clear(self) -> None:
        self.by_key.clear()
        self.last.clear()

    def find(
        self, function: Hashable, operands: tuple[Any, ...], options: tuple[Hashable, ...]
    ) -> Call | None:
        """Return the call that `keep` cached for the same arguments, or None."""
        if torch.compiler.is_compiling():
            return None
        options_key = _options_key(function, options)
        try:
            last = self.last.get(options_key)
        except TypeError:  # an option that has no hash
            return None
        if last is None:
            return None
        # A guard sees neither `__torch_function__` modes nor forward mode.
        if (
            last.guard is not None
            and last.guard(operands)
            and not private.is_function_mode_enabled()
            and not private.may_be_dual()
        ):
            return last
        key = _key(options_key, operands)
        call = None if key is None else self.by_key.get(key)
        if call is not None:
            self.last[options_key] = call
            if call.guard is not None and not call.guard(operands):  # kept elsewhere in dispatch
                call.guard = Guard(operands)
        return call

    def keep(
        self,
        function: Hashable,
        operands: tuple[Any, ...],
        options: tuple[Hashable, ...],
        call: Call,
    ) -> bool:
        """Cache a call that launches kernels and needs no dispatcher; return True if it is kept."""
        if torch.compiler.is_compiling() or call.backend.target is None or not private.CAN_KEEP:
            return False
        options_key = _options_key(function, options)
        key = _key(options_key, operands)
        if key is None:
            return False
        call.is_recorded = is_recorded(operands)
        if all(x is None or x.data_ptr() % ALIGNED == 0 for x in operands):
            call.guard = Guard(operands)
        try:
            self.by_key[key] = self.last[options_key] = call
        except TypeError:  # an option that has no hash
            return False
        call.is_kept = True
        return True


CALLS = Calls()


def is_recorded(tensors: tuple[Any, ...]) -> bool:
    """Return True if autograd would record these tensors or one has a tangent."""
    enabled = torch.is_grad_enabled()
    dual = private.may_be_dual()
    if not (enabled or dual):
        return False
    for x in tensors:
        if isinstance(x, Tensor) and (
            (enabled and x.requires_grad)
            or (dual and forward_ad.unpack_dual(x).tangent is not None)
        ):
            return True
    return False
