"""Say for which problems kernels of the other side are faster (times: docs/history/choices.md)."""

from __future__ import annotations

from dataclasses import replace

from twin_attention.contract.cost import backward_flops, forward_flops
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window
from twin_attention.targets import sm90
from twin_attention.targets.kernels import Spec

_SECONDS_OF_LAUNCH = 1e-5  # of the host, in JAX
_LAUNCHES = {"flash_fwd": 1, "flash_bwd": 3, "flash_jvp": 1, "partial_fwd": 1, "partial_bwd": 3}
_FLOPS_OF_SECOND = 4e14
_SHORT = 1024  # tokens
_SHORT_GROUPED = 3072  # of a causal backward of grouped heads
_SHORT_FORWARD = 512
_LONG_FORWARD = 2048


def gluon_is_faster(operation: str, spec: Spec, target: str | None) -> bool:
    """Return True if Gluon's SM90 kernels are faster than the kernels of `pallas_attn`.

    They win where both are as fast: JAX compiles Mosaic's kernels anew for each shape. Backwards
    that were not timed count as slower.
    """
    if target != "sm90":
        return False
    if isinstance(spec, DecodeSpec) and spec.cache.latent:
        return True
    if operation not in _LAUNCHES:
        return False
    if not isinstance(spec, AttentionSpec) or spec.has_lists:
        return False
    if sm90.slower(operation, spec, target) is not None:
        return False
    head_dim, launches = max(spec.head_dim, spec.head_dim_v), _LAUNCHES[operation]
    is_packed, is_backward = spec.is_packed, operation.endswith("bwd")
    if spec.hides_by_data:
        launches += 1  # of the lists of tiles
    if sm90.mosaic_leaves(operation, spec) is not None:
        faster = True  # than portable kernels
    else:
        dense_is_faster = _backward_is_faster if is_backward else _forward_is_faster
        packed_is_faster = is_packed and (is_backward or head_dim <= 128)
        faster = packed_is_faster or dense_is_faster(spec, head_dim)
    if operation == "flash_bwd" and spec.deterministic:
        return False
    return faster and _flops(operation, spec) >= launches * _SECONDS_OF_LAUNCH * _FLOPS_OF_SECOND


def _forward_is_faster(spec: AttentionSpec, head_dim: int) -> bool:
    if not _is_plain(spec) or head_dim > 128:
        return False
    return _longest(spec) >= _LONG_FORWARD or (head_dim <= 64 and _longest(spec) <= _SHORT_FORWARD)


def _backward_is_faster(spec: AttentionSpec, head_dim: int) -> bool:
    if not _is_plain(spec):
        return False
    if _longest(spec) <= _SHORT or not 64 < head_dim <= 128:
        return True
    has_group = spec.group_size > 1
    return spec.window != Window() and (not has_group or _longest(spec) <= _SHORT_GROUPED)


def _is_plain(spec: AttentionSpec) -> bool:
    """Return True for a dense problem with a causal mask or no mask, and no other option."""
    return (
        type(spec) is AttentionSpec
        and spec.softcap is None
        and spec.window in (Window(), Window(None, 0))
    )


def _longest(spec: AttentionSpec) -> int:
    return max(spec.seq_q, spec.seq_kv)


def _flops(operation: str, spec: AttentionSpec) -> int:
    """Count operations over the pairs that the window shows, or all pairs where ranges may.

    Packed sequences count as equally long.
    """
    if spec.ranges:
        spec = replace(spec, window=Window())
    count = forward_flops if operation.endswith("fwd") else backward_flops
    if not isinstance(spec, VarlenSpec):
        return count(spec)
    number = max(1, spec.num_sequences)
    return number * count(spec.sequence(spec.seq_q // number, spec.seq_kv // number))
