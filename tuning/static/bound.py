"""Bound a kernel's inner loop by multiplying, special functions or loading.

For one tile of the loop, count the cycles that an SM needs for each resource; the largest is the
bound. Not counted are shared memory, and on the FMA units the softmax's scaling, maxima, sums and
masks and the conversion of a quantised cache.

Programs that run together share tiles of k and v (q and dout for dk and dv), which come from L2:
``cp.async.cg`` bypasses L1. A decode reads its cache once, from device memory.

Rates of one SM per cycle:

- Tensor cores: 1024 dense FP16 or BF16 multiply-adds on an A100 (NVIDIA A100 Tensor Core GPU
  Architecture, 2020), 2048 on an H100 or H200 (NVIDIA H100 Tensor Core GPU Architecture, 2022);
  half as many of TF32.
- FMA units: 64 and 128 float32 multiply-adds; special-function units: 16 base-2 exponentials or
  reciprocals on both (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions").
- L2: 5120 bytes in one cycle of the whole A100 (the same paper); assumed for an H200 as well.
- Device memory: of an A100 80 GB SXM and an H200 SXM, as in `bench.peaks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.peaks import A100, H200
from twin_attention.contract.cost import ITEMSIZE
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import padded_head_dim, padded_keys
from twin_attention.targets.kernels import (
    AppendConfig,
    CombineConfig,
    DecodeConfig,
    FlashConfig,
    KernelConfig,
    ListsConfig,
    PreprocessConfig,
    find_kernel,
)
from twin_attention.targets.splits import block_rows
from twin_attention.targets.target import NUM_SMS

_MULTIPLY_ADDS = {
    "tensor cores": {"sm80": 1024, "sm90": 2048},
    "tensor cores, TF32": {"sm80": 512, "sm90": 1024},
    "FMA units": {"sm80": 64, "sm90": 128},
}
_SPECIAL_FUNCTIONS = 16
_BYTES = {
    "L2": {"sm80": 5120, "sm90": 5120},  # of all SMs
    "device memory": {
        target: sheet.gigabytes_per_second / sheet.gigahertz
        for target, sheet in (("sm80", A100), ("sm90", H200))
    },
}


@dataclass(frozen=True)
class Tile:
    """The work of one step of a kernel's loop, or of one program without a loop.

    flops: operations of its products, padded columns included.
    special: exponentials and reciprocals, for the scores.
    """

    flops: int
    special: int
    bytes: int
    source: str


@dataclass(frozen=True)
class Bound:
    """The cycles of a tile on one SM by resource, and the resource with the most."""

    tile: Tile
    intensity: float
    cycles: dict[str, float]
    limit: str


def bound(
    kernel: str,
    spec: AttentionSpec | DecodeSpec,
    config: KernelConfig,
    target: str,
    padded: Callable[[int], int] = padded_head_dim,
    cap_functions: int = 2,
) -> Bound:
    tile = count(kernel, spec, config, padded, cap_functions)
    unit = "FMA units"
    if find_kernel(kernel).products and uses_tensor_cores(spec):
        unit = "tensor cores" if spec.dtype_bits < 32 else "tensor cores, TF32"
    cycles = {
        unit: tile.flops / 2 / _MULTIPLY_ADDS[unit][target],
        "special functions": tile.special / _SPECIAL_FUNCTIONS,
        tile.source: tile.bytes * NUM_SMS[target] / _BYTES[tile.source][target],
    }
    return Bound(tile, tile.flops / tile.bytes, cycles, max(cycles, key=lambda name: cycles[name]))


def uses_tensor_cores(spec: AttentionSpec | DecodeSpec) -> bool:
    """Return False for products in IEEE float32, which tensor cores do not have."""
    if spec.dtype_bits < 32:
        return True
    return isinstance(spec, AttentionSpec) and spec.precision == "tf32"


def count(
    kernel: str,
    spec: AttentionSpec | DecodeSpec,
    config: KernelConfig,
    padded: Callable[[int], int] = padded_head_dim,
    cap_functions: int = 2,
) -> Tile:
    """Count the work of one wholly visible tile, whose columns are `padded`.

    cap_functions: special functions of a score's softcap: two of a tanh by exponentials, one of a
    quotient of polynomials, none of a polynomial.
    """
    described = find_kernel(kernel)
    sizes = {"d": padded_keys(spec, padded), "dv": padded(spec.head_dim_v)}
    columns = (
        spec.cache.columns if isinstance(spec, DecodeSpec) else spec.head_dim + spec.head_dim_v
    )
    itemsize = spec.dtype_bits // 8
    match config:
        case FlashConfig() | DecodeConfig():
            rows, source = rows_per_tile(spec, config), "L2"
            loaded = config.block_kv * columns * itemsize
            if kernel == "paged_decode":
                source = "device memory"
            elif described.stationary == "block_kv":  # lse2 and delta come with q and dout
                loaded = rows * (columns * itemsize + 2 * 4)
            pairs = rows * config.block_kv
            special = pairs * (1 if spec.softcap is None else 1 + cap_functions)
            flops = 2 * pairs * sum(sizes[name] for name in described.products)
            return Tile(flops, special, loaded, source)
        case PreprocessConfig():  # reads dout, out and lse, writes lse2 and delta
            rows = config.block_q
            size = rows * (2 * spec.head_dim_v * itemsize + 3 * 4)
            return Tile(2 * rows * sizes["dv"], 0, size, "device memory")
        case CombineConfig():  # reads what the decode before it wrote: states in float32, their lse
            states = config.block_states
            return Tile(2 * states * sizes["dv"], states, states * (spec.head_dim_v + 1) * 4, "L2")
        case AppendConfig():  # reads k and v of some heads, writes them in the cache's dtype
            row = (spec.head_dim + spec.head_dim_v) * (ITEMSIZE[spec.dtype] + itemsize)
            return Tile(0, 0, config.block_heads * row, "device memory")
        case ListsConfig():  # reads ids or ends
            return Tile(0, 0, 4 * config.scan_rows, "L2")
    raise ValueError(f"config: no tile is known of {config!r}")


def rows_per_tile(spec: AttentionSpec | DecodeSpec, config: FlashConfig | DecodeConfig) -> int:
    if isinstance(config, DecodeConfig):
        assert isinstance(spec, DecodeSpec)
        return block_rows(spec, config)
    return config.block_q
