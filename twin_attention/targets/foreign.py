"""Say for which problems kernels of the other side are faster.

The records are ``bench/results/h200-packed-sm90.md``: for packed sequences Gluon's kernels took
1.00 to 1.03 times as long in JAX as in PyTorch. At head dimension 128 backwards took 0.84 to 0.89
of what Mosaic's took, and forwards 0.98 to 1.00. On an H100 backwards at 64 took 0.81 of what the
portable kernels took.

For dense backwards, ``bench/results/h100-sm90-peers.md`` gives TFLOP/s of Gluon's kernels in JAX
over Mosaic's, without a mask and with a causal one:

| tokens | 64 | 128 | 256 |
|---|---|---|---|
| 512 | 1.03, 1.00 | 1.16, 1.07 | 1.05, 1.17 |
| 4096 | 1.11, 1.13 | 1.01, 1.07 | 1.04, 1.06 |
| 16384 | 1.03, 1.04 | 0.93, 1.07 | 1.03, 1.04 |

With a causal mask 1024 tokens gave 1.10 at 96, 2 x 6144 gave 1.02 at 256, and 12288, 2 x 8192 and
4 x 4096 with 32 heads gave 1.06, 1.04 and 1.10 at 128, where grouped heads gave 1.12 (4 x 3000, 16
and 4 heads) and 0.98 (8 x 2048, 32 and 8), and with older kernels, in development scripts on an
H100, 1.09 (32 x 512, 16 and 4), 1.11 (6 x 2000, 24 and 6), 0.98 (4 x 4096, 32 and 8), 0.96 (2 x
5000, 40 and 8) and 0.98 (2 x 8192, 16 and 4).

Of dense forwards at head dimension 64 an H100 gave 1.05 and 1.04 for 512 tokens, without a mask and
with a causal one, 0.98 to 1.01 for 4096 and 16384, and 0.98 for 1024 without a mask. At 128 and 256
those of 512 gave 0.91 to 0.98.

Segment ids and ends run in JAX's portable kernels alone. A tree of 24576 tokens at head dimension
64 took them 3.51 ms forward and 13.6 forward and backward on an H200, and Gluon's kernels 2.79 and
9.33 in JAX; at 128 Gluon's took 2.03 and 7.61 (``bench/results/h200-tree.md``), and on an H100 the
portable ones 3.03 and 12.0. A window of depths was timed in PyTorch: 2.1 times as fast.

So do terms of scores and dropout. Of 4096 tokens with a causal mask, 16 heads, an H200 took
milliseconds of a call in a queue, forward and backward, portable and Gluon's:

| | 128 | 64 |
|---|---|---|
| ALiBi | 0.172, 0.562; 0.138, 0.382 | 0.123, 0.296; 0.108, 0.232 |
| dropout | 0.335, 0.793; 0.206, 0.563 | backward 0.579; 0.404 |

An H100 took these of the backward alone, without a mask and with a causal one. The bias was
[1, H, S, S] in bfloat16, and the table had 257 entries:

| | 128 | 64 |
|---|---|---|
| bias | 2.05, 1.37; 0.973, 0.814 | 1.48, 0.963; 0.754, 0.615 |
| relative table | 1.80, 1.07; 1.04, 0.506 | 1.50, 0.657; 0.473, 0.280 |

Parts of a sequence run in JAX's portable kernels alone, too. Two H100s as 2 ranks of 8192 tokens,
16 heads of 128, causal, "ring", took 1.73 ms forward with these and 1.11 with Gluon's; with the
backward 5.78 and 4.07, and 5.87 and 4.66 where it is to be deterministic.
"""

from __future__ import annotations

from twin_attention.contract.cost import backward_flops, forward_flops
from twin_attention.contract.spec import (
    AttentionSpec,
    VarlenSpec,
    Window,
)
from twin_attention.targets import sm90
from twin_attention.targets.kernels import Spec

# Host time of a launch in JAX: 6 us were measured on an H100, and JAX's own launches take 2 to 3
# us.
_SECONDS_OF_LAUNCH = 1e-5
_LAUNCHES = {"flash_fwd": 1, "flash_bwd": 3, "partial_fwd": 1, "partial_bwd": 3}
_FLOPS_OF_SECOND = 4e14
_SHORT = 1024  # tokens
_SHORT_GROUPED = 3072  # of a causal backward of grouped heads
_SHORT_FORWARD = 512


def gluon_is_faster(operation: str, spec: Spec, target: str | None) -> bool:
    """Return True where Gluon's SM90 kernels are faster than those of `pallas_attn`.

    Deterministic dense or packed backwards were not timed, nor dense ones with a window or a
    softcap.

    Args:
        operation: the function to run, such as "flash_fwd".
        spec: the problem.
        target: "sm80", "sm90", or None in an interpreter.
    """
    if target != "sm90" or operation not in _LAUNCHES:
        return False
    if not isinstance(spec, AttentionSpec) or spec.has_lists:
        return False
    if sm90.slower(operation, spec, target) is not None:
        return False
    head_dim, launches = max(spec.head_dim, spec.head_dim_v), _LAUNCHES[operation]
    is_packed, is_backward = spec.is_packed, operation.endswith("bwd")
    if spec.segmented or spec.tree:
        launches += 1  # of the lists of tiles
    if sm90.mosaic_leaves(operation, spec) is not None:
        faster = True  # than portable kernels
    else:
        dense_is_faster = _backward_is_faster if is_backward else _forward_is_faster
        faster = (is_packed and is_backward) or dense_is_faster(spec, head_dim)
    if operation == "flash_bwd" and spec.deterministic:
        return False
    return faster and _flops(operation, spec) >= launches * _SECONDS_OF_LAUNCH * _FLOPS_OF_SECOND


def _forward_is_faster(spec: AttentionSpec, head_dim: int) -> bool:
    return _is_plain(spec) and head_dim <= 64 and _longest(spec) <= _SHORT_FORWARD


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
    """Count the operations over the pairs that the window shows.

    Which pairs ids and ends hide is data on the device. Packed sequences count as equally long.
    """
    count = forward_flops if operation.endswith("fwd") else backward_flops
    if not isinstance(spec, VarlenSpec):
        return count(spec)
    number = max(1, spec.num_sequences)
    return number * count(spec.sequence(spec.seq_q // number, spec.seq_kv // number))
