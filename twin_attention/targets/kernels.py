"""The table of kernels: the problem that each solves and the fields that configure it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, cast

from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec, PagedSpec
from twin_attention.contract.spec import AttentionSpec, MergeSpec

Spec = AttentionSpec | DecodeSpec | MergeSpec | AppendSpec


class KernelConfig:
    """Tile sizes, warps per program and depth of the load pipeline.

    A subclass is a frozen dataclass with a field per tunable number.
    """

    num_warps: int
    num_stages: int

    @property
    def tile(self) -> str:
        """Return the tile sizes in few characters, such as "128×64"."""
        sizes = vars(self).items()
        return "×".join(str(size) for name, size in sizes if not name.startswith("num_"))


@dataclass(frozen=True)
class FlashConfig(KernelConfig):
    """A kernel that multiplies tiles of queries and keys.

    block_q, block_kv: rows of a tile of q and of a tile of k and v.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class FwdConfig(FlashConfig):
    """`flash_fwd` of the explicit SM80 kernels.

    num_warps: each warp has block_q / num_warps rows, 16 or a multiple.
    num_stages: tiles of k, and of v, in shared memory: 1 or 2.
    q_in_registers: 1 to read q from shared memory once; 0 for each tile of keys.
    """

    q_in_registers: int


@dataclass(frozen=True)
class SpecializedConfig(FlashConfig):
    """A kernel of the explicit SM90 family, whose warps have different work.

    num_warps: 4 for each 64 rows that stay, and the producer's 4.
    num_stages: tiles of k, and of v, in shared memory.
    ping_pong: 0: the consumer warpgroups issue their products in any order; 1: they take turns;
        2: as 1, and only the first waits for keys and values, since the others follow it.
    """

    ping_pong: int


@dataclass(frozen=True)
class PreprocessConfig(KernelConfig):
    """`flash_bwd_preprocess` or `flash_bwd_postprocess`, which have no loop."""

    num_stages: ClassVar[int] = 1

    block_q: int
    num_warps: int


@dataclass(frozen=True)
class ListsConfig(KernelConfig):
    """`tile_lists`, with the tiles of the kernel that uses the lists.

    scan_rows: rows that are read at a time.
    """

    num_stages: ClassVar[int] = 1

    scan_rows: int
    num_warps: int


@dataclass(frozen=True)
class DecodeConfig(KernelConfig):
    """`paged_decode` or `paged_attention`.

    max_rows: most query rows per program. Fewer are padded to a power of two, at least 16, or
        64 in `paged_attention`.
    num_stages: depth of the load pipeline, two for each tile that is loaded ahead.
    """

    max_rows: int
    block_kv: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class WarpDecodeConfig(DecodeConfig):
    """`paged_decode` of the explicit kernels: Mosaic GPU's, and Gluon's of latent caches.

    block_kv: keys of a tile; in Mosaic's kernels each warp has its share of them.
    num_stages: tiles of k, and of v, in shared memory; with one, nothing is fetched ahead.
    num_programs: how many programs an SM runs at a time; the number of splits depends on it.
    """

    num_programs: int


@dataclass(frozen=True)
class CombineConfig(KernelConfig):
    """`combine`; block_states: partial results that are merged at a time."""

    block_states: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AppendConfig(KernelConfig):
    """`append_kv`, which has no loop.

    block_heads: heads per program, of keys and values and of queries.
    """

    num_stages: ClassVar[int] = 1

    block_heads: int
    num_warps: int


@dataclass(frozen=True)
class Kernel:
    """A kernel as the tables and tools see it.

    Attributes:
        function: the function of its family that launches it.
        products: the matrix products of one tile, each by its third size, besides block_q and
            block_kv: "d" is the head dimension of q and k, "dv" that of v.
        accumulators: the float32 accumulators of a program, each by its number of columns.
        stationary: the field with the number of rows that a program keeps while it loops.
        deterministic: True for deterministic backwards only, False for the others only, None for
            both.
        optional: it runs only for problems that have a row.
    """

    spec: type[Spec]
    config: type[KernelConfig]
    function: str
    products: tuple[str, ...] = ()
    accumulators: tuple[str, ...] = ()
    stationary: str = "block_q"
    deterministic: bool | None = None
    optional: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cast(Any, self.config)))


