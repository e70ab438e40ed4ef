"""Calls that were checked before: the host's share of a call on a CUDA device.

The first call with given layouts and options is checked, described and dispatched, and its kernels
are compiled. All of that follows from the call's key, so a call with the same key goes straight to
the launches. The key has no tensor and no address in it, only an address's alignment, which Triton
compiles for. The call of a backward is kept with its forward's.

Beside `torch_attn.flash_ops` and `torch_attn.driver` this is where private torch API is used:
``torch._C`` says which modes and transformations are active, and allocates.
``tests/torch_attn/test_calls.py`` guards it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.nn import Parameter

from torch_attn.dispatch import Implementation, choose
from torch_attn.operands import rows_aligned
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import requested_configs
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import Spec
from twin_attention.targets.target import requested_target

Key = tuple[Hashable, ...]

_calls: dict[Key | None, Call] = {}
_CALLS_MAX = 4096
_PLAIN = (Tensor, Parameter)


class Call(Backend):
    """The backend of one problem, with operands of one layout, that remembers its launches.

    Attributes:
        spec: the problem.
        implementation: what the caller asked for.
        run: the family's function.
        launchers: by kernel, what launches it again (`torch_attn.launch`).
    """

    spec: Spec
    implementation: Implementation | None
    run: Callable[..., Any]
    _configs: dict[type, Mapping[str, Any]]
    launchers: dict[str, Callable[..., None]]
    _backwards: dict[Key, Call]

    @classmethod
    def of(
        cls,
        operation: str,
        spec: Spec,
        backend: Backend,
        implementation: Implementation | None = None,
    ) -> Call:
        """Return a call of an operation that has launched nothing yet."""
        call = cls._make(backend)
        call.spec, call.implementation = spec, implementation
        call.run = backend.family.function(operation)
        call.launchers, call._backwards, call._configs = {}, {}, {}
        return call

    def configs(self, spec: Spec) -> Mapping[str, Any]:
        """Return the configuration of each kernel; a call has one problem of each kind."""
        found = self._configs.get(type(spec))
        if found is None:
            found = self._configs[type(spec)] = super().configs(spec)
        return found

    def backward(self, dout: Tensor, dlse: Tensor | None) -> Call | None:
        """Return the call of the backward with gradients of these layouts, None if not plain."""
        layouts = _layouts((dout, dlse))
        if layouts is None:
            return None
        key = (layouts, requested_target(), requested_configs())
        found = self._backwards.get(key)
        if found is None:
            assert isinstance(self.spec, AttentionSpec)
            aligned = self.spec.rows_aligned and rows_aligned(dout)
            spec = replace(self.spec, rows_aligned=aligned)
            backend, _ = choose(self.implementation, "flash_bwd", dout.device, spec)
            found = Call.of("flash_bwd", spec, backend, self.implementation)
            self._backwards[key] = found
        return found


def _key(function: str, operands: tuple[Any, ...], options: tuple[Any, ...]) -> Key | None:
    """Return all that a call depends on but the operands' values.

    Options count with their types: 1 is not True.

    Returns:
        The key. None for a call that has to be looked at anew: a mode, a transformation or autocast
        is active, or an operand is no plain tensor on a CUDA device.
    """
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch.is_autocast_enabled("cuda")
    ):
        return None
    layouts = _layouts(operands)
    if layouts is None:
        return None
    types = tuple([tuple(map(type, x)) if type(x) is tuple else type(x) for x in options])
    return (function, layouts, options, types, requested_target(), requested_configs())


def _layouts(operands: tuple[Any, ...]) -> Key | None:
    """Return all that a launch depends on of operands; None if one is no plain CUDA tensor."""
    if type(operands[0]) not in _PLAIN or not operands[0].is_cuda:
        return None
    layouts: list[Any] = []
    try:
        for x in operands:
            if x is None:
                layouts.append(None)
            elif type(x) in _PLAIN and not (x.is_neg() or x._is_zerotensor()):
                aligned = x.data_ptr() % 16 == 0
                layouts.append((x.shape, x.stride(), x.dtype, x.get_device(), aligned))
            else:
                return None
    except RuntimeError:  # a tensor without strides or memory, such as a sparse one
        return None
    return tuple(layouts)


def recall(function: str, operands: tuple[Any, ...], options: tuple[Hashable, ...]) -> Call | None:
    """Return the call that `keep` was given for the same arguments, or None.

    Args:
        function: a name that goes with one set of operands and options.
        operands: tensors, or None for what is left out.
        options: the other arguments, as the caller gave them.
    """
    if torch.compiler.is_compiling():
        return None
    key = _key(function, operands, options)
    try:
        return _calls.get(key)
    except TypeError:  # an option that has no hash
        return None


def keep(
    function: str,
    operands: tuple[Any, ...],
    options: tuple[Hashable, ...],
    operation: str,
    spec: Spec,
    implementation: Implementation | None,
) -> None:
    """Keep a call whose arguments were checked, if it launches compiled kernels.

    Args:
        function, operands, options: those that `recall` gets.
        operation: the family's function, such as "flash_fwd".
        spec: the problem.
        implementation: what the caller asked for.
    """
    key = None if torch.compiler.is_compiling() else _key(function, operands, options)
    if key is None or spec.is_empty:
        return
    backend, _ = choose(implementation, operation, operands[0].device, spec)
    if backend.target is None:
        return
    if len(_calls) >= _CALLS_MAX:
        _calls.clear()
    with suppress(TypeError):  # an option that has no hash
        _calls[key] = Call.of(operation, spec, backend, implementation)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a contiguous tensor, on the current CUDA device in a third of torch.empty's time."""
    if device.type == "cuda" and device.index == torch._C._cuda_getDevice():
        return _empty_strided_cuda(shape, _contiguous(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=device)


@lru_cache(maxsize=4096)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def is_recorded(tensors: tuple[Any, ...]) -> bool:
    """Return True when autograd would record a function of these, or one has a tangent."""
    enabled = torch.is_grad_enabled()
    dual = forward_ad._current_level >= 0
    if not (enabled or dual):
        return False
    for x in tensors:
        if isinstance(x, Tensor) and (
            (enabled and x.requires_grad)
            or (dual and forward_ad.unpack_dual(x).tangent is not None)
        ):
            return True
    return False
