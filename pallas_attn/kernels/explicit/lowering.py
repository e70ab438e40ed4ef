"""Lower a kernel for SM80 on any device, and let its outputs reuse the memory of inputs.

It can go when a kernel can name its architecture, and `plgpu.kernel` has aliases.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.ahead import note_lowered
from pallas_attn.own_memory import lower_with_own_memory
from pallas_attn.private import ask_ptxas_once, mgpu_utils, mlir, mpmd

_lowers_sm80: ContextVar[bool] = ContextVar("lowers_sm80", default=False)
_arch_of_device = mgpu_utils._infer_arch


@dataclass(frozen=True, kw_only=True)
class AliasingParams(plgpu.CompilerParams):
    """Parameters of a kernel whose last outputs reuse the memory of its last inputs."""

    num_aliased: int = 0


@dataclass(frozen=True, kw_only=True)
class SM80Params(AliasingParams):
    """Parameters of a kernel that is lowered for SM80 on any device."""


def compiler_params(kind: type[AliasingParams], num_aliased: int = 0) -> AliasingParams:
    """Return the parameters of a kernel in which every barrier is placed by hand."""
    return kind(
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
        num_aliased=num_aliased,
    )


@contextmanager
def _sm80():
    token = _lowers_sm80.set(True)
    try:
        yield
    finally:
        _lowers_sm80.reset(token)


def _infer_arch() -> tuple[int, int]:
    return (8, 0) if _lowers_sm80.get() else _arch_of_device()


def _lower(ctx, *operands, **params):
    if params["interpret"]:
        return mpmd._mpmd_map_fallback_lowering(ctx, *operands, **params)
    compiler_params = params["compiler_params"]
    if not isinstance(compiler_params, AliasingParams):
        return mpmd._mpmd_map_mgpu_lowering(ctx, *operands, **params)
    last = range(-compiler_params.num_aliased, 0)
    aliases = {len(ctx.avals_in) + i: len(ctx.avals_out) + i for i in last}
    params["input_output_aliases"] = aliases

    def rule(ctx: Any, *operands: Any) -> Any:
        results = mpmd._mpmd_map_mgpu_lowering(ctx, *operands, **params)
        note_lowered(results)
        return results

    with _sm80() if isinstance(compiler_params, SM80Params) else nullcontext():
        return lower_with_own_memory(rule, ctx, operands, aliases)


ask_ptxas_once()
mgpu_utils._infer_arch = _infer_arch
mlir.register_lowering(mpmd.mpmd_map_p, _lower, platform="cuda")
