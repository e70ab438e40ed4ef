from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import triton.language as tl
from array_api_compat import array_namespace
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper

from tests.torch_attn.gluon_interpreter.program import Barrier, InterpreterError, now, pause
from tests.torch_attn.gluon_interpreter.values import (
    Descriptor,
    Int,
    Pointer,
    Shared,
    Tensor,
    add_bits,
    plain,
    scalar,
    torch_dtype,
    values_of,
)
from torch_attn.kernels.explicit import reports, terms, wgmma_terms
from torch_attn.kernels.library import dropout
from torch_attn.kernels.library import terms as library_terms
from twin_attention.contract.dropout import philox
from twin_attention.targets.ptx import any_of_warp, cap_scores, capped_exponentials, rescale
from twin_attention.targets.tanh import CLOSE, CLOSE_LIMIT, NEAR, NEAR_LIMIT

FAKES: dict[int, Any] = {}


def _fake(*names: str, of: tuple[Any, ...] = (gl, tl)) -> Callable[[Any], Any]:

    def register(function: Any) -> Any:
        for module, name in product(of, names or (function.__name__.strip("_"),)):
            if hasattr(module, name):
                FAKES[id(getattr(module, name))] = function
        return function

    return register


def _elementwise(function: Callable[..., Any], *args: Any) -> Any:
    like = next((x for x in args if isinstance(x, Tensor)), None)
    values = [torch.as_tensor(values_of(x)) for x in args]
    if like is None:
        return scalar(function(*values).item())
    dtype = like.raw.dtype
    values = [
        x if isinstance(a, Tensor) else x.to(dtype) for x, a in zip(values, args, strict=True)
    ]
    return Tensor(function(*values), like.layout)


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).to(torch.promote_types(a.dtype, c.dtype))


_fake("static_range")(range)
_fake("range")(range)
_fake("tensor")(Tensor)
_fake("maximum")(lambda a, b: _elementwise(torch.fmax, a, b))
_fake("minimum")(lambda a, b: _elementwise(torch.fmin, a, b))
_fake("clamp")(lambda x, low, high, *_: Tensor(x.values.clamp(low, high), x.layout))
_fake("fma")(lambda a, b, c: _elementwise(_fused, a, b, c))
_fake("exp2")(lambda x: _elementwise(torch.exp2, x))
_fake("log2")(lambda x: _elementwise(torch.log2, x))
_fake("log")(lambda x: _elementwise(torch.log, x))
_fake("abs")(lambda x: _elementwise(torch.abs, x))
_fake("multiple_of", "max_contiguous")(lambda x, _: x)
_fake("cast")(lambda x, dtype, **_: x.to(dtype) if hasattr(x, "to") else scalar(x))
_fake("sum")(lambda x, axis: _tensor_or_scalar(x.values.sum(axis)))
_fake("max")(lambda x, axis: Tensor(x.values.amax(axis)))
_fake("reduce")(
    lambda x, axis, combine: functools.reduce(combine, map(Tensor, x.values.unbind(axis)))
)
_fake("broadcast_to")(lambda x, shape: Tensor(x.values.expand(tuple(shape))))
_fake("full_like")(lambda x, value: Tensor(torch.full_like(x.values, value), x.layout))
_fake("zeros_like")(lambda x: Tensor(torch.zeros_like(x.values), x.layout))
_fake("barrier", "thread_barrier")(lambda *_, **__: pause())
_fake("num_warps")(lambda: now.partition.warps)
_fake("program_id")(lambda axis: Int(now.program.index[axis]))
_fake("num_programs")(lambda axis: Int(now.program.grid[axis]))
_fake("reshape")(lambda x, shape: x.reshape(tuple(shape)))
_fake("expand_dims")(lambda x, axis: Tensor(x.values.unsqueeze(axis)))
_fake("permute")(lambda x, order: Tensor(x.values.permute(tuple(order))))
_fake("join")(lambda a, b: Tensor(torch.stack((a.values, b.values), -1)))
_fake("gather")(lambda x, index, axis: Tensor(x.values.gather(axis, index.values.long()), x.layout))
_fake("split")(lambda x: tuple(Tensor(part) for part in x.values.unbind(-1)))


@_fake("philox", of=(dropout,))
def _philox(*numbers: Any) -> tuple[Tensor, ...]:
    """Return a generator's words as in the contract, in 64 bits."""
    a, b, c, d, *key = (torch.as_tensor(values_of(x)).long() & 0xFFFFFFFF for x in numbers)
    words = philox(array_namespace(a), (a, b, c, d), (key[0], key[1]))
    return tuple(Tensor(x.to(torch.uint32)) for x in torch.broadcast_tensors(*words))


