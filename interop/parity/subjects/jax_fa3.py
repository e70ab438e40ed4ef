"""FlashAttention-3 in JAX, both passes: XLA's calls into the library of dew-flash-attn-cu13.

A folder of the package's name on PYTHONPATH is enough.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.subjects.absent import Absent

PACKAGE, LIBRARY = "dew_flash_attn", "libdew_flash_attn3.so"
TARGETS = tuple(f"dew_flash3_{kind}_{x}" for kind in ("mha", "mha_varlen") for x in ("fwd", "bwd"))
ROWS = 128  # to which the backward rounds a sequence's rows up, at most


def fa3(
    case: FlashCase | VarlenCase, tensors: dict[str, Any], *, lse: bool = False
) -> Callable[..., Any]:
    register()
    if isinstance(case, FlashCase):
        return _attention(case, lse, case.batch)
    offsets = tuple(tensors[f"cu_seqlens_{x}"] for x in ("q", "kv"))
    longest = [np.int64(max((pair[side] for pair in case.lengths), default=0)) for side in (0, 1)]
    lengths = {"max_seqlen": longest[0], "max_seqlen_k": longest[1]}
    return _attention(case, lse, len(case.lengths), offsets, **lengths)


@cache
def register() -> None:
    """Register the library's functions with JAX, whose devices load its dependencies.

    Raise `Absent` if it cannot be loaded, or this card is not Hopper.
    """
    import jax

    spec = find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    path = Path(next(iter(folders or ()), "")) / LIBRARY
    if not folders or not path.exists():
        raise Absent(f"{PACKAGE} with {LIBRARY} is not installed")
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        raise Absent("its kernels are for Hopper only")
    try:
        library = ctypes.cdll.LoadLibrary(str(path))
    except OSError as error:
        raise Absent(f"{LIBRARY} cannot be loaded: {error}") from error
    for name in TARGETS:
        function = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, function, platform="CUDA")


def _attention(
    case: FlashCase | VarlenCase, returns_lse: bool, sequences: int,
    offsets: tuple[Any, ...] = (), **lengths: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Return a function of q, k, v, [B, S, H, D] or packed, with the library's backward."""
    import jax
    from jax.ffi import ffi_call

    kind = "mha_varlen" if offsets else "mha"
    attributes = lengths | {
        "softmax_scale": np.float64(case.spec.scale),
        "is_causal": case.causal,
        "window_size_left": np.int64(-1),
        "window_size_right": np.int64(-1),
    }

    def like(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def floats(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.float32)

    def forward(q, k, v):
        *batch, rows, heads, _ = q.shape
        # Out, the log-sum-exp, and two empty results of splits.
        results = (like(q), floats(*batch, heads, rows), floats(1, 1, 1, 1), floats(1, 1, 1))
        out, lse, *_ = ffi_call(f"dew_flash3_{kind}_fwd", results)(q, k, v, *offsets, **attributes)
        return (out, lse) if returns_lse else out, (q, k, v, out, lse)

    def backward(saved, dout):
        dout = dout[0] if returns_lse else dout
        q, k, v, out, lse = saved
        heads = q.shape[-2]
        rows = floats(q.size // q.shape[-1] + heads * ROWS * (sequences + 1))
        results = (like(q), like(k), like(v), rows, rows)
        call = ffi_call(f"dew_flash3_{kind}_bwd", results)
        dq, dk, dv, *_ = call(dout, q, k, v, out, lse, *offsets, **attributes)
        return dq, dk, dv

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend
