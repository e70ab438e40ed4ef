from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from bench.records import Record, Times
from twin_attention.interop.parity.cases import FlashCase

ORIGIN = {
    "suite": "flash",
    "device": "Fake GPU (compute capability 9.0)",
    "versions": {"torch": "2.0"},
    "commit": "0123456789ab",
    "date": "2026-11-21T06:59:31+00:00",
}


def raises(error: Exception) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        raise error

    return function


@pytest.fixture
def origin() -> dict[str, Any]:
    return ORIGIN


@pytest.fixture
def record() -> Callable[..., Record]:
    """With that many keys: 2 ms and 100 TFLOP/s unless a field differs."""

    def make(keys: int = 1024, **fields: Any) -> Record:
        case = asdict(FlashCase(f"keys-{keys}", seq_q=keys, seq_kv=keys, window_size=(48, 16)))
        defaults = {"operation": "forward", "implementation": "torch triton", "target": "sm90"}
        if fields.get("status", "ok") == "ok":
            defaults |= {"status": "ok", "times": Times(2.0, 1.9, 2.1), "tflops": 100.0}
        return Record(case=case, **ORIGIN | defaults | fields)

    return make
