"""Private names of torch that this side uses: a renamed one costs only speed.

Each name is looked up once, at import. A missing name is None or a minimal correct stand-in, and
`explain` lists it. Without the names in `CAN_KEEP` no call is cached. Triton's private names are in
the files that use them: `driver`, `overlap`, `interpreter`, and `tma` and `reduction` of
`kernels.explicit`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from twin_attention.targets.versions import newer_versions

# The newest checked versions.
TESTED = {"torch": (2, 13), "triton": (3, 9)}
_missing: dict[str, None] = {}


def find(module: str, name: str) -> Any:
    """Return a module's private name; if missing, None, and let `missing` report it."""
    try:
        return attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):
        note_missing(f"{module}.{name}")
        return None


def note_missing(what: str) -> None:
    _missing[what] = None


TensorGuards = find("torch._C._dynamo.guards", "TensorGuards")
empty_strided_cuda = find("torch._C._dynamo.guards", "_empty_strided_cuda")
len_dispatch_stack = find("torch._C", "_len_torch_dispatch_stack")
is_function_mode_enabled = find("torch._C", "_is_torch_function_mode_enabled")
_transforms_active = find("torch._C", "_are_functorch_transforms_active")
_interpreter, _Transform = (
    find("torch._C._functorch", name) for name in ("peek_interpreter_stack", "TransformType")
)
TorchDispatchMode: Any = find("torch.utils._python_dispatch", "TorchDispatchMode") or object
_current_mode = find("torch.utils._python_dispatch", "_get_current_dispatch_mode")
_has_level = find("torch.autograd.forward_ad", "_current_level") is not None
below_autograd = find("torch._C", "_AutoDispatchBelowAutograd")
_Strategy, _Action, _set_strategy = (
    find("torch._C._dynamo.eval_frame", name)
    for name in ("_FrameExecStrategy", "_FrameAction", "set_code_exec_strategy")
)
_included = find("torch._C", "_dispatch_tls_local_include_set")
_excluded = find("torch._C", "_dispatch_tls_local_exclude_set")
_force_keys = find("torch._C", "_ForceDispatchKeyGuard")
_KeySet = find("torch._C", "DispatchKeySet")
_Key = find("torch._C", "DispatchKey")
# A torch without CUDA lacks these, and keeps no call.
get_device = getattr(torch._C, "_cuda_getDevice", None)
get_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
if torch.cuda.is_available():
    for _name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        find("torch._C", _name)

CAN_KEEP = not _missing
is_fake = find("torch._subclasses.fake_tensor", "is_fake")  # for flop counts
if torch.distributed.is_available():
    _GROUP = "ProcessGroup."
    backend_of, start_coalescing, end_coalescing = (
        find("torch.distributed", _GROUP + name)
        for name in ("_get_backend", "_start_coalescing", "_end_coalescing")
    )
    symmetric_empty, symmetric_rendezvous = (
        find("torch.distributed._symmetric_memory", name) for name in ("empty", "rendezvous")
    )


def timeout_of(group: Any, device: torch.device) -> float | None:
    """Return the seconds that a process group waits for other ranks, None if unknown."""
    try:
        return backend_of(group, device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError, TypeError):  # also where it has no backend for a GPU
        return None


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of a function and what it calls, which it compiles behind a graph break.

    `torch.compiler.disable` does so too, but imports Dynamo, and costs time at each call.
    """
    if None not in (_Strategy, _Action, _set_strategy):
        _set_strategy(function.__code__, _Strategy(_Action.SKIP, _Action.SKIP))
    return function


class DispatchMode(TorchDispatchMode):
    """A dispatch mode without torch's wrapper, which imports Dynamo to keep it out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def current_mode() -> Any:
    return None if _current_mode is None else _current_mode()


def transforms_active() -> bool:
    return _transforms_active is not None and _transforms_active()


def in_jvp() -> bool:
    """Return True inside `torch.func.jvp`, or where its level cannot be told."""
    if None in (_interpreter, _Transform):
        return True
    interpreter = _interpreter()
    return interpreter is not None and interpreter.key() == _Transform.Jvp


def may_be_dual() -> bool:
    """Return True in forward mode, but not below the Autograd key, where no tensor has a tangent.

    To ask a tensor for its tangent there is an error.
    """
    if _has_level and forward_ad._current_level < 0:
        return False
    return None in (_excluded, _Key) or not _excluded().has(_Key.AutogradFunctionality)


def above_torch_func() -> AbstractContextManager[Any]:
    """Return a context in which calls start above the dispatch key of `torch.func`."""
    if None in (_included, _excluded, _force_keys, _KeySet, _Key):
        return nullcontext()
    keys = _KeySet(_Key.FuncTorchDynamicLayerFrontMode) | _KeySet(_Key.PythonTLSSnapshot)
    return _force_keys(_included() | keys, _excluded() - keys)


def missing() -> str | None:
    """Say which private names are missing and what runs without them; None for none."""
    if not _missing:
        return None
    return f"calls take the slow path, without {', '.join(_missing)}"


def untested() -> str | None:
    """Say which versions are newer than the tested ones; None for none."""
    return newer_versions(TESTED)