KERNELS = {
    "flash_fwd": Kernel(
        AttentionSpec, FlashConfig, "flash_fwd",
        products=("d", "dv"), accumulators=("dv",),  # s, p·v
    ),
    "flash_bwd_preprocess": Kernel(AttentionSpec, PreprocessConfig, "flash_bwd"),
    "flash_bwd_dq": Kernel(
        AttentionSpec, FlashConfig, "flash_bwd",
        products=("d", "dv", "d"), accumulators=("d",),  # s, dp, dq
    ),
    "flash_bwd_dkdv": Kernel(
        AttentionSpec, FlashConfig, "flash_bwd",
        products=("d", "dv", "dv", "d"), accumulators=("d", "dv"),  # s, dp, dv, dk
        stationary="block_kv",
    ),
    "flash_jvp": Kernel(
        AttentionSpec, FlashConfig, "flash_jvp",
        # s, dq·k, q·dk, (p ds)·v, p·dv; missing tangents cost none
        products=("d", "d", "d", "dv", "dv"), accumulators=("dv",),
    ),
    "paged_decode": Kernel(
        DecodeSpec, DecodeConfig, "paged_decode",
        products=("d", "dv"), accumulators=("dv",),  # s, p·v
        stationary="max_rows",
    ),
    # For batches with more tokens than sequences; others use the numbers of paged_decode.
    "paged_attention": Kernel(
        PagedSpec, DecodeConfig, "paged_attention",
        products=("d", "dv"), accumulators=("dv",),  # s, p·v
        stationary="max_rows",
    ),
    "combine": Kernel(MergeSpec, CombineConfig, "paged_decode"),
    "append_kv": Kernel(AppendSpec, AppendConfig, "append_kv"),
}  # fmt: skip

# In the explicit families, runs before each kernel that multiplies.
_TILE_LISTS = Kernel(AttentionSpec, ListsConfig, "flash_fwd", optional=True)

# The kernels of each family, by its folder in ``kernels`` and ``configs``.
FAMILY_KERNELS = {
    "portable": KERNELS,
    "sm80": {
        "flash_fwd": replace(KERNELS["flash_fwd"], config=FwdConfig),
        "flash_bwd_preprocess": KERNELS["flash_bwd_preprocess"],
        "flash_bwd_dq": replace(KERNELS["flash_bwd_dq"], deterministic=True),
        "flash_bwd_dkdv": replace(KERNELS["flash_bwd_dkdv"], deterministic=True),
        "flash_bwd_fused": Kernel(
            AttentionSpec, FlashConfig, "flash_bwd",
            products=("d", "dv", "dv", "d", "d"), accumulators=("d", "dv"),  # s, dp, dv, dk, dq
            stationary="block_kv", deterministic=False,
        ),
        "flash_bwd_postprocess": Kernel(
            AttentionSpec, PreprocessConfig, "flash_bwd", deterministic=False
        ),
        "tile_lists": _TILE_LISTS,
    },
    "paged": {
        "paged_decode": replace(KERNELS["paged_decode"], config=WarpDecodeConfig),
        "combine": KERNELS["combine"],
        "append_kv": KERNELS["append_kv"],
    },
    "sm90": {
        "flash_fwd": replace(KERNELS["flash_fwd"], config=SpecializedConfig),
        "flash_bwd_preprocess": replace(KERNELS["flash_bwd_preprocess"], deterministic=False),
        "flash_bwd_dq": replace(KERNELS["flash_bwd_dq"], deterministic=True),
        "flash_bwd_dkdv": replace(KERNELS["flash_bwd_dkdv"], deterministic=True),
        "flash_bwd_fused": Kernel(
            AttentionSpec, FlashConfig, "flash_bwd",
            products=("d", "dv", "dv", "d", "d"), accumulators=("d", "dv"),  # s, dp, dv, dk, dq
            stationary="block_kv", deterministic=False,
        ),
        "flash_bwd_postprocess": Kernel(
            AttentionSpec, PreprocessConfig, "flash_bwd", deterministic=False
        ),
        "flash_jvp": replace(KERNELS["flash_jvp"], optional=True),
        "paged_attention": replace(
            KERNELS["paged_attention"], config=SpecializedConfig, stationary="block_q",
            optional=True,
        ),
        "paged_decode": replace(KERNELS["paged_decode"], config=WarpDecodeConfig),
        "combine": KERNELS["combine"],
        "tile_lists": _TILE_LISTS,
    },
}  # fmt: skip


def find_kernel(name: str, config: type[KernelConfig] = KernelConfig) -> Kernel:
    """Return the first family's kernel of this name and class of configurations.

    All families' kernels of a name do the same work.
    """
    found = (kernels[name] for kernels in FAMILY_KERNELS.values() if name in kernels)
    return next(kernel for kernel in found if issubclass(kernel.config, config))
