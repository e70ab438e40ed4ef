"""The problem that a row of the tables is tuned on: its kernel's first case that reads it.

New rows need a case here that reaches them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

from twin_attention.contract.paged_spec import LATENT_DIM_MAX, DecodeSpec
from twin_attention.contract.spec import MergeSpec
from twin_attention.interop.parity.cases import BlockSparseCase, DecodeCase, FlashCase, PagedCase
from twin_attention.targets.config import HEAD_DIMS
from twin_attention.targets.kernels import KERNELS, Spec

SOFTCAPS = (None, 30.0)
# Of kinds of flash attention in bfloat16 that have rows of their own.
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "segments": {"segments": "documents"},
    "tree": {"tree": "nested"},
    "terms": {"relative": 128, "alibi": "heads"},
    "dropout": {"causal": False, "dropout_rate": 0.1},
    "block-mask": {"made": BlockSparseCase, "tile_q": 128, "tile_kv": 128, "kept": 0.25},
}

C = TypeVar("C", bound=DecodeCase)
TimedCase = FlashCase | DecodeCase  # or a PagedCase, which is one of these


def cases(kernel: str) -> Iterator[TimedCase]:
    """Return the cases of a tuned kernel, the largest head dimension of a row first."""
    if kernel == "paged_attention":
        return _paged_cases()
    if KERNELS[kernel].function == "paged_decode":
        return _decode_cases(kernel)
    return _flash_cases(gradients=kernel != "flash_fwd")


def reader(kernel: str, spec: Spec) -> Spec:
    """Return the problem that a kernel solves where `spec` runs: `combine` merges a decode."""
    if KERNELS[kernel].spec is MergeSpec and isinstance(spec, DecodeSpec):
        return spec.merge(spec.num_splits or 2)
    return spec


def _flash_cases(gradients: bool) -> Iterator[FlashCase]:
    """Yield causal cases, where tiles with and without a mask count, then full ones.

    A row that a causal case reads is not timed on a later full one.
    """

    def case(
        kind: str, dtype: str, head_dim: int, made: Any = FlashCase, **options: Any
    ) -> FlashCase:
        name = _name(kind, options.get("precision", dtype), head_dim, options.get("softcap"))
        batch = {"tf32": 2, "bfloat16": 4, "float32": 1}[options.get("precision", dtype)]
        heads = 2048 // head_dim
        return made(
            name, batch, 4096, 4096, heads, heads, head_dim, dtype=dtype, gradients=gradients,
            **{"causal": True} | options,
        )  # fmt: skip

    sizes = HEAD_DIMS[::-1]
    yield from (case("flash", "float32", size, precision="tf32") for size in sizes)
    for size in sizes:
        yield from (case("flash", "bfloat16", size, softcap=softcap) for softcap in SOFTCAPS)
        for kind, options in OPTIONS.items():
            yield case(kind, "bfloat16", size, **options)
        yield case("invariant", "bfloat16", size, batch_invariant=size <= 128)
    for size, softcap in product(sizes, SOFTCAPS):
        yield case("flash", "float32", size, softcap=softcap)


def _decode_cases(kernel: str) -> Iterator[DecodeCase]:
    """Yield many sequences for `paged_decode`; for `combine` also short ones with few splits."""
    lengths, kind = ((1024,) * 8, "some") if kernel == "combine" else ((4096,) * 32, "batch")
    base = DecodeCase(
        "", lengths, tokens=1, heads_q=32, heads_kv=8, page_size=16,
        max_pages=lengths[0] // 16, sinks=True,
    )  # fmt: skip
    for dtype in ("bfloat16", "int8"):
        cache = {} if dtype == base.dtype else {"kv_dtype": dtype, "scale_shape": (base.heads_kv,)}
        for head_dim in reversed(HEAD_DIMS):
            for softcap in SOFTCAPS:
                name = _name(kind, dtype, head_dim, softcap)
                yield replace(base, name=name, head_dim=head_dim, softcap=softcap, **cache)
            if kernel == "paged_decode" and head_dim == HEAD_DIMS[-1]:
                yield _latent(base, kind, dtype, cache)
                yield replace(_latent(base, f"{kind}-16-heads", dtype, cache), heads_q=16)
            if kernel == "paged_decode":
                name = _name(kind, dtype, head_dim, None)
                case = replace(base, head_dim=head_dim, **cache)
                yield replace(case, name=f"{name}-16-tokens", tokens=16)
                yield replace(case, name=f"{name}-short", lengths=(256,), max_pages=16)
                crowd = (2048,) * 256 if cache else (4096,) * 64
                yield replace(case, name=f"{name}-crowded", lengths=crowd)
                if not cache and head_dim <= 128:
                    case = replace(case, name=f"{name}-invariant", batch_invariant=True)
                    yield from (case, replace(case, name=f"{case.name}-16-tokens", tokens=16))


def _paged_cases() -> Iterator[PagedCase]:
    base = PagedCase(
        "", (4096,) * 8, new_tokens=(512,) * 8, heads_q=32, heads_kv=8, page_size=16, max_pages=256,
        sinks=True,
    )  # fmt: skip
    for dtype in ("bfloat16", "int8"):
        cache = {} if dtype == base.dtype else {"kv_dtype": dtype, "scale_shape": (base.heads_kv,)}
        for head_dim in reversed(HEAD_DIMS):
            for softcap in SOFTCAPS:
                name = _name("chunks", dtype, head_dim, softcap)
                yield replace(base, name=name, head_dim=head_dim, softcap=softcap, **cache)
            if not cache and head_dim <= 128:
                name = _name("chunks-invariant", dtype, head_dim, None)
                yield replace(base, name=name, head_dim=head_dim, batch_invariant=True)
        yield _latent(base, "chunks", dtype, cache)


def _latent(base: C, kind: str, dtype: str, cache: dict[str, Any]) -> C:
    sizes = {"head_dim": LATENT_DIM_MAX, "head_dim_v": 512, "heads_q": 128, "heads_kv": 1}
    scales = {"scale_shape": (1,)} if cache else {}
    name = _name(f"{kind}-latent", dtype, LATENT_DIM_MAX, None)
    return replace(base, name=name, latent=True, **sizes, **cache | scales)


def _name(kind: str, dtype: str, head_dim: int, softcap: float | None) -> str:
    return f"tune-{kind}-{dtype}-d{head_dim}" + ("" if softcap is None else "-softcap")
