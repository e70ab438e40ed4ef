"""Raise `Absent` for what a peer does not do."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from bench.job import Absent
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, VarlenCase

HALF = ("float16", "bfloat16")


def load(module: str) -> ModuleType:
    try:
        return import_module(module)
    except (ImportError, RuntimeError) as error:  # FlashInfer's, without a part of CUTLASS's DSL
        raise Absent(f"{module} cannot be imported: {error}") from error


def check_flash(
    case: FlashCase,
    *,
    dtypes: tuple[str, ...] = HALF,
    rectangles: bool = False,
    groups: bool = True,
) -> None:
    """Refuse what an adapter does not pass on to its peer.

    rectangles: its causal mask is aligned to the last query and key, like ours.
    groups: query heads may share a kv head.
    """
    if case.window_size is not None or case.softcap is not None:
        raise Absent("this adapter has neither windows nor capped scores")
    if case.dtype not in dtypes:
        raise Absent(f"takes {' and '.join(dtypes)}, not {case.dtype}")
    if case.causal and case.seq_q != case.seq_kv and not rectangles:
        raise Absent("its causal mask is aligned to the first query and key")
    if case.heads_q != case.heads_kv and not groups:
        raise Absent("no query heads that share a kv head")


def check_packed(case: VarlenCase, dtypes: tuple[str, ...] = HALF) -> None:
    if case.window_size is not None or case.softcap is not None or case.sinks:
        raise Absent("this adapter has neither windows, capped scores nor sinks")
    if case.dtype not in dtypes:
        raise Absent(f"takes {' and '.join(dtypes)}, not {case.dtype}")
    if any(queries != keys for queries, keys in case.lengths) or any(case.padding):
        raise Absent("this adapter has documents of as many queries as keys, without padding")


def check_head_dims(case: FlashCase | VarlenCase, *, same: bool = False) -> None:
    """Refuse head dimensions that FlashAttention-3 and 4 do not take on Hopper.

    They are over 256 or no multiple of 8, or with `same` values of another one.
    """
    head_dims = case.spec.head_dim, case.spec.head_dim_v
    for head_dim in head_dims:
        if head_dim > 256 or head_dim % 8:
            raise Absent(f"takes head dimensions up to 256 that 8 divides, not {head_dim}")
    if same and len(set(head_dims)) > 1:
        raise Absent("takes values of the head dimension of keys alone")


def check_dense(case: DecodeCase) -> None:
    """Refuse what a plain attention over a dense copy of the cache does not do."""
    if case.window_size is not None or case.softcap is not None or case.sinks:
        raise Absent("this adapter has neither windows, capped scores nor sinks")
    if case.spec.cache.is_quantized:
        raise Absent("no 8-bit cache")
    if case.tree:
        raise Absent("no trees of new tokens")
    if len(set(case.lengths)) > 1:
        raise Absent("a dense cache has one length for all sequences")
