"""What the device gives at best, measured in the same run as the kernels that are held to it."""

from __future__ import annotations

from typing import Any

from bench.job import Call, Job, Subject

_SIZE = 8192  # of the matrices
_BYTES = 2**30  # of what is read or copied: many times any L2


def ceiling_jobs() -> list[Job]:
    """A bfloat16 product of matrices, a read and a copy, each by torch.

    Their records have the operation "ceiling" and the cases "matmul" (TFLOP/s), "read" and "copy"
    (bytes a second, read and written); no gate checks them.
    """
    square = 2 * _SIZE * _SIZE  # bytes of a matrix
    return [
        _job("matmul", 2 * _SIZE**3, 2 * square, square, _matmul),
        _job("read", 0, _BYTES, 0, _read),
        _job("copy", 0, _BYTES, _BYTES, _copy),
    ]


def _job(name: str, flops: int, reads: int, writes: int, make: Any) -> Job:
    case = {"name": name}
    makers = {Subject("torch"): make}
    return Job(case, "ceiling", flops, reads + writes, lambda: None, makers, None, reads, writes)


def _matmul(_: None) -> Call:
    import torch

    a, b = torch.randn(2, _SIZE, _SIZE, device="cuda").bfloat16()
    return Call(lambda: a @ b, None)


def _read(_: None) -> Call:
    import torch

    x = torch.ones(_BYTES // 4, device="cuda")
    return Call(x.sum, None)


def _copy(_: None) -> Call:
    import torch

    source, target = torch.zeros(2, _BYTES, dtype=torch.int8, device="cuda")
    return Call(lambda: target.copy_(source), None)
