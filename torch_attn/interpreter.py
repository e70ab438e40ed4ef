"""Run a Triton kernel on CPU tensors, in the process that compiles it for CUDA tensors.

Unlike with ``TRITON_INTERPRET=1``, `triton.language` works on NumPy arrays during a launch only.

It uses the private ``triton.runtime.interpreter``. If a name is missing, this import fails, and
"triton" does not run on a CPU. Checked with Triton 3.6 and 3.9
(``tests/torch_attn/test_interpreter.py``):

- `_patch_lang` installs a builder in `triton.language` and returns the scope that undoes it. It is
  called once a launch, since it is slow.
- `FunctionRewriter` turns a kernel's source into a Python function, `_implicit_cvt` arguments into
  the interpreter's tensors.
- `InterpreterBuilder` and `_get_np_dtype` compute on bfloat16's bits as uint16, silently wrong.
  `_Builder` holds `ml_dtypes.bfloat16`.
- `create_splat` takes a comparison of scalars for int32 in Triton 3.9, which a mask must not be.
- `_implicit_cvt` imports Gluon, which wraps the functions of `triton.language`. If they are patched
  then, no Gluon kernel compiles later.
- `create_dot` always multiplies in IEEE precision, and NumPy's BLAS rounds a row by its place.
  `_Builder` gives it operands in TF32, a row at a time.
- `_Builder` turns off the slow integer overflow check, which does nothing without `debug`.
- ``block_type`` and ``tensor`` compute the same sizes anew, which took a third of a launch.
- The checks of an operation's operands took another third; `_Semantic` leaves most of them out.
- ``tensor.__index__`` calls ``int`` on an array of one element in Triton 3.6; NumPy 2.4 refuses it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache, update_wrapper
from operator import attrgetter
from types import FunctionType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import FunctionRewriter, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

with suppress(ImportError):  # see above; a Triton without Gluon has nothing to protect
    import triton.experimental.gluon.language  # noqa: F401

NAMES = (
    "FunctionRewriter.rewrite_ast", "InterpreterBuilder.cast_impl", "InterpreterBuilder.create_dot",
    "InterpreterBuilder.create_fp_to_fp", "InterpreterBuilder.create_masked_load",
    "InterpreterBuilder.create_masked_store", "InterpreterBuilder.set_grid_dim",
    "InterpreterBuilder.set_grid_idx", "_LangPatchScope.restore", "_LangPatchScope.set_attr",
    "TritonSemantic.binary_op_type_checking_impl", "_get_np_dtype", "_implicit_cvt",
    "_ir.INPUT_PRECISION.TF32", "_patch_lang", "interpreter_builder", "interpreter_semantic",
)  # fmt: skip
attrgetter(*NAMES)(interpreter)  # a missing one raises AttributeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_lock = threading.Lock()
_triton_np_dtype = interpreter._get_np_dtype


def interpreted(kernel: JITFunction) -> Interpreted:
    """Return a `@triton.jit` kernel that runs on CPU tensors; it ignores launch options.

    Meanwhile no other thread can launch or compile a Triton kernel.
    """
    if not isinstance(kernel, JITFunction):
        raise RuntimeError("unset TRITON_INTERPRET: CPU tensors run in the interpreter without it")
    return Interpreted(kernel)


class Interpreted:
    """A kernel waiting for its grid; see `interpreted`."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            signature = self.kernel.signature
            kwargs = {name: x for name, x in kwargs.items() if name in signature.parameters}
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            with _lock, _patched_language(), np.errstate(all="ignore"):
                arguments = {
                    param.name: x if param.is_constexpr else _as_argument(x)
                    for param, x in zip(self.kernel.params, bound.arguments.values(), strict=True)
                }
                function = _python_function(self.kernel.fn)
                shape = (*grid, *(1,) * (3 - len(grid)))
                _builder.set_grid_dim(*shape)
                for index in np.ndindex(shape):
                    _builder.set_grid_idx(*index)
                    function(**arguments)

        return launch


