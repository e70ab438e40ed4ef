"""Records as a run on an H200 could leave them: every suite's kind of case, status and field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from bench.records import Record, Times
from interop.parity.cases import DecodeCase, FlashCase
from twin_attention.contract.cost import (
    backward_bytes,
    backward_flops,
    decode_bytes,
    decode_flops,
    forward_bytes,
    forward_flops,
)

ORIGIN = {
    "device": "NVIDIA H200 (compute capability 9.0)",
    "versions": {"python": "3.12.3", "torch": "2.11.0", "jax": "0.11.2", "triton": "3.6.0"},
    "commit": "0123456789ab",
    "date": "2026-11-21T11:00:00+00:00",
}
COST = {"forward": (forward_flops, forward_bytes), "backward": (backward_flops, backward_bytes)}
# Share of the measured product that each reaches on long sequences, and of the measured read.
FLASH = {
    ("torch triton", "sm90"): 0.62, ("torch triton", "sm80"): 0.40, ("jax triton", "sm90"): 0.63,
    ("jax triton", "sm80"): 0.38, ("torch triton compiled", "sm90"): 0.615, ("eager", None): 0.06,
    ("FA2", None): 0.44, ("cuDNN", None): 0.78, ("FlexAttention", None): 0.60,
    ("jax.nn XLA", None): 0.07, ("jax.nn cuDNN", None): 0.75, ("jax Pallas mha", None): 0.5,
    ("tokamax Mosaic", None): 0.76, ("tokamax Triton", None): 0.41,
}  # fmt: skip
DECODE = {
    ("torch triton", "sm90"): 0.95, ("jax triton", "sm90"): 0.94,
    ("torch triton graph", "sm90"): 0.96, ("FlashInfer", None): 0.85,
    ("FA2 dense", None): 0.83, ("cuDNN dense", None): 0.93,
}  # fmt: skip
MATMUL, READ = 787e12, 4.18e12


def campaign(seed: int = 0) -> list[Record]:
    """Records of the suites flash, kvcache and eager."""
    rng = np.random.default_rng(seed)
    return [*_flash(rng), *_kvcache(rng), *_eager(rng)]


def _flash(rng: np.random.Generator) -> Iterator[Record]:
    yield from _peaks("flash")
    for d, heads in ((64, 32), (128, 16), (256, 8)):
        for batch, length in ((32, 512), (4, 4096), (1, 16384)):
            for causal in (False, True):
                name = f"{batch}x{length}-d{d}" + "-causal" * causal
                case = FlashCase(name, batch, length, length, heads, heads, d, causal=causal)
                for operation in COST:
                    yield from _of_flash("flash", case, operation, FLASH, rng)


def _kvcache(rng: np.random.Generator) -> Iterator[Record]:
    yield from _peaks("kvcache")
    sweep = [DecodeCase(f"sweep-{n}", (n,), 1, 32, 32, 128, dtype="float16", page_size=256,
                        max_pages=-(-n // 256)) for n in (2**i for i in range(5, 16))]  # fmt: skip
    wide = [replace(c, name=f"{c.name}-wide", max_pages=4096) for c in sweep]
    batches = [
        DecodeCase(f"{b}x{n}", (n,) * b, 1, hq, hkv, 128, dtype="float16", max_pages=n // 16)
        for b, n, hq, hkv in ((1, 32768, 32, 8), (64, 8192, 32, 8), (256, 2048, 64, 8))
    ]
    for case in sweep + wide + batches:
        spec, total = case.spec, decode_bytes(case.spec, case.lengths)
        for subject, share in DECODE.items():
            if case in wide and subject[1] is None:
                continue
            ms = (total / READ / share) * 1e3 + 0.009 * rng.uniform(0.8, 1.3)
            yield _timed("kvcache", asdict(case), "decode", subject, ms, rng, reads=total - 8192,
                         writes=8192, tflops=decode_flops(spec, case.lengths) / ms / 1e9,
                         bytes_per_second=1e3 * total / ms)  # fmt: skip


def _eager(rng: np.random.Generator) -> Iterator[Record]:
    yield from _peaks("eager")
    subjects = {
        key: FLASH[key]
        for key in (("torch triton", "sm90"), ("jax triton", "sm90"), ("eager", None))
    }
    for dtype in ("bfloat16", "float32"):
        for length in (2**i for i in range(7, 16)):
            case = FlashCase(f"{length}-d64-{dtype}", 1, length, length, 1, 1, 64, dtype=dtype,
                             causal=True)  # fmt: skip
            yield from _of_flash("eager", case, "forward", subjects, rng)


def _of_flash(suite, case, operation, subjects, rng) -> Iterator[Record]:
    flops, traffic = (count(case.spec) for count in COST[operation])
    for subject, share in subjects.items():
        unmeasured = _unmeasured(case, operation, subject[0])
        if unmeasured:
            yield Record(suite, asdict(case), operation, *subject, **ORIGIN, **unmeasured)
            continue
        share *= 0.85 if operation == "backward" else 1
        ms = 1e3 * flops / MATMUL / (share * rng.uniform(0.9, 1.1)) + 0.012
        yield _timed(suite, asdict(case), operation, subject, ms, rng, tflops=flops / ms / 1e9,
                     bytes_per_second=1e3 * traffic / ms)  # fmt: skip


def _unmeasured(case: FlashCase, operation: str, name: str) -> dict[str, Any] | None:
    if name in ("eager", "jax.nn XLA") and case.seq_q >= 16384:
        message = "OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 GiB"
        return {"status": "out of memory", "message": message}
    if name == "tokamax Triton" and operation == "backward":
        return {"status": "absent", "message": "it has no backward <here> | at all"}
    if name == "jax Pallas mha" and case.head_dim == 256 and operation == "backward":
        return {"status": "failed", "message": "XlaRuntimeError: shared memory exhausted"}
    if name == "tokamax Mosaic" and case.head_dim == 256 and case.causal:
        return {"status": "refused by parity", "message": "its error is 12.3 times the budget",
                "error": 12.3}  # fmt: skip
    return None


def _peaks(suite: str) -> Iterator[Record]:
    rng = np.random.default_rng(1)
    for name, flops, size in (("matmul", 2 * 8192**3, 6 * 8192**2), ("read", 0, 2**30),
                              ("copy", 0, 2**31)):  # fmt: skip
        ms = 1e3 * (flops / MATMUL or size / READ)
        yield _timed(suite, {"name": name}, "peak", ("torch", None), ms, rng,
                     tflops=flops / ms / 1e9, bytes_per_second=1e3 * size / ms)  # fmt: skip


def _timed(suite, case, operation, subject, ms, rng, **fields) -> Record:
    def times(median: float, noise: float) -> Times:
        low, high = median * (1 - rng.uniform(0, noise)), median * (1 + rng.uniform(0, noise))
        return Times(median, low, high, 0.995 * low, 1.005 * high)

    watts = 400 + 250 * rng.uniform()
    gpu = {
        "sm_mhz": 1980.0 - 15 * rng.integers(0, 20), "sm_mhz_lowest": 1500.0, "memory_mhz": 3201.0,
        "watts": watts, "watts_highest": watts + 40, "celsius": 61.0,
        "throttle": ["power cap"] if watts > 600 else [],
    }  # fmt: skip
    is_torch = "jax" not in subject[0] and subject[0] != "jax triton"
    return Record(
        suite, case, operation, *subject, **ORIGIN, status="ok", times=times(ms, 0.01),
        span=times(ms + 0.001, 0.01), host=times(0.03, 0.1),
        events=ms * rng.uniform(0.99, 1.02) if is_torch and ms > 0.5 else None,
        kernels=("flash_fwd_kernel",), error=None if operation == "peak" else 0.3,
        memory=2**26 if is_torch else None, gpu=gpu, **fields,
    )  # fmt: skip