@_fake(of=(library_terms,))
def round_steep(slope: Any) -> Any:
    """`library.terms.round_steep`; an interpreted number has no bits."""
    bits = torch.tensor(float(slope)).view(torch.int32)
    rounded = ((bits + 128) & -256).view(torch.float32).clamp(-(2.0**100), 2.0**100)
    return scalar(rounded.item()) if abs(slope) > library_terms.STEEP.value else slope


@_fake()
def static_assert(condition: bool, message: str = "") -> None:
    assert condition, message


@_fake()
def where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return scalar(a if condition else b)
    tensors = [x for x in (a, b) if isinstance(x, Tensor)]
    values = torch.where(condition.values, values_of(a), values_of(b))
    return Tensor(values, tensors[0].layout if tensors else condition.layout)


@_fake()
def arange(start: int, end: int, layout: Any = None) -> Tensor:
    return Tensor(torch.arange(start, end, dtype=torch.int32), layout)


@_fake()
def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return Tensor(torch.full(tuple(shape), value, dtype=torch_dtype(dtype)), layout)


@_fake()
def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype, layout)


@_fake()
def convert_layout(x: Any, layout: Any, assert_trivial: bool = False) -> Any:
    return x if isinstance(x, Pointer) else Tensor(x.values, layout)


@_fake()
def load(pointer: Pointer, mask: Any = None, other: Any = 0, volatile: bool = False) -> Any:
    return _tensor_or_scalar(pointer.read(mask, other))


def _tensor_or_scalar(x: torch.Tensor) -> Any:
    return Tensor(x) if x.ndim else scalar(x.item())


@_fake()
def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, mask = pointer.select(mask)
    values = torch.as_tensor(values_of(value)).expand(offset.shape)
    pointer.memory[offset[mask]] = values[mask].to(pointer.memory.dtype)


