"""Say which problems the explicit SM90 kernels of both sides take.

A producer warp loads tiles with TMA; consumer warpgroups multiply them with wgmma.
"""

from __future__ import annotations

from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, VarlenSpec
from twin_attention.targets.kernels import Spec


def supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Return None for a problem that the kernels cover, else the reason why they do not.

    Args:
        operation: "flash_fwd" or "flash_bwd".
        spec: the problem.
        target: "sm80", "sm90", or None in an interpreter.
    """
    if not isinstance(spec, AttentionSpec):
        return "it has flash attention alone"
    if isinstance(spec, VarlenSpec):
        return "its kernels take no packed sequences"
    if isinstance(spec, BlockSparseSpec):
        if operation == "flash_bwd":
            return "its backward takes no block masks"
        if (spec.tile_q, spec.tile_kv) != (128, 128):
            return "its block masks have tiles of 128 queries by 128 keys"
    if spec.segmented:
        return "its kernels take no segment ids"
    if target != "sm90":
        return "its kernels are for SM90"
    if spec.dtype_bits != 16:
        return f"its products take float16 and bfloat16, not {spec.dtype}"
    if not spec.rows_aligned:
        return "TMA loads rows that begin at multiples of 16 bytes"
    if operation == "flash_bwd":
        return _supports_backward(spec)
    return None


def _supports_backward(spec: AttentionSpec) -> str | None:
    """Return None for a backward that the kernels cover, else the reason why they do not."""
    if max(spec.head_dim, spec.head_dim_v) > 128:
        return "its backward takes heads of at most 128"
    if 0 < spec.seq_kv < 16:
        # With one key ds is 0: what wgmma rounds otherwise than delta's sum is all that is left.
        return "its backward takes at least 16 keys"
    return None


def column_pieces(size: int) -> tuple[int, ...]:
    """Return the widths of the column pieces that a tile of a head is stored and multiplied in.

    A piece is a power of two and at least 16 wide. As few pieces as give the least columns, three
    at most: (64, 32, 16) for 112, (128, 64) for 192, and (256,) for 240.
    """
    rest, pieces = -(-size // 16) * 16, []
    while rest:
        whole = 1 << (rest - 1).bit_length()
        piece = whole if whole == rest or len(pieces) == 2 else whole // 2
        pieces.append(piece)
        rest -= min(piece, rest)
    most = 1 << (size - 1).bit_length()
    return tuple(pieces) if sum(pieces) < most else (max(most, 16),)
