"""The configurations of a kernel that are worth compiling, the likely ones first."""

from __future__ import annotations

from itertools import product
from math import log2

from twin_attention.contract.spec import AttentionSpec, DecodeSpec
from twin_attention.targets.config import KernelConfig, block_rows, padded_head_dim, tiles_ahead
from twin_attention.targets.target import SHARED_MEMORY_LIMIT

# A backward's rows are padded to 128, so that its query tiles may not be larger.
_FLASH = {
    "block_q": (16, 32, 64, 128),
    "block_kv": (16, 32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3, 4),
}
# A field that is left out keeps the row's value. A decode's block_q is a limit that a few new
# tokens do not reach, and `combine` has none.
SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "flash_fwd": _FLASH,
    "flash_bwd_dq": _FLASH,
    "flash_bwd_dkdv": _FLASH,
    "paged_decode": {
        "block_kv": (16, 32, 64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4, 5),
    },
    "combine": {"block_kv": (8, 16, 32, 64), "num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3)},
}
_REGISTERS = 192  # of a thread's 255; operands and addresses take the rest


def candidates(
    kernel: str, spec: AttentionSpec | DecodeSpec, present: KernelConfig, target: str
) -> list[KernelConfig]:
    """Every other configuration that may fit, nearest to the present one first.

    Args:
        kernel: one of `SPACE`.
        spec: the problem that the row is tuned on.
        present: the row's configuration.
        target: "sm80" or "sm90".
    """
    values = {name: (value,) for name, value in vars(present).items()} | SPACE[kernel]
    found = (
        KernelConfig(**dict(zip(values, point, strict=True))) for point in product(*values.values())
    )
    fitting = [
        config for config in found if config != present and may_fit(kernel, spec, config, target)
    ]
    return sorted(fitting, key=lambda config: _distance(config, present))


def may_fit(
    kernel: str, spec: AttentionSpec | DecodeSpec, config: KernelConfig, target: str
) -> bool:
    """Whether what a program needs at the very least fits, before anything is compiled.

    Registers hold the accumulators and one tile of scores, in float32. Shared memory holds the
    tiles that are loaded ahead, one less than the stages or `tiles_ahead`. Each warp has at least
    an instruction's share of the scores, 16×8 on tensor cores, since without one it would repeat
    another's work.
    """
    if kernel == "combine":
        return True
    d, dv = padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)
    rows, keys, tiles = config.block_q, config.block_kv, config.num_stages - 1
    if isinstance(spec, DecodeSpec):
        rows, tiles = block_rows(spec, config), min(tiles, tiles_ahead(config))
    accumulators, loaded = {
        "flash_fwd": (rows * dv, keys),
        "flash_bwd_dq": (rows * d, keys),
        "flash_bwd_dkdv": (keys * (d + dv), rows),
        "paged_decode": (rows * dv, keys),
    }[kernel]
    scores = rows * keys
    least = 32 if spec.dtype_bits == 32 else 16 * 8
    ahead = tiles * loaded * (d + dv) * spec.dtype_bits // 8
    return (
        accumulators + scores <= _REGISTERS * 32 * config.num_warps
        and ahead <= SHARED_MEMORY_LIMIT[target]
        and scores >= least * config.num_warps
    )


def _distance(a: KernelConfig, b: KernelConfig) -> float:
    """Doublings of tiles and warps, and steps of stages, from one to the other."""
    doublings = ((a.block_q, b.block_q), (a.block_kv, b.block_kv), (a.num_warps, b.num_warps))
    return sum(abs(log2(x / y)) for x, y in doublings) + abs(a.num_stages - b.num_stages)
