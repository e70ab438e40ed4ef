"""The configurations of a kernel that are worth compiling, the likely ones first."""

from __future__ import annotations

from itertools import product
from math import log2

from tuning.static.bound import rows_per_tile
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import padded_head_dim, padded_keys
from twin_attention.targets.kernels import (
    KERNELS,
    CombineConfig,
    DecodeConfig,
    FlashConfig,
    KernelConfig,
)
from twin_attention.targets.splits import tiles_ahead
from twin_attention.targets.target import SHARED_MEMORY_LIMIT

# Fields without values here keep the row's, such as max_rows, which few new tokens reach.
SPACE: dict[type[KernelConfig], dict[str, tuple[int, ...]]] = {
    # A backward pads its rows to 128, which limits its query tiles.
    FlashConfig: {
        "block_q": (16, 32, 64, 128),
        "block_kv": (16, 32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    },
    DecodeConfig: {
        "block_kv": (16, 32, 64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4, 5),
    },
    CombineConfig: {
        "block_states": (8, 16, 32, 64),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3),
    },
}
# Chunks of prompts reach it.
ROWS_OF_CHUNKS = {"max_rows": (32, 64, 128)}
# Not forward mode, whose results a trial does not check.
TUNED = tuple(
    name for name, x in KERNELS.items() if x.config in SPACE and x.function != "flash_jvp"
)
_REGISTERS = 192  # of a thread's 255; operands and addresses take the rest


def candidates(
    kernel: str, spec: AttentionSpec | DecodeSpec, present: KernelConfig, target: str
) -> list[KernelConfig]:
    """Return all other configurations that may fit, nearest to the present one first."""
    make = KERNELS[kernel].config
    values = {name: (value,) for name, value in vars(present).items()} | SPACE[make]
    if kernel == "paged_attention":
        values |= ROWS_OF_CHUNKS
    found = (make(**dict(zip(values, point, strict=True))) for point in product(*values.values()))
    fitting = [
        config for config in found if config != present and may_fit(kernel, spec, config, target)
    ]
    return sorted(fitting, key=lambda config: _distance(config, present))


def may_fit(
    kernel: str, spec: AttentionSpec | DecodeSpec, config: KernelConfig, target: str
) -> bool:
    """Return True if the least that a program needs fits, before anything is compiled.

    Registers hold the accumulators and one tile of scores, in float32; shared memory the tiles that
    are loaded ahead: the stages less one, or `tiles_ahead`. Each warp needs at least an
    instruction's share of the scores, 16×8 on tensor cores, or with head dimensions above 256 of
    the accumulators.
    """
    if not isinstance(config, FlashConfig | DecodeConfig):
        return True
    sizes = {"d": padded_keys(spec), "dv": padded_head_dim(spec.head_dim_v)}
    is_latent = isinstance(spec, DecodeSpec) and spec.cache.latent
    columns = sizes["d"] if is_latent else sum(sizes.values())
    stationary, loaded = rows_per_tile(spec, config), config.block_kv
    scores, tiles = stationary * loaded, config.num_stages - 1
    if isinstance(config, DecodeConfig):
        tiles = min(tiles, tiles_ahead(config))
    if KERNELS[kernel].stationary == "block_kv":
        stationary, loaded = loaded, stationary
    accumulators = stationary * sum(sizes[name] for name in KERNELS[kernel].accumulators)
    least = 32 if spec.dtype_bits == 32 else 16 * 8
    shared_by_warps = accumulators if max(sizes.values()) > 256 else scores
    ahead = tiles * loaded * columns * spec.dtype_bits // 8
    return (
        accumulators + scores <= _REGISTERS * 32 * config.num_warps
        and ahead <= SHARED_MEMORY_LIMIT[target]
        and shared_by_warps >= least * config.num_warps
    )


def _distance(a: KernelConfig, b: KernelConfig) -> float:
    """Return the doublings of tiles and warps, plus the steps of stages, between the two."""
    doublings = sum(
        abs(log2(x / getattr(b, name))) for name, x in vars(a).items() if name != "num_stages"
    )
    return doublings + abs(a.num_stages - b.num_stages)