@_fake()
def atomic_add(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> Any:
    pause()
    before = load(pointer, mask)
    offset, mask = pointer.select(mask)
    values = torch.as_tensor(values_of(value), dtype=pointer.memory.dtype).expand(offset.shape)
    pointer.memory.index_add_(0, offset[mask], values[mask])
    return before


def _pack(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = torch.stack((low.values.to(dtype), high.values.to(dtype)), -1)
    return Tensor(pairs.view(torch.int32).squeeze(-1), low.layout)


def _unpack(words: Tensor) -> tuple[Tensor, ...]:
    pairs = words.values.contiguous().unsqueeze(-1).view(torch.int16)
    return tuple(Tensor(x, words.layout) for x in pairs.unbind(-1))


def _cap(s: Tensor, a: Any, b: Any, exact: bool, close: bool = False) -> Tensor:
    """`ptx.cap_scores`, each score for itself."""
    coefficients, limit = (CLOSE, CLOSE_LIMIT) if exact or close else (NEAR, NEAR_LIMIT)

    def cap(s: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        x = s * a
        near = functools.reduce(lambda y, c: x * x * y + c, reversed(coefficients)) * x * b
        far = x.tanh() * b if exact else b - 2 * b / ((2 * x).exp() + 1)
        return torch.where(x.abs() <= limit, near, far)

    return _elementwise(cap, s, a, b)


def _exponentials(first: Tensor, second: Tensor, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """`ptx.capped_exponentials`; a thread has every fourth pair of a row."""
    low, high = (_elementwise(torch.exp2, _cap(s, a, b, exact=False)) for s in (first, second))
    fours = (low.values + high.values).unflatten(1, (-1, 4))
    sums = fours.sum(1, keepdim=True).expand_as(fours).flatten(1)
    return _pack(high, low, torch.bfloat16), Tensor(sums, low.layout)


def _compare_words(*args: Any, halves: int) -> Tensor:
    """`terms.compare_words` in 64 bits: torch computes with no words."""
    *words, threshold, shift = (torch.as_tensor(values_of(x)).long() for x in args)
    lower = [((x << shift) & 0xFFFFFFFF) >= threshold for x in words]
    upper = [x >= threshold for x in words] if halves == 2 else []
    bits = (x.int() << i for i, x in enumerate([*lower, *upper]))
    return Tensor(functools.reduce(operator.or_, bits), args[0].layout)


def _report(count: Pointer) -> None:
    now.program.retire(now.partition.stores, 0)
    count.memory[int(count.offset)] += 1
    pause()


def _report_read(count: Pointer) -> None:
    count.memory[int(count.offset)] += 1
    pause()


def _await_reports(count: Pointer, reports: int) -> None:
    now.program.pause(lambda: int(count.memory[int(count.offset)]) >= reports, "reports")


def _keep(kept: Tensor, bit: Tensor, x: Tensor) -> Any:
    return where(Tensor(kept.values & bit.values != 0), x, 0.0)


def _mask_words(*args: Any) -> tuple[Tensor, ...]:
    """`wgmma_terms.MASK_WORDS`, in 64 bits."""
    *words, threshold, _opposite = (torch.as_tensor(values_of(x)).long() for x in args)
    found = []
    for first, following in zip(words[::2], words[1::2], strict=True):
        for shift in (0, 16):
            low, high = ((x >> shift) & 0xFFFF >= threshold & 0xFFFF for x in (first, following))
            mask = low * 0xFFFF + high * 0xFFFF0000
            found.append(Tensor(mask.to(torch.uint32).view(torch.int32), args[0].layout))
    return tuple(found)


_SEEN = "{ .reg .pred seen; setp.%s.s32 seen, $1, $2; selp.f32 $0, $3, 0fFF800000, seen; }"

_COMPARISONS = {"le": operator.le, "lt": operator.lt, "eq": operator.eq}


def _where(a: Any, b: Any, s: Any, compare: Callable[..., Any]) -> Any:
    return where(compare(a, b), s, float("-inf"))


_INSTRUCTIONS: dict[str, Callable[..., Any]] = (
    {
        r"cvt\.rn\.bf16x2\.f32 \$0, \$1, \$2;": lambda a, b: _pack(a, b, torch.bfloat16),
        r"cvt\.rn\.f16x2\.f32 \$0, \$1, \$2;": lambda a, b: _pack(a, b, torch.float16),
        r"mov\.b32 \{\$0, \$1\}, \$2;( //.*)?": _unpack,
        r"rcp\.approx\.ftz\.f32 \$0, \$1;": lambda x: 1.0 / x,
        r"ex2\.approx\.ftz\.f32 \$0, \$1;": lambda x: _elementwise(torch.exp2, x),
        r"tanh\.approx\.f32 \$0, \$1;": lambda x: _elementwise(torch.tanh, x),
    }
    | {
        re.escape(_SEEN % name): functools.partial(_where, compare=compare)
        for name, compare in _COMPARISONS.items()
    }
    | {
        re.escape(cap_scores(count, **kind)): functools.partial(_cap, **kind)
        for count, kind in product(
            (16, 32, 64), ({"exact": False}, {"exact": False, "close": True}, {"exact": True})
        )
    }
)
_INSTRUCTIONS[r"cp\.async\.bulk\.prefetch\.L2\.global \[\$1\], \d+; mov\.u32 \$0, 0;"] = lambda _: (
    None
)
_INSTRUCTIONS[re.escape(plain(terms.KEEP))] = _keep
_INSTRUCTIONS[r"bar\.warp\.sync 0xffffffff; mov\.u32 \$0, \$1;"] = lambda _: pause()
_INSTRUCTIONS[re.escape(plain(reports.REPORT))] = _report
_INSTRUCTIONS[re.escape(plain(reports.REPORT_READ))] = _report_read
_INSTRUCTIONS[re.escape(plain(reports.AWAIT_REPORTS))] = _await_reports
_INSTRUCTIONS[re.escape(plain(wgmma_terms.MASK_WORDS))] = _mask_words
_INSTRUCTIONS[re.escape(plain(terms.WIDEN))] = lambda x: x.to(gl.float32)
_INSTRUCTIONS |= {
    re.escape(terms.compare_words(halves)): functools.partial(_compare_words, halves=halves)
    for halves in (1, 2)
}
_INSTRUCTIONS |= {re.escape(capped_exponentials(count)): _exponentials for count in (8, 16, 32)}
# Each row by itself: where a factor is 1, multiplying changes nothing.
_INSTRUCTIONS[re.escape(any_of_warp(2))] = lambda factor: factor != 1.0
_INSTRUCTIONS |= {
    re.escape(rescale(count)): lambda x, factor, changes: where(changes, x * factor, x)
    for count in (8, 16, 32, 64, 128)
}


def _show(asm: str, args: Any) -> Any:
    """Interpret the instructions of `query_ranges.show_code`."""
    found: dict[str, Any] = {
        f"${i}": x if isinstance(x, Pointer) else torch.as_tensor(values_of(x)).long()
        for i, x in enumerate(args, 1)
    }
    for line in asm.strip("{ }").split("; ")[3:-1]:
        operation, *names = re.findall(r"@?[\w$.]+", line)
        a, b, *more = [found.get(x, 0) for x in names[1:]] + [0, 0]
        if operation == "@within":
            (rows, pointer), *names = found[names[-1]], *names[1:-1]
            for i, name in enumerate(names):
                place = pointer + (Tensor(rows) * len(names) + i)
                found[name] = place.read(Tensor(found["within"]), 0).long()
        elif operation == "mad.wide.s32":
            found[names[0]] = a, more[0]
        elif operation == "sub.s32":
            found[names[0]] = (a - b) % 2**32
        elif operation == "or.pred":
            found[names[0]] = a | b
        elif operation.startswith("setp"):
            _, compare, *combined, kind = operation.split(".")
            found[names[0]] = _COMPARISONS[compare](a, b % 2**32 if kind == "u32" else b)
            if combined:
                combine = getattr(operator, f"{combined[0]}_")
                found[names[0]] = combine(found[names[0]], more[0])
    return where(Tensor(found["seen"], args[0].layout), args[0], float("-inf"))


@_fake()
def inline_asm_elementwise(asm: str, _constraints: str, args: list[Any], **_: Any) -> Any:
    named = re.fullmatch(r"bar\.(arrive|sync) \$1, (\d+); mov\.u32 \$0, 0;", asm)
    if named:
        return _meet(args[0], int(named[2]), waits=named[1] == "sync")
    if slots := re.findall(r"@here bar\.arrive (\d+), (\d+);", asm):
        return _meet(*map(int, slots[args[0]]), waits=False)
    if ".reg .b32 bound0" in asm:
        return _show(asm, args)
    for pattern, function in _INSTRUCTIONS.items():
        if re.fullmatch(pattern, asm):
            return function(*args)
    raise NotImplementedError(f"the interpreter of Gluon has no {asm!r}")


def _meet(index: int, threads: int, waits: bool) -> None:
    program = now.program
    barrier = program.named[index]
    phase = barrier.phase
    if met := barrier.arrive(now.partition, threads, waits):
        add_bits(program.bits, *met)
    if waits:
        program.pause(lambda: barrier.phase > phase, barrier)
    else:
        program.pause()


@_fake()
def allocate_shared_memory(dtype: Any, shape: Any, _layout: Any, value: Any = None) -> Shared:
    dtype, shape = torch_dtype(dtype), tuple(shape)
    poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    values = torch.full(shape, poison, dtype=dtype)
    shared = Shared(values, now.program.allocate(values.nbytes).view(2, *shape, dtype.itemsize))
    if value is not None:
        shared.store(value)
    return shared


@_fake()
def warp_specialize(parts: Any, worker_warps: Any, _worker_registers: Any = None) -> None:
    program = now.program
    warps = (program.num_warps, *worker_warps)
    functions = [lambda f=f, args=args: f(*args) for f, args in parts]
    program.bits[1].zero_()
    program.run(list(zip(functions, warps, strict=True)))


# SM80: cp.async and mma.sync.


@_fake("async_load", "async_copy_global_to_shared", of=(ampere.async_copy,))
def _copy_async(result: Shared, pointer: Pointer, mask: Any = None) -> None:
    if result.shape != pointer.shape:
        raise InterpreterError(f"a copy of {pointer.shape} into {result.shape}")
    own = now.partition.bit

    def run() -> None:
        result.values.copy_(pointer.read(mask, 0))
        result.unfenced.fill_(own)

    now.program.copy(run)


_fake("commit_group", of=(ampere.async_copy,))(lambda: now.program.commit())


@_fake(of=(ampere.async_copy,))
def wait_group(num_outstanding: int = 0) -> None:
    now.program.wait_group(num_outstanding)


@_fake(of=(ampere,))
def mma_v2(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    _check_product(a, b, acc)
    for i, x in enumerate((a, b)):
        if x.layout != gl.DotOperandLayout(i, acc.layout, 2):
            raise InterpreterError(f"operand {i} of a product has the layout {x.layout}")
    return Tensor(a.values.float() @ b.values.float() + acc.values, acc.layout)


def _check_product(a: Any, b: Any, acc: Tensor) -> None:
    if [a.shape[0], b.shape[1]] != acc.shape or a.shape[1] != b.shape[0]:
        raise InterpreterError(f"a product of {a.shape} and {b.shape} into {acc.shape}")


# SM90: TMA, mbarriers and wgmma.


@_fake(of=(hopper,))
def fence_async_shared(cluster: bool = False) -> None:
    own = now.partition.bit
    unfenced, _ = now.program.bits
    unfenced.mul_((unfenced & own).eq_(0))
    pause()


@_fake("init", of=(hopper.mbarrier,))
def _init(barrier: Shared, count: int) -> None:
    now.program.barriers[barrier.values.data_ptr()] = Barrier(count)
    barrier.unfenced.fill_(now.partition.bit)


@_fake("invalidate", of=(hopper.mbarrier,))
def _invalidate(barrier: Shared) -> None:
    del now.program.barriers[barrier.values.data_ptr()]


@_fake("expect", of=(hopper.mbarrier,))
def _expect(barrier: Shared, bytes: int, pred: bool = True) -> None:
    if pred:
        now.program.barrier(barrier).update(1, bytes, now.partition)
    pause()


@_fake("arrive", of=(hopper.mbarrier,))
def _arrive(barrier: Shared, *, count: int = 1, pred: bool = True) -> None:
    if pred:
        now.program.barrier(barrier).update(count, 0, now.partition)
    pause()


@_fake("wait", of=(hopper.mbarrier,))
def _wait(barrier: Shared, phase: int, pred: bool = True, deps: Any = ()) -> None:
    if pred:
        found = now.program.barrier(barrier)
        now.program.pause(lambda: found.phase & 1 != phase & 1, found)
        add_bits(now.program.bits[1], found.met, now.partition.bit)


@_fake("async_load", "async_copy_global_to_shared", of=(hopper.tma,))
def _load_box(
    descriptor: Descriptor, coord: Any, barrier: Shared, result: Shared, pred: bool = True
) -> None:
    if not pred:
        return
    program, coord = now.program, tuple(map(int, coord))
    found = program.barrier(barrier)
    barrier.check_fence()

    def run() -> None:
        source, target = descriptor.views(coord, result.values)
        result.values.zero_()
        target.copy_(source)
        result.known.zero_()
        found.update(0, -result.values.numel() * result.values.itemsize)

    program.load(run, found)


def _write_box(descriptor: Descriptor, coord: Any, source: Shared, add: bool) -> None:
    source.check_fence()
    coord, program = tuple(map(int, coord)), now.program

    def run() -> None:
        target, box = descriptor.views(coord, source.values)
        target.copy_(target + box if add else box)

    program.issue(now.partition.stores, run)


@_fake("async_store", "async_copy_shared_to_global", of=(hopper.tma,))
def _store_box(descriptor: Descriptor, coord: Any, source: Shared) -> None:
    _write_box(descriptor, coord, source, add=False)


@_fake("async_atomic_add", of=(hopper.tma,))
def add_box(descriptor: Descriptor, coord: Any, source: Shared) -> None:
    _write_box(descriptor, coord, source, add=True)


@_fake("store_wait", of=(hopper.tma,))
def _store_wait(pendings: int, read_only: bool = True) -> None:
    now.program.retire(now.partition.stores, pendings)


_fake("reinterpret", "_reinterpret", of=(gl.shared_memory_descriptor,))(Shared.reinterpret)


@_fake(of=(hopper,))
def warpgroup_mma(
    a: Any, b: Shared, acc: Tensor, *, use_acc: Any = True, is_async: bool = False, **_: Any
) -> Tensor:
    _check_product(a, b, acc)
    for x in (a, b):
        if isinstance(x, Shared):
            x.check_fence()
    left = a.values
    sums = torch.empty_like(acc.raw)

    def run() -> None:
        values = left.float() @ b.values.float()
        sums.copy_(values + acc.raw if use_acc else values)

    work = now.program.issue(now.partition.products, run)
    result = Tensor(sums, acc.layout, work)
    return result if is_async else warpgroup_mma_wait(0, (result,))


@_fake(of=(hopper,))
def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    now.program.retire(now.partition.products, num_outstanding)
    results = tuple(map(_awaited, deps))
    return results[0] if len(results) == 1 else results


def _awaited(x: Any) -> Any:
    if x.product is None:
        return x
    if not x.product.retired:
        raise InterpreterError("a wait leaves a product pending that it names")
    return Tensor(x.raw, x.layout)
