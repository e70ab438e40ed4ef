"""Calls with one mistake each, and the error that both sides raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest


class Operand(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def of_dtype(dtype: str) -> Callable[..., Operand]:
    return lambda *shape: Operand(shape, dtype)


bf16, f16, f32, f64 = map(of_dtype, ("bfloat16", "float16", "float32", "float64"))
e4m3, e5m2, i8, i32, i64 = map(of_dtype, ("float8_e4m3fn", "float8_e5m2", "int8", "int32", "int64"))
boolean = of_dtype("bool")
LEFT_OUT = Operand((), "")


class Mistake(NamedTuple):
    error: type[Exception]
    message: str
    changes: dict[str, Any]


def mistake(error: type[Exception], message: str, **changes: Any) -> Mistake:
    return Mistake(error, message, changes)


@contextmanager
def refused(error: type[Exception], message: str) -> Iterator[None]:
    with pytest.raises(error) as raised:
        yield
    assert (raised.type, str(raised.value)) == (error, message)
