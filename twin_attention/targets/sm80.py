"""What the explicit SM80 kernels of both sides take, and how they are configured.

They copy 16 bytes at a time with cp.async, read operands with ldmatrix, and multiply with mma.sync.
"""

from __future__ import annotations

from dataclasses import dataclass

from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.kernels import FlashConfig, Spec


def supports(spec: Spec, target: str | None) -> str | None:
    """Return None for a problem that the kernels cover, else the reason why they do not.

    Args:
        spec: the problem.
        target: "sm80", "sm90", or None in an interpreter.
    """
    if not isinstance(spec, AttentionSpec):
        return "it has flash attention alone"
    if target != "sm80":
        return "its kernels are for SM80"
    if spec.dtype_bits != 16:
        return f"its products take float16 and bfloat16, not {spec.dtype}"
    return None


def column_pieces(size: int) -> tuple[int, ...]:
    """Return the widths of the column pieces that the rows of a head are stored in.

    A piece is a power of two and at least 16 wide, so a head size such as 96 takes a large and a
    small piece, (64, 32), where one piece would be a third too wide.
    """
    whole = max(16, 1 << (size - 1).bit_length())
    half = whole // 2
    rest = max(16, 1 << (size - half - 1).bit_length())
    return (half, rest) if rest < half else (whole,)


@dataclass(frozen=True)
class FwdConfig(FlashConfig):
    """Configure `flash_fwd`.

    Attributes:
        block_q, block_kv: rows of a tile of q and of a tile of k and v.
        num_warps: warps per program; each has block_q / num_warps rows, 16 or a multiple.
        num_stages: tiles of k, and of v, in shared memory: 1 or 2.
        q_in_registers: 1 to read q from shared memory once; 0 to read it for each tile of keys.
    """

    q_in_registers: int