class _Builder(InterpreterBuilder):
    """Triton's interpreter, with bfloat16 and bool arrays that keep their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.options = replace(self.options, sanitize_overflow=False)

    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(np.array([value], dtype=BFLOAT16), tl.bfloat16)

    def create_splat(self, ret_ty, arg) -> TensorHandle:
        data = np.full(ret_ty.shape, np.ravel(arg.data)[0], dtype=arg.data.dtype)
        return TensorHandle(data, arg.dtype.scalar)

    def create_masked_load(self, ptrs, mask, other, *hints) -> TensorHandle:
        if ptrs.get_element_ty() != tl.bfloat16:
            return super().create_masked_load(ptrs, mask, other, *hints)
        ptrs = TensorHandle(ptrs.data, tl.pointer_type(tl.uint16))
        other = None if other is None else _bits(other)
        bits = super().create_masked_load(ptrs, mask, other, *hints)
        return TensorHandle(bits.data.view(BFLOAT16), tl.bfloat16)

    def create_masked_store(self, ptrs, value, mask, *hints) -> None:
        value = _bits(value) if value.data.dtype == BFLOAT16 else value
        super().create_masked_store(ptrs, value, mask, *hints)

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return TensorHandle(src.data.astype(_np_dtype(dst_type)), dst_type.scalar)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding: Any) -> TensorHandle:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc) -> TensorHandle:
        if input_precision == interpreter._ir.INPUT_PRECISION.TF32:
            a, b = map(_as_tf32, (a, b))
        # For speed: bfloat16 cast inside the product is slow.
        a, b = (self.cast_impl(x, tl.float32) if x.data.dtype == BFLOAT16 else x for x in (a, b))
        # Row by row: as on a GPU, a row's bits depend neither on other rows nor on their number.
        a, b, d = (TensorHandle(np.expand_dims(x.data, axis), x.dtype.scalar)
                   for x, axis in ((a, -2), (b, -3), (d, -2)))  # fmt: skip
        found = super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        return TensorHandle(found.data[..., 0, :], found.dtype.scalar)


class _Semantic(TritonSemantic):
    """Triton's rules of types, without their checks for operands that need none."""

    def binary_op_type_checking_impl(self, lhs, rhs, *rules: bool, **more_rules: bool):
        for tensor, number in ((lhs, rhs), (rhs, lhs)):
            if type(tensor) is not tl.tensor:
                continue
            name = str(tensor.dtype.name)
            if type(number) in _NUMBERS.get(name, ()):
                shape = tuple(getattr(tensor.type, "shape", ()))
                constant = _constant(repr(number), name, shape)  # 0.0 is not -0.0
                return (lhs, constant) if tensor is lhs else (constant, rhs)
        if type(lhs) is type(rhs) is tl.tensor:
            name = str(lhs.dtype.name)
            if name in _NUMBERS and name == rhs.dtype.name:
                is_alike = lhs.shape is rhs.shape
                return (lhs, rhs) if is_alike else self.broadcast_impl_value(lhs, rhs)
        return super().binary_op_type_checking_impl(lhs, rhs, *rules, **more_rules)


_builder = _Builder()
_semantic = _Semantic(_builder)
_NUMBERS = {"int32": (int,), "float32": (int, float)}  # that an operation gives a tensor's type
_triton_init = tl.block_type.__init__
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}


@lru_cache(maxsize=1024)
def _constant(number: str, dtype: str, shape: tuple[int, ...]) -> tl.tensor:
    """Return a tensor of one number; one that int32 does not hold raises OverflowError."""
    data = np.full(shape or 1, float(number) if dtype == "float32" else int(number), dtype)
    data.flags.writeable = False
    scalar = getattr(tl, dtype)
    return tl.tensor(
        TensorHandle(data, scalar), tl.block_type(scalar, [*shape]) if shape else scalar
    )


def _as_tf32(value: TensorHandle) -> TensorHandle:
    """Round a float32 operand as tensor cores do; return others unchanged."""
    if value.data.dtype != np.float32:
        return value
    return TensorHandle((value.data.view(np.int32) & -(1 << 13)).view(np.float32), tl.float32)


def _bits(value: TensorHandle) -> TensorHandle:
    """View bfloat16 as uint16, which the interpreter can move."""
    return TensorHandle(value.data.view(np.uint16), tl.uint16)


def _np_dtype(dtype: tl.dtype) -> np.dtype:
    return BFLOAT16 if dtype.scalar == tl.bfloat16 else _triton_np_dtype(dtype)


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    key = element_ty.name, *(getattr(x, "value", x) for x in shape)
    if key not in _block_types:
        _triton_init(self, element_ty, shape)
        _block_types[key] = vars(self)
    vars(self).update(_block_types[key])


def _init_tensor(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _sizes_of(tuple(getattr(type, "shape", ())))


@cache
def _sizes_of(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([*map(tl.constexpr, shape)]), tl.constexpr(math.prod(shape))


@contextmanager
def _patched_language() -> Iterator[None]:
    """Make `triton.language` compute on NumPy arrays inside the block."""
    modules = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    patches = interpreter._LangPatchScope()
    patches.set_attr(interpreter, "interpreter_builder", _builder)
    patches.set_attr(interpreter, "interpreter_semantic", _semantic)
    patches.set_attr(interpreter, "_get_np_dtype", _np_dtype)
    patches.set_attr(JITFunction, "__call__", _call_helper)
    patches.set_attr(tl.block_type, "__init__", _init_block_type)
    patches.set_attr(tl.tensor, "__init__", _init_tensor)
    language = interpreter._patch_lang(modules)
    language.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    try:
        yield
    finally:
        language.restore()
        patches.restore()


def _call_helper(helper: JITFunction, *args: Any, **kwargs: Any) -> Any:
    return _python_function(helper.fn)(*args, **kwargs)


def _as_argument(value: Any) -> Any:
    """Return a runtime argument as a kernel sees it; a float is float32 there."""
    if isinstance(value, tuple):
        items = [x.value if isinstance(x, tl.constexpr) else _as_argument(x) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, float):
        return tl.tensor(TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    return interpreter._implicit_cvt(value)


@cache
def _python_function(original: FunctionType) -> Callable[..., Any]:
    """Return a kernel's source as a Python function over the interpreter's tensors.

    It gets a copy of the module's globals, in which constants lose their `constexpr`: in Triton 3.9
    ``constant * tensor`` would be a constexpr.
    """
    names = {
        name: x.value if isinstance(x, tl.constexpr) else x
        for name, x in original.__globals__.items()
    }
    copy = FunctionType(
        original.__code__,
        {**names, "interpreter_semantic": _semantic},
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    update_wrapper(copy, original)
    del copy.__wrapped__
    return FunctionRewriter(copy).rewrite_ast()
