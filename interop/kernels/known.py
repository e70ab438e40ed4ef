"""Plans of host functions of `torch_attn`, and their kernels, for JAX.

What an earlier process found is loaded from disk; then neither PyTorch nor Triton is imported.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import copy_context
from functools import lru_cache
from hashlib import sha256
from threading import RLock, Thread
from typing import Any, NamedTuple

from pallas_attn import private
from pallas_attn.targets import cuda_devices
from twin_attention.interop.kernels import kept
from twin_attention.interop.kernels.machine import Buffers, Compiled, arrange_buffers
from twin_attention.interop.kernels.plan import Kernel, Operation, Plan, Type
from twin_attention.targets import family
from twin_attention.targets.config import requested_configs
from twin_attention.targets.kernels import Spec
from twin_attention.targets.target import Card


class Question(NamedTuple):
    """All that a plan depends on; `operands` are the operation's, with a `Type` for each array."""

    folder: str
    operation: str
    spec: Spec
    target: str
    card: Card
    operands: Any


class Code(NamedTuple):
    """The kernel of a plan's step; `launch` is None in a plan from disk."""

    question: Question
    step: int
    name: str
    types: tuple[Type, ...]
    launch: Any = None


def refusal(folder: str, operation: str, spec: Spec, target: str | None) -> str | None:
    question = "refusal", folder, operation, spec, target
    if (found := _load(question)) is None:
        private.hash_triton()
        found = (
            family.import_error("torch_attn.families")
            or family.own_family("torch_attn", folder).supports(operation, spec, target)
            or family.import_error("twin_attention.interop.kernels.torch_host")
            or family.import_error("twin_attention.interop.kernels.cubin"),
        )
        _save(question, found)
    return found[0]


def plan_of(question: Question) -> Plan:
    """Describe what a host function does; each `Kernel` of the plan has a `Code`."""
    if (found := _load(("plan", question))) is None:
        found = _planned(question)
        _save(("plan", question), found._replace(steps=(*map(_without_launch, found.steps),)))
    return found


def kernel_of(
    code: Code, written: tuple[int, ...], zeroed: tuple[int, ...]
) -> tuple[Compiled, Buffers]:
    """Return a compiled kernel, whose parameters are in the order of its buffers, and these.

    Raise `NotImplementedError` if no configuration fits the card's shared memory.
    """
    with _lock_of(code):
        return _kernel_of(code, written, zeroed)


def begin(code: Code, written: tuple[int, ...], zeroed: tuple[int, ...]) -> None:
    """Let a thread compile a kernel; who calls `kernel_of` later sees what is wrong."""

    def run() -> None:
        with suppress(Exception):
            kernel_of(code, written, zeroed)

    Thread(target=copy_context().run, args=(run,)).start()


@lru_cache(maxsize=1024)
def _lock_of(code: Code) -> Any:
    return RLock()


@lru_cache(maxsize=1024)
def _kernel_of(
    code: Code, written: tuple[int, ...], zeroed: tuple[int, ...]
) -> tuple[Compiled, Buffers]:
    question = "kernel", code._replace(launch=None)
    if (found := _load(question)) is not None:
        compiled, buffers = found
        if (machine := _load(compiled.cubin)) is not None:
            return compiled._replace(cubin=machine), buffers
    from twin_attention.interop.kernels.cubin import compile_launch, order_parameters

    if code.launch is None:
        step = _planned(code.question).steps[code.step]
        assert isinstance(step, Kernel)
        code = step.code
    compiled = compile_launch(code.launch, code.question.card)
    buffers = arrange_buffers(compiled.parameters, written, zeroed)
    compiled = order_parameters(compiled, buffers)._replace(ptx="", metadata=None)
    digest = sha256(compiled.cubin).digest()
    _save(digest, compiled.cubin)  # which other shapes share
    _save(question, (compiled._replace(cubin=digest), buffers))
    return compiled, buffers


def _planned(question: Question) -> Plan:
    from twin_attention.interop.kernels.torch_host import plan_operation

    found = plan_operation(*question)
    steps = (_named(question, i, step) for i, step in enumerate(found.steps))
    return found._replace(steps=tuple(steps))


def _named(question: Question, number: int, step: Operation | Kernel) -> Operation | Kernel:
    if isinstance(step, Operation):
        return step
    launch, types = step.code
    return step._replace(code=Code(question, number, launch.name, types, launch))


def _without_launch(step: Operation | Kernel) -> Operation | Kernel:
    if isinstance(step, Operation):
        return step
    return step._replace(code=step.code._replace(launch=None))


def _load(question: Any) -> Any:
    return kept.load(question) if _keeps() else None


def _save(question: Any, answer: Any) -> None:
    if _keeps():
        kept.save(question, answer)


def _keeps() -> bool:
    """Return False without a GPU, and where a block changes the tables of configurations."""
    return bool(cuda_devices()) and not requested_configs()
