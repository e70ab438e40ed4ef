"""Run the explicit Gluon kernels of SM90 on a CPU: their own source, in plain Python.

Gluon has no interpreter. Here a kernel's functions are rebuilt over globals in which the language's
functions are the ones of this file, which compute on torch tensors. Layouts are carried as far as
the source reads them; swizzles and registers do not exist.

What is kept is the order of things. Partitions run in turn, never at the same time, and give way
at each instruction that another one could notice. What the hardware does by itself happens at a
time that a `Mode` chooses: TMA loads write shared memory, products and TMA stores read it. A kernel
is right if it is right in all of them. Errors are raised for:

- a product that is used before a wait has retired it, so a pending count that is too high;
- shared memory written by a partition and read by a product or by TMA without a fence between;
- a barrier that more threads arrive at than it has, or with other counts, or twice in a phase;
- stores and products that nobody waits for;
- partitions that all wait: a deadlock, with what each waits for.

Missing waits show in the results: shared memory is NaN at first, and stale later.

    with interpreted(WRITES_FIRST, programs=3):
        grads = flash_bwd(dout, dlse, operands, out, lse, spec, Backend(family, "sm90"))
"""

from __future__ import annotations

import operator
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from random import Random
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction, JITFunction

from torch_attn import interpreter, launch
from torch_attn.kernels.sm90 import pipeline
from torch_attn.tensor_maps import TensorMap
from twin_attention.targets.target import NUM_SMS

NAMED_BARRIERS = 16  # of a program


class Mode(NamedTuple):
    """When happens what the hardware does by itself; `None` is at random.

    Attributes:
        loads_early: loads write when they are issued, else when nothing else can run.
        reads_early: products and stores read when they are issued, else when they are awaited.
        first: 1 if the first partition that can run goes first, -1 if the last one.
        seed: of what is at random.
    """

    loads_early: bool | None
    reads_early: bool | None
    first: int | None
    seed: int = 0


WRITES_FIRST = Mode(True, False, -1)  # finds what is overwritten while it is read
READS_FIRST = Mode(False, True, 1)  # finds what is read before it is written
EARLY = Mode(True, True, -1)
LATE = Mode(False, False, 1)


def at_random(seed: int) -> Mode:
    """Return a mode that chooses anew each time."""
    return Mode(None, None, None, seed)


class InterpreterError(RuntimeError):
    """A kernel did what no order of events allows."""


class DeadlockError(InterpreterError):
    """All partitions of a program wait."""


def interpret(
    kernel: JITFunction,
    grid: tuple[int, ...],
    mode: Mode = EARLY,
    num_warps: int = 4,
    replace: dict[Any, Any] | None = None,
    **arguments: Any,
) -> None:
    """Run a kernel on CPU tensors, its programs one after the other.

    Args:
        kernel: a `gluon.jit` function.
        grid: the numbers of programs.
        mode: the order of events.
        num_warps: warps of the first partition.
        replace: functions of the kernel, or of the language, and what runs in their place.
        arguments: the kernel's: tensors, Triton's `TensorDescriptor`, numbers, tuples of these.

    Raises:
        InterpreterError: see the list above.
    """
    source = _Source(replace or {})
    names = {p.name: p.is_constexpr for p in kernel.params}
    values = {name: x if names[name] else _argument(x) for name, x in arguments.items()}
    for index in product(*map(range, grid)):
        program = _Program(index, grid, mode, num_warps)
        program.run([(lambda: source.function(kernel.fn)(**values), num_warps)])


