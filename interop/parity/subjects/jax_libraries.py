"""Attention in JAX: `jax.nn`, flax, JAX's own Pallas kernel, and tokamax."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.parity.subjects.library import load, mask_of, needs_mask
from twin_attention.interop.parity.torch_calls import Attend

# Tokamax imports this profiler, which its attention does not use.
_XPROF = "xprof.cli.tools.get_kernel_stats_tool"
SCORES_MAX = 1 << 35  # bytes of float32 scores; beside them there are masks and probabilities


def jax_nn(implementation: Literal["xla", "cudnn"], case: Any, tensors: dict[str, Any]) -> Attend:
    """XLA's operations or cuDNN's kernels; float32 is not rounded to TF32."""
    precision = "highest" if case.dtype == "float32" else "default"
    attention: Any = jax.nn.dot_product_attention

    def attend(q, k, v, bias=None):
        is_packed = q.ndim == 3
        qkv: Any = (x[None] for x in (q, k, v)) if is_packed else (q, k, v)
        with jax.default_matmul_precision(precision):
            out = attention(
                *qkv, bias, _mask(case, tensors), scale=case.scale,
                is_causal=case.causal and _is_square(case), implementation=implementation,
            )  # fmt: skip
        return out[0] if is_packed else out

    return attend


def flax(case: FlashCase, tensors: dict[str, Any]) -> Attend:
    """`nnx.dot_product_attention`; float32 is not rounded to TF32."""
    nnx = load("flax.nnx")
    mask = mask_of(case, tensors)
    precision = jax.lax.Precision.HIGHEST if case.dtype == "float32" else None
    attend = partial(nnx.dot_product_attention, mask=mask, precision=precision)
    return lambda q, k, v, bias=None: attend(q, k, v, bias)


def pallas_mha(case: FlashCase, tensors: dict[str, Any]) -> Attend:
    """`jax.experimental.pallas.ops.gpu.attention.mha` with its block sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # in favour of tokamax
        module = load("jax.experimental.pallas.ops.gpu.attention")
    return partial(module.mha, segment_ids=None, sm_scale=case.spec.scale, causal=case.causal)


def tokamax(implementation: str, case: FlashCase, tensors: dict[str, Any]) -> Attend:
    """tokamax's "mosaic" or "triton" kernels as configured."""
    with _xprof():
        module = load("tokamax")
    attend = partial(
        module.dot_product_attention,
        scale=case.spec.scale,
        is_causal=case.causal,
        implementation=implementation,
    )

    def quiet(q, k, v):
        with _not_autotuned():
            return attend(q, k, v)

    return quiet


def fa4(case: FlashCase | VarlenCase, tensors: dict[str, Any], *, lse: bool = False) -> Attend:
    """fa4-jax, whose windows are the contract's; rows of padding are 0."""
    module, window = load("fa4_jax"), case.spec.window
    sides = (window.left, window.right)  # of `causal` too
    options = {"window_size": sides, "scale": case.scale, "return_lse": lse}
    if isinstance(case, FlashCase):
        return partial(module.flash_attn, **options)
    options |= {f"cu_seqlens_{x[0]}": tensors[f"cu_seqlens_{x}"] for x in ("q", "kv")}
    return partial(module.flash_attn_varlen, defined_padding=True, **options)


def _is_square(case: Any) -> bool:
    return isinstance(case, VarlenCase) or not (needs_mask(case) or case.seq_q != case.seq_kv)


def _mask(case: Any, tensors: dict[str, Any]) -> Array | None:
    if isinstance(case, VarlenCase):
        if (scores := 4 * case.heads_q * len(tensors["q"]) * len(tensors["k"])) > SCORES_MAX:
            raise Absent(f"its scores would take {scores >> 30} GiB")

        def documents(of: str, rows: int) -> Array:
            offsets = jax.lax.optimization_barrier(tensors[f"cu_seqlens_{of}"])  # never folded
            return jnp.searchsorted(offsets[1:], jnp.arange(rows), side="right")

        queries, keys = documents("q", len(tensors["q"])), documents("kv", len(tensors["k"]))
        return (queries[:, None] == keys)[None, None]
    if "block_mask" in tensors:
        tiles = jax.lax.optimization_barrier(tensors["block_mask"])
        tiles = jnp.repeat(tiles, case.tile_q, axis=2)[:, :, : case.seq_q]
        kept = jnp.repeat(tiles, case.tile_kv, axis=3)[..., : case.seq_kv]
        hidden = None if _is_square(case) else mask_of(case, tensors)
        return kept if hidden is None else kept & hidden
    is_none = _is_square(case) or not (case.causal or needs_mask(case))
    return None if is_none else jnp.asarray(mask_of(case, tensors))


@contextmanager
def _not_autotuned() -> Iterator[None]:
    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Autotuning cache miss")

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@contextmanager
def _xprof() -> Iterator[None]:
    stand_ins = {}
    if not find_spec("xprof"):
        names = accumulate(_XPROF.split("."), "{}.{}".format)
        stand_ins = {name: ModuleType(name) for name in names}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
