"""The source of a kernel as plain Python functions, over other globals."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from triton.runtime.jit import ConstexprFunction, JITFunction

from tests.torch_attn.gluon_interpreter.language import FAKES, add_box
from tests.torch_attn.gluon_interpreter.values import plain


class Source:
    def __init__(self, replace: dict[Any, Any]) -> None:
        self._replace = {id(x): other for x, other in replace.items()}
        self._functions: dict[FunctionType, FunctionType] = {}

    def function(self, fn: Any) -> FunctionType:
        if fn not in self._functions:
            own = fn.__globals__
            names = {x: self.translate(own[x]) for x in _names(fn.__code__) if x in own}
            defaults = tuple(map(plain, fn.__defaults__ or ()))
            names["__builtins__"] = __builtins__
            new = FunctionType(fn.__code__, names, fn.__name__, defaults, fn.__closure__)
            new.__kwdefaults__ = fn.__kwdefaults__
            self._functions[fn] = new
        return self._functions[fn]

    def translate(self, x: Any) -> Any:
        if id(x) in self._replace:
            return self.function(self._replace[id(x)])
        if id(x) in FAKES:
            return FAKES[id(x)]
        if isinstance(x, ConstexprFunction):
            return x.fn
        if isinstance(x, JITFunction):
            return lambda *args, **options: self.function(x.fn)(*args, **options)
        if isinstance(x, ModuleType):
            return _Module(self, x)
        if getattr(x, "__triton_builtin__", False):
            # The project has an add_box of its own where Triton has none.
            return add_box if x.__name__ == "add_box" else _unknown(x)
        return plain(x)


def _names(code: CodeType) -> set[str]:
    """Return the names in code; those of attributes do no harm."""
    nested = (x for x in code.co_consts if isinstance(x, CodeType))  # a list's, in Python 3.11
    return set(code.co_names).union(*map(_names, nested))


class _Module:
    def __init__(self, source: Source, module: ModuleType) -> None:
        self._source, self._module = source, module

    def __getattr__(self, name: str) -> Any:
        value = self._source.translate(getattr(self._module, name))
        setattr(self, name, value)
        return value


def _unknown(function: Any) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the interpreter of Gluon has no {function.__name__}")

    return refuse