@contextmanager
def interpreted(
    mode: Mode, programs: int = 3, replace: dict[Any, Any] | None = None
) -> Iterator[list[str]]:
    """Interpret the kernels that the library launches in the block; operands are on the CPU.

    Args:
        mode: the order of events.
        programs: how many SMs there seem to be, so that a program takes several work items.
        replace: see `interpret`.

    Yields:
        A list that grows by the names of the kernels.
    """
    launched: list[str] = []

    def run(name, kernel, prepare, operands, spec, backend, constants, options):
        config, device = backend.configs(spec)[name], operands[0].device
        layouts = tuple(None if x is None else launch._layout(x) for x in operands)
        call = launch.KernelCall(spec, constants, config, backend.target, device, layouts)
        grid, arguments = prepare(call)
        numbers = {field.upper(): x for field, x in vars(config).items()}
        arguments = dict(zip(kernel.arg_names, operands, strict=False)) | arguments | numbers
        arguments = {field: arguments[field] for field in kernel.arg_names}
        launched.append(name)
        if not isinstance(kernel, GluonJITFunction):
            interpreter.interpreted(kernel)[grid](**arguments)
            return
        for field, x in arguments.items():
            if isinstance(x, TensorMap):
                arguments[field] = x.bind(operands[x.operand])
        warps = options.get("num_warps", config.num_warps)
        interpret(kernel, grid, mode, warps, replace, **arguments)

    with mock.patch.object(launch, "_launch", run), mock.patch.dict(NUM_SMS, sm90=programs):
        yield launched


# Source: a kernel's functions over other globals.


class _Source:
    """Functions of kernels as plain Python functions."""

    def __init__(self, replace: dict[Any, Any]) -> None:
        self._replace = {id(x): other for x, other in replace.items()}
        self._functions: dict[FunctionType, FunctionType] = {}

    def function(self, fn: Any) -> FunctionType:
        """Return a function whose globals are translated."""
        if fn not in self._functions:
            # Names of attributes are among these as well; they do no harm.
            own = fn.__globals__
            names = {x: self.translate(own[x]) for x in fn.__code__.co_names if x in own}
            defaults = tuple(map(_plain, fn.__defaults__ or ()))
            names["__builtins__"] = __builtins__
            plain = FunctionType(fn.__code__, names, fn.__name__, defaults, fn.__closure__)
            plain.__kwdefaults__ = fn.__kwdefaults__
            self._functions[fn] = plain
        return self._functions[fn]

    def translate(self, x: Any) -> Any:
        """Return what stands in a function for a value of its module."""
        if id(x) in self._replace:
            return self._replace[id(x)]
        if id(x) in _FAKES:
            return _FAKES[id(x)]
        if isinstance(x, ConstexprFunction):
            return x
        if isinstance(x, JITFunction):
            return lambda *args, **options: self.function(x.fn)(*args, **options)
        if isinstance(x, ModuleType):
            return _Module(self, x)
        if getattr(x, "__triton_builtin__", False):
            return _unknown(x.__name__)
        return _plain(x)


class _Module:
    """A module whose values are translated."""

    def __init__(self, source: _Source, module: ModuleType) -> None:
        self._source, self._module = source, module

    def __getattr__(self, name: str) -> Any:
        value = self._source.translate(getattr(self._module, name))
        setattr(self, name, value)
        return value


