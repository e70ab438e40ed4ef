"""Say for which problems kernels of the other side are faster, of those that were timed.

The records are ``bench/results/h200-packed-sm90.md`` and ``h200-sm90-fa4.md``: Gluon's kernels in
PyTorch beside Mosaic's and the portable ones in JAX. JAX takes as long for the same kernels.
"""

from __future__ import annotations

from twin_attention.contract.cost import backward_flops, forward_flops
from twin_attention.contract.spec import AttentionSpec, VarlenSpec
from twin_attention.targets.kernels import Spec

# Of the host, for a launch in JAX: a shorter kernel does not hide it.
_SECONDS_OF_LAUNCH = 4e-4
_LAUNCHES = {"flash_fwd": 1, "flash_bwd": 3}
_FLOPS_OF_SECOND = 4e14


def gluon_is_faster(operation: str, spec: Spec, target: str | None) -> bool:
    """Return True where Gluon's SM90 kernels are faster than those of `pallas_attn`.

    Args:
        operation: the function that is to run, such as "flash_fwd".
        spec: the problem.
        target: "sm80", "sm90", or None in an interpreter.
    """
    if target != "sm90" or not isinstance(spec, AttentionSpec) or operation not in _LAUNCHES:
        return False
    packed, head_dim = isinstance(spec, VarlenSpec), max(spec.head_dim, spec.head_dim_v)
    if operation == "flash_fwd":
        faster = packed and head_dim <= 64
    else:
        is_middle = 64 < head_dim <= 128
        faster = (packed or not is_middle or spec.seq_kv < 4096) and not spec.deterministic
    seconds = _flops(operation, spec) / _FLOPS_OF_SECOND
    return faster and seconds >= _LAUNCHES[operation] * _SECONDS_OF_LAUNCH


def _flops(operation: str, spec: AttentionSpec) -> int:
    """Count the operations of a problem; packed sequences are taken to have one length."""
    count = forward_flops if operation == "flash_fwd" else backward_flops
    if not isinstance(spec, VarlenSpec):
        return count(spec)
    number = max(1, spec.num_sequences)
    return number * count(spec.sequence(spec.seq_q // number, spec.seq_kv // number))
