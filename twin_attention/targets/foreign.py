"""Say for which problems kernels of the other side are faster, of those that were timed.

The records are ``bench/results/h200-packed-sm90.md``: Gluon's kernels in PyTorch beside Mosaic's
and the portable ones in JAX. On an H100 JAX took 1.03 times as long as PyTorch for Gluon's packed
backwards, and 0.83 and 0.81 of what its own took at head dimensions 128 and 64.
"""

from __future__ import annotations

from twin_attention.contract.cost import backward_flops, forward_flops
from twin_attention.contract.spec import VarlenSpec
from twin_attention.targets import sm90
from twin_attention.targets.kernels import Spec

# Of the host, for a launch in JAX: 6 us were measured on an H100, and its own take 2 to 3 us.
_SECONDS_OF_LAUNCH = 1e-5
_LAUNCHES = {"flash_fwd": 1, "flash_bwd": 3}
_FLOPS_OF_SECOND = 4e14


def gluon_is_faster(operation: str, spec: Spec, target: str | None) -> bool:
    """Return True where Gluon's SM90 kernels are faster than those of `pallas_attn`.

    A backward that is to be deterministic was not timed.

    Args:
        operation: the function that is to run, such as "flash_fwd".
        spec: the problem.
        target: "sm80", "sm90", or None in an interpreter.
    """
    if target != "sm90" or not isinstance(spec, VarlenSpec) or operation not in _LAUNCHES:
        return False
    if sm90.slower(operation, spec, target) is not None:
        return False
    if operation == "flash_fwd":
        faster = max(spec.head_dim, spec.head_dim_v) <= 64
    else:
        faster = not spec.deterministic
    seconds = _flops(operation, spec) / _FLOPS_OF_SECOND
    return faster and seconds >= _LAUNCHES[operation] * _SECONDS_OF_LAUNCH


def _flops(operation: str, spec: VarlenSpec) -> int:
    """Count the operations of packed sequences that have one length."""
    count = forward_flops if operation == "flash_fwd" else backward_flops
    number = max(1, spec.num_sequences)
    return number * count(spec.sequence(spec.seq_q // number, spec.seq_kv // number))