def _unknown(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the interpreter of Gluon has no {name}")

    return refuse


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


def _argument(x: Any) -> Any:
    """Return a runtime argument as a kernel sees it."""
    if isinstance(x, torch.Tensor):
        size = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
        return Pointer(x.as_strided((size,), (1,)), 0)
    if isinstance(x, TensorDescriptor):
        return _Descriptor(x)
    if isinstance(x, tuple):
        items = [_argument(item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    if isinstance(x, float):
        return torch.tensor(x, dtype=torch.float32).item()
    return _scalar(_plain(x))


# Values: numbers, tensors in registers, pointers, descriptors, shared memory.


class Int(int):
    """An integer of a program; division rounds towards zero, as the hardware's does."""

    def to(self, _dtype: Any) -> Int:
        return self

    def __neg__(self) -> Int:
        return Int(-int(self))


def _scalar(x: Any) -> Any:
    return Int(x) if isinstance(x, int) and not isinstance(x, bool) else x


def _divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_INTEGER = {
    "floordiv": _divide,
    "mod": lambda a, b: a - b * _divide(a, b),
    **{n: getattr(operator, n) for n in ("add", "sub", "mul", "and_", "or_", "xor")},
    **{n: getattr(operator, n) for n in ("lshift", "rshift")},
}
_FLOAT = {
    **_INTEGER,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "mod": torch.fmod,
    "truediv": operator.truediv,
}
_COMPARE = {n: getattr(operator, n) for n in ("lt", "le", "gt", "ge", "eq", "ne")}


def _int_operator(function: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def apply(self: int, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        a, b = (int(other), int(self)) if swapped else (int(self), int(other))
        return Int(function(a, b))

    return apply


def _tensor_operator(function: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def apply(self: Tensor, other: Any) -> Any:
        if not isinstance(other, Tensor | int | float):
            return NotImplemented
        a, b = self.values, _values(other)
        return Tensor(function(*((b, a) if swapped else (a, b))), self.layout)

    return apply


def _torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype for Triton's."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "int1": "bool"}
    return getattr(torch, names.get(dtype.name, dtype.name))


def _triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(gl, str(dtype).removeprefix("torch.").replace("bool", "int1"))


class Tensor:
    """A tensor in registers. The result of a product has values when it was waited for."""

    def __init__(
        self, values: torch.Tensor, layout: Any = None, product: _Work | None = None
    ) -> None:
        self.raw, self.layout, self.product = values, layout, product

    @property
    def values(self) -> torch.Tensor:
        if self.product is not None:
            raise InterpreterError("a product is used before it was waited for")
        return self.raw

    @property
    def shape(self) -> list[int]:
        return list(self.raw.shape)

    @property
    def dtype(self) -> Any:
        return _triton_dtype(self.raw.dtype)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.values[index], None)

    def __neg__(self) -> Tensor:
        return Tensor(-self.values, self.layout)

    def __invert__(self) -> Tensor:
        return Tensor(~self.values, self.layout)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        dtype = _torch_dtype(dtype)
        values = self.values
        return Tensor(values.view(dtype) if bitcast else values.to(dtype), self.layout)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


for _name, _function in _FLOAT.items():
    for _swapped in (False, True):
        _method = f"__{'r' if _swapped else ''}{_name.rstrip('_')}__"
        setattr(Tensor, _method, _tensor_operator(_function, _swapped))
        if _name in _INTEGER:
            setattr(Int, _method, _int_operator(_INTEGER[_name], _swapped))
for _name, _function in _COMPARE.items():
    setattr(Tensor, f"__{_name}__", _tensor_operator(_function, False))


def _values(x: Any) -> Any:
    return x.values if isinstance(x, Tensor) else x


class Pointer:
    """Addresses of elements: memory, and one offset or a tensor of them."""

    def __init__(self, memory: torch.Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=_triton_dtype(memory.dtype))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def select(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the offsets and which of them are used, checked."""
        offset = torch.as_tensor(_values(self.offset)).long()
        mask = torch.as_tensor(True if mask is None else _values(mask))
        offset, mask = torch.broadcast_tensors(offset, mask)
        used = offset[mask]
        if used.numel() and (used.min() < 0 or used.max() >= len(self.memory)):
            raise InterpreterError("an address outside its tensor")
        return offset, mask


class _Descriptor:
    """A TMA descriptor."""

    def __init__(self, descriptor: TensorDescriptor) -> None:
        base = descriptor.base
        self.memory = base.as_strided(descriptor.shape, descriptor.strides)
        self.box = tuple(descriptor.block_shape)
        self.dtype = _triton_dtype(base.dtype)

    def views(self, coord: Iterable[int], box: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what exists of a box, in global memory and in the box."""
        if tuple(box.shape) != self.box or box.dtype != self.memory.dtype:
            raise InterpreterError(f"a box of {self.box} for a buffer of {tuple(box.shape)}")
        outside, inside = [], []
        for first, size, end in zip(coord, self.box, self.memory.shape, strict=True):
            begin, stop = (min(max(x, 0), end) for x in (first, first + size))
            outside.append(slice(begin, stop))
            inside.append(slice(begin - first, stop - first))
        return self.memory[tuple(outside)], box[tuple(inside)]


class Shared:
    """A buffer in shared memory, or a view of one.

    `unfenced` has a number for each byte: that of the partition which has written it without a
    fence, counted from 1, else 0.
    """

    def __init__(self, values: torch.Tensor, unfenced: torch.Tensor) -> None:
        self.values, self.unfenced = values, unfenced

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def dtype(self) -> Any:
        return _triton_dtype(self.values.dtype)

    def index(self, i: int) -> Shared:
        if not 0 <= i < len(self.values):
            raise InterpreterError(f"index {i} of {len(self.values)} buffers")
        return Shared(self.values[i], self.unfenced[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(*(x.narrow(dim, start, length) for x in (self.values, self.unfenced)))

    def permute(self, order: Iterable[int]) -> Shared:
        order = tuple(order)
        return Shared(self.values.permute(order), self.unfenced.permute(*order, len(order)))

    def reshape(self, shape: Iterable[int]) -> Shared:
        shape = tuple(shape)
        return Shared(self.values.view(shape), self.unfenced.view(*shape, -1))

    def reinterpret(self, dtype: Any, shape: Iterable[int], _layout: Any) -> Shared:
        """View the same bytes as elements of another shape and dtype."""
        dtype, shape = _torch_dtype(dtype), tuple(shape)
        values = self.values.view(-1).view(dtype).view(shape)
        return Shared(values, self.unfenced.view(*shape, dtype.itemsize))

    def load(self, layout: Any = None) -> Tensor:
        _pause()
        return Tensor(self.values.clone(), layout)

    def store(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise InterpreterError(f"{value.shape} {value.dtype} into {self.shape} {self.dtype}")
        _pause()
        self.values.copy_(value.values)
        self.unfenced.fill_(_now.partition.index + 1)

    def check_fence(self) -> None:
        """Refuse to be read by a product or TMA while what is written is not fenced."""
        if self.unfenced.any():
            raise InterpreterError("shared memory is read by a product or TMA without a fence")


# Programs: partitions, barriers, and what runs by itself.


class _Barrier:
    """An mbarrier."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def update(self, arrivals: int, expected: int) -> None:
        self.missing -= arrivals
        self.bytes += expected
        if self.missing < 0:
            raise InterpreterError(f"more than {self.count} arrivals at an mbarrier in a phase")
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def __repr__(self) -> str:
        return f"phase {self.phase}, {self.missing} arrivals and {self.bytes} bytes missing"


class _NamedBarrier:
    """A named barrier: its threads so far, and how often it was complete."""

    def __init__(self) -> None:
        self.phase = self.threads = 0
        self.arrived: dict[int, int] = {}

    def arrive(self, partition: _Partition, threads: int) -> None:
        if self.arrived and threads != self.threads:
            raise InterpreterError(f"a named barrier of {self.threads} and {threads} threads")
        if partition.index in self.arrived:
            raise InterpreterError(f"partition {partition.index} arrives twice in a phase")
        self.threads = threads
        self.arrived[partition.index] = 32 * partition.warps
        total = sum(self.arrived.values())
        if total > threads:
            raise InterpreterError(f"{total} threads at a named barrier of {threads}")
        if total == threads:
            self.phase, self.arrived = self.phase + 1, {}

    def __repr__(self) -> str:
        return f"phase {self.phase}, arrived {self.arrived} of {self.threads}"


class _Work:
    """Something that the hardware does by itself, once.

    Attributes:
        retired: it was waited for.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self.retired = False

    def finish(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run()


class _Partition:
    """Warps that run one function."""

    def __init__(self, index: int, warps: int) -> None:
        self.index, self.warps = index, warps
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for: Any = None
        self.done = False
        self.products: deque[_Work] = deque()
        self.stores: deque[_Work] = deque()


class _Program:
    """A program: one partition runs at a time."""

    def __init__(self, index: tuple[int, ...], grid: Any, mode: Mode, num_warps: int) -> None:
        self.index, self.grid, self.mode, self.num_warps = index, grid, mode, num_warps
        self.random = Random(f"{index} {mode.seed}")
        self.barriers: dict[int, _Barrier] = {}
        self.named = [_NamedBarrier() for _ in range(NAMED_BARRIERS)]
        self.loads: deque[_Work] = deque()
        self.memory: list[Shared] = []
        self.partitions: list[_Partition] = []
        self.error: BaseException | None = None
        self.finished = threading.Event()

    def run(self, parts: list[tuple[Callable[[], None], int]]) -> None:
        """Run functions with so many warps each as partitions, to their end."""
        before = self.partitions, self.finished
        self.partitions = [_Partition(i, warps) for i, (_, warps) in enumerate(parts)]
        self.finished = threading.Event()
        threads = [
            threading.Thread(target=self._run_partition, args=(partition, function), daemon=True)
            for partition, (function, _) in zip(self.partitions, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._hand_over()
        self.finished.wait()
        for thread in threads:
            thread.join()
        self.partitions, self.finished = before
        if self.error is not None:
            raise self.error
        if self.loads:
            raise InterpreterError("a program ends while TMA loads")

    def _run_partition(self, partition: _Partition, function: Callable[[], None]) -> None:
        _now.program, _now.partition = self, partition
        partition.go.acquire()
        try:
            if self.error is None:
                function()
                for kind in ("products", "stores"):
                    if getattr(partition, kind):
                        raise InterpreterError(f"a partition ends and has not awaited its {kind}")
        except BaseException as error:
            if self.error is None:
                self.error = error
        partition.done = True
        self._hand_over()

    def _hand_over(self) -> None:
        """Let the next partition run, or end."""
        try:
            chosen = None if self.error is not None else self._choose()
        except BaseException as error:
            self.error, chosen = error, None
        if chosen is not None:
            chosen.go.release()
        elif all(x.done for x in self.partitions):
            self.finished.set()
        else:  # an error: let all others end
            next(x for x in self.partitions if not x.done).go.release()

    def pause(self, ready: Callable[[], bool] = lambda: True, waits_for: Any = None) -> None:
        """Let another partition run, if it is its turn, until this one is ready."""
        own = _now.partition
        own.ready, own.waits_for = ready, waits_for
        chosen = self._choose()
        if chosen is not own:
            assert chosen is not None
            chosen.go.release()
            own.go.acquire()
            if self.error is not None:
                raise self.error
        own.waits_for = None

    def _choose(self) -> _Partition | None:
        """Return the partition whose turn it is; None at the end."""
        running = [x for x in self.partitions if not x.done]
        if not running:
            return None
        self._progress()
        while True:
            ready = [x for x in running if x.ready()]
            if ready:
                if self.mode.first is None:
                    return self.random.choice(ready)
                return ready[0 if self.mode.first == 1 else -1]
            if not self.loads:
                raise DeadlockError(f"program {self.index}: all partitions wait\n{self._state()}")
            self._finish_load()

    def _finish_load(self) -> None:
        at = self.random.randrange(len(self.loads)) if self.mode.loads_early is None else 0
        work = self.loads[at]
        del self.loads[at]
        work.finish()

    def _progress(self) -> None:
        """At random, let some of what runs by itself be done."""
        if self.mode.loads_early is None and self.loads and self.random.random() < 0.3:
            self._finish_load()
        if self.mode.reads_early is None:
            for partition in self.partitions:
                for queue in (partition.products, partition.stores):
                    for work in list(queue)[: self.random.randrange(3)]:
                        work.finish()

    def issue(self, queue: deque[_Work], run: Callable[[], None]) -> _Work:
        """Start what reads shared memory by itself."""
        work = _Work(run)
        queue.append(work)
        if self.mode.reads_early:
            work.finish()
        self.pause()
        return work

    def retire(self, queue: deque[_Work], pending: int) -> None:
        """Wait until only so many of a partition's latest are in flight."""
        while len(queue) > pending:
            work = queue.popleft()
            work.finish()
            work.retired = True
        self.pause()

    def barrier(self, place: Shared) -> _Barrier:
        """Return the mbarrier at a place."""
        found = self.barriers.get(place.values.data_ptr())
        if found is None:
            raise InterpreterError("an mbarrier is used that was not initialised")
        return found

    def _state(self) -> str:
        lines = [
            f"partition {x.index}: {'done' if x.done else x.waits_for}" for x in self.partitions
        ]
        lines += [f"named barrier {i}: {x}" for i, x in enumerate(self.named) if x.threads]
        lines += [f"mbarrier {i}: {x}" for i, x in enumerate(self.barriers.values())]
        return "\n".join(lines)


class _Now(threading.local):
    """The program and the partition that a thread runs."""

    program: _Program
    partition: _Partition


_now = _Now()


def _pause() -> None:
    _now.program.pause()


# The language.

_FAKES: dict[int, Any] = {}


def _fake(*names: str, of: tuple[Any, ...] = (gl, tl)) -> Callable[[Any], Any]:
    """Put a function in the place of the modules' functions that have a name."""

    def register(function: Any) -> Any:
        for module, name in product(of, names or (function.__name__.strip("_"),)):
            if hasattr(module, name):
                _FAKES[id(getattr(module, name))] = function
        return function

    return register


def _elementwise(function: Callable[..., Any], *args: Any) -> Any:
    """Apply a function of torch's to tensors and numbers; of numbers alone it makes a number."""
    like = next((x for x in args if isinstance(x, Tensor)), None)
    values = [torch.as_tensor(_values(x)) for x in args]
    if like is None:
        return _scalar(function(*values).item())
    dtype = like.raw.dtype
    values = [x if isinstance(a, Tensor) else x.to(dtype) for x, a in zip(values, args, strict=True)]
    return Tensor(function(*values), like.layout)


_fake("static_range")(range)
_fake("range")(range)
_fake("tensor")(Tensor)
_fake("maximum")(lambda a, b, *_, **__: _elementwise(_largest, a, b))
_fake("minimum")(lambda a, b, *_, **__: _elementwise(_smallest, a, b))
_fake("clamp")(lambda x, low, high, *_: Tensor(x.values.clamp(low, high), x.layout))
_fake("exp2")(lambda x: _elementwise(torch.exp2, x))
_fake("log2")(lambda x: _elementwise(torch.log2, x))
_fake("abs")(lambda x: _elementwise(torch.abs, x))
_fake("multiple_of", "max_contiguous")(lambda x, _: x)
_fake("cast")(lambda x, dtype: x.to(dtype) if hasattr(x, "to") else _scalar(x))
_fake("sum")(lambda x, axis: Tensor(x.values.sum(axis)))
_fake("max")(lambda x, axis: Tensor(x.values.amax(axis)))
_fake("num_warps")(lambda: _now.partition.warps)
_fake("program_id")(lambda axis: Int(_now.program.index[axis]))
_fake("num_programs")(lambda axis: Int(_now.program.grid[axis]))
_fake("reshape")(lambda x, shape: Tensor(x.values.reshape(tuple(shape))))
_fake("permute")(lambda x, order: Tensor(x.values.permute(tuple(order))))
_fake("join")(lambda a, b: Tensor(torch.stack((a.values, b.values), -1)))
_fake("split")(lambda x: tuple(Tensor(part) for part in x.values.unbind(-1)))


def _largest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmax(a, b)


def _smallest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmin(a, b)


@_fake()
def static_assert(condition: bool, message: str = "") -> None:
    assert condition, message


@_fake()
def where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return _scalar(a if condition else b)
    tensors = [x for x in (a, b) if isinstance(x, Tensor)]
    values = torch.where(condition.values, _values(a), _values(b))
    return Tensor(values, tensors[0].layout if tensors else condition.layout)


@_fake()
def arange(start: int, end: int, layout: Any = None) -> Tensor:
    return Tensor(torch.arange(start, end, dtype=torch.int32), layout)


@_fake()
def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return Tensor(torch.full(tuple(shape), value, dtype=_torch_dtype(dtype)), layout)


@_fake()
def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype, layout)


@_fake()
def convert_layout(x: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
    return Tensor(x.values, layout)


@_fake()
def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    offset, mask = pointer.select(mask)
    found = pointer.memory[torch.where(mask, offset, 0)]
    found = torch.where(mask, found, torch.as_tensor(other).to(found.dtype))
    return Tensor(found) if found.ndim else _scalar(found.item())


@_fake()
def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, mask = pointer.select(mask)
    values = torch.as_tensor(_values(value)).expand(offset.shape)
    pointer.memory[offset[mask]] = values[mask].to(pointer.memory.dtype)


@_fake()
def atomic_add(pointer: Pointer, value: Tensor, mask: Any = None, **_: Any) -> None:
    _pause()
    offset, mask = pointer.select(mask)
    pointer.memory.index_add_(0, offset[mask], value.values[mask])


def _pack(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = torch.stack((low.values.to(dtype), high.values.to(dtype)), -1)
    return Tensor(pairs.view(torch.int32).squeeze(-1), low.layout)


def _unpack(words: Tensor) -> tuple[Tensor, ...]:
    pairs = words.values.contiguous().unsqueeze(-1).view(torch.int16)
    return tuple(Tensor(x, words.layout) for x in pairs.unbind(-1))


_SEEN = "{ .reg .pred seen; setp.le.s32 seen, $1, $2; selp.f32 $0, $3, 0fFF800000, seen; }"
_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    r"cvt\.rn\.bf16x2\.f32 \$0, \$1, \$2;": lambda a, b: _pack(a, b, torch.bfloat16),
    r"cvt\.rn\.f16x2\.f32 \$0, \$1, \$2;": lambda a, b: _pack(a, b, torch.float16),
    r"mov\.b32 \{\$0, \$1\}, \$2;( //.*)?": _unpack,
    r"rcp\.approx\.ftz\.f32 \$0, \$1;": lambda x: 1.0 / x,
    r"ex2\.approx\.ftz\.f32 \$0, \$1;": lambda x: _elementwise(torch.exp2, x),
    r"tanh\.approx\.f32 \$0, \$1;": lambda x: _elementwise(torch.tanh, x),
    re.escape(_SEEN): lambda x, bound, s: where(x <= bound, s, float("-inf")),
}


@_fake()
def inline_asm_elementwise(asm: str, _constraints: str, args: list[Any], **_: Any) -> Any:
    named = re.fullmatch(r"bar\.(arrive|sync) \$1, (\d+); mov\.u32 \$0, 0;", asm)
    if named:
        return _meet(args[0], int(named[2]), waits=named[1] == "sync")
    for pattern, function in _INSTRUCTIONS.items():
        if re.fullmatch(pattern, asm):
            return function(*args)
    raise NotImplementedError(f"the interpreter of Gluon has no {asm!r}")


def _meet(index: int, threads: int, waits: bool) -> None:
    """Arrive at a named barrier, and wait for all."""
    program = _now.program
    barrier = program.named[index]
    phase = barrier.phase
    barrier.arrive(_now.partition, threads)
    if waits:
        program.pause(lambda: barrier.phase > phase, f"named barrier {index}")
    else:
        program.pause()


@_fake()
def allocate_shared_memory(dtype: Any, shape: Any, _layout: Any, value: Any = None) -> Shared:
    dtype, shape = _torch_dtype(dtype), tuple(shape)
    poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    unfenced = torch.zeros((*shape, dtype.itemsize), dtype=torch.uint8)
    shared = Shared(torch.full(shape, poison, dtype=dtype), unfenced)
    _now.program.memory.append(shared)
    if value is not None:
        shared.store(value)
    return shared


@_fake()
def warp_specialize(parts: Any, worker_warps: Any, _worker_registers: Any = None) -> None:
    program = _now.program
    warps = (program.num_warps, *worker_warps)
    functions = [lambda f=f, args=args: f(*args) for f, args in parts]
    program.run(list(zip(functions, warps, strict=True)))


# TMA, mbarriers and products.


@_fake(of=(hopper,))
def fence_async_shared(cluster: bool = False) -> None:
    own = _now.partition.index + 1
    for buffer in _now.program.memory:
        buffer.unfenced[buffer.unfenced == own] = 0
    _pause()


@_fake("init", of=(hopper.mbarrier,))
def _init(barrier: Shared, count: int) -> None:
    _now.program.barriers[barrier.values.data_ptr()] = _Barrier(count)


@_fake("invalidate", of=(hopper.mbarrier,))
def _invalidate(barrier: Shared) -> None:
    del _now.program.barriers[barrier.values.data_ptr()]


@_fake("expect", of=(hopper.mbarrier,))
def _expect(barrier: Shared, bytes: int, pred: bool = True) -> None:
    if pred:
        _now.program.barrier(barrier).update(1, bytes)
    _pause()


@_fake("arrive", of=(hopper.mbarrier,))
def _arrive(barrier: Shared, *, count: int = 1, pred: bool = True) -> None:
    if pred:
        _now.program.barrier(barrier).update(count, 0)
    _pause()


@_fake("wait", of=(hopper.mbarrier,))
def _wait(barrier: Shared, phase: int, pred: bool = True, deps: Any = ()) -> None:
    if pred:
        found, number = _now.program.barrier(barrier), list(_now.program.barriers)
        index = number.index(barrier.values.data_ptr())
        _now.program.pause(
            lambda: found.phase & 1 != phase & 1, f"mbarrier {index}, a phase of parity {phase}"
        )


@_fake("load_box", of=(pipeline,))
def _load_box(
    descriptor: _Descriptor, coord: Any, barrier: Shared, result: Shared, pred: bool = True
) -> None:
    if not pred:
        return
    program, coord = _now.program, tuple(map(int, coord))
    found = program.barrier(barrier)

    def run() -> None:
        source, target = descriptor.views(coord, result.values)
        result.values.zero_()
        target.copy_(source)
        found.update(0, -result.values.numel() * result.values.itemsize)

    if program.mode.loads_early:
        run()
    else:
        program.loads.append(_Work(run))
    _pause()


def _write_box(descriptor: _Descriptor, coord: Any, source: Shared, add: bool) -> None:
    source.check_fence()
    coord, program = tuple(map(int, coord)), _now.program

    def run() -> None:
        target, box = descriptor.views(coord, source.values)
        target.copy_(target + box if add else box)

    program.issue(_now.partition.stores, run)


@_fake("store_box", of=(pipeline,))
def _store_box(descriptor: _Descriptor, coord: Any, source: Shared) -> None:
    _write_box(descriptor, coord, source, add=False)


@_fake("add_box", of=(pipeline,))
def _add_box(descriptor: _Descriptor, coord: Any, source: Shared) -> None:
    _write_box(descriptor, coord, source, add=True)


@_fake("store_wait", of=(hopper.tma,))
def _store_wait(pendings: int, read_only: bool = True) -> None:
    _now.program.retire(_now.partition.stores, pendings)


@_fake("barrier", of=(pipeline,))
def _barrier() -> None:
    _pause()


_fake("reinterpret", of=(pipeline,))(Shared.reinterpret)


@_fake(of=(hopper,))
def warpgroup_mma(
    a: Any, b: Shared, acc: Tensor, *, use_acc: Any = True, is_async: bool = False, **_: Any
) -> Tensor:
    if (a.shape[0], b.shape[1]) != tuple(acc.shape) or a.shape[1] != b.shape[0]:
        raise InterpreterError(f"a product of {a.shape} and {b.shape} into {acc.shape}")
    for x in (a, b):
        if isinstance(x, Shared):
            x.check_fence()
    left = a.values
    sums = torch.empty_like(acc.raw)

    def run() -> None:
        values = left.float() @ b.values.float()
        sums.copy_(values + acc.raw if use_acc else values)

    work = _now.program.issue(_now.partition.products, run)
    result = Tensor(sums, acc.layout, work)
    return result if is_async else warpgroup_mma_wait(0, (result,))


@_fake(of=(hopper,))
def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    _now.program.retire(_now.partition.products, num_outstanding)
    results = tuple(map(_awaited, deps))
    return results[0] if len(results) == 1 else results


def _awaited(x: Any) -> Any:
    """Return what a wait makes of a tensor that it names: one that may be used."""
    if x.product is None:
        return x
    if not x.product.retired:
        raise InterpreterError("a wait leaves a product pending that it names")
    return Tensor(x.raw, x.layout)
