"""Into how many parts a paged decode divides each sequence's keys."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from twin_attention.contract.paged_spec import SPLITS_MAX, DecodeSpec, PagedSpec
from twin_attention.targets.conditions import KEYS_OF_ONE_SPLIT
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.kernels import DecodeConfig, WarpDecodeConfig

# A cascade's limits: sequences in a batch, sequences in a tile, and query rows in a tile.
CASCADE_BATCH, CASCADE_MEMBERS, CASCADE_ROWS = 1024, 16, 64
ROWS_OF_CHUNKS = 64  # the fewest per program if a sequence may have many new tokens


def decode_kernel(spec: DecodeSpec) -> str:
    """Return which configuration a paged decode uses: paged_decode's or paged_attention's.

    With more than one token per sequence on average, some sequences may have very many, and small
    tiles would read their keys too often.
    """
    has_chunks = isinstance(spec, PagedSpec) and spec.tokens > spec.batch
    return "paged_attention" if has_chunks else "paged_decode"


def block_rows(spec: DecodeSpec, config: DecodeConfig) -> int:
    """Return the query rows per program: a power of two up to the configured `max_rows`."""
    least = ROWS_OF_CHUNKS if decode_kernel(spec) == "paged_attention" else 16
    return min(config.max_rows, max(least, 1 << (spec.rows - 1).bit_length()))


def cascade_tile(spec: DecodeSpec) -> DecodeSpec | None:
    """Return the decode that a cascade runs over shared pages; None if it has nothing to gain."""
    by_position = spec.window_left is not None or spec.alibi
    if not spec.cascade or by_position or not 2 <= spec.batch <= CASCADE_BATCH:
        return None
    most = min(CASCADE_MEMBERS, CASCADE_ROWS // spec.rows, 1 << (spec.batch - 1).bit_length())
    if most < 2:
        return None
    members = 1 << (most.bit_length() - 1)
    batch = -(-spec.batch // members)
    return replace(spec, batch=batch, tokens=members * spec.tokens, has_tree=False)


class CascadeTiles(NamedTuple):
    """The numbers of a cascade's tiles of sequences.

    num_states: splits of shared keys.
    members: sequences of a full tile.
    block_keys: a prefix has a multiple of this many keys.
    block_batch: a power of two, at least the batch.
    """

    num_states: int
    members: int
    block_kv: int
    block_keys: int
    block_batch: int


def cascade_tiles(
    spec: DecodeSpec, tile: DecodeSpec, config: DecodeConfig, block_kv: int, num_sms: int
) -> CascadeTiles:
    """Return the numbers of a cascade's tiles; block_kv: of the decode over the other keys."""
    return CascadeTiles(
        num_states=choose_splits(tile, config, num_sms),
        members=tile.tokens // spec.tokens,
        block_kv=config.block_kv,
        block_keys=max(block_kv, config.block_kv),
        block_batch=1 << (spec.batch - 1).bit_length(),
    )


def num_row_tiles(spec: PagedSpec, rows: int) -> int:
    """Return an upper bound of a kv head's tiles of query rows; lengths are on the device."""
    return spec.tokens * spec.group_size // rows + spec.batch + 1


def skips_masks(spec: PagedSpec) -> bool:
    """Return True if tiles of keys that all rows of a program see get no mask.

    That takes a second loop, whose pipeline costs a program with few rows more than the masks.
    """
    return decode_kernel(spec) == "paged_attention"


def tiles_ahead(config: DecodeConfig) -> int:
    """Return how many tiles of keys, and of values, a program loads ahead.

    Each takes two stages of the pipeline: the table's entries are loaded before the keys.
    """
    return max(1, (config.num_stages - 1) // 2)


def programs_at_once(head_dim: int, config: DecodeConfig) -> int:
    """Return how many programs per SM saturate memory bandwidth, or tensor cores.

    A program with a small head dimension has fewer bytes in flight, so more programs are needed.
    With a larger one and many query rows, two hardly fit in shared memory. With more than 64 rows
    one program takes all of an SM's registers.
    """
    if isinstance(config, WarpDecodeConfig):
        return config.num_programs
    size = padded_head_dim(head_dim)
    if config.max_rows > 64:
        programs = 1
    elif tiles_ahead(config) == 1:
        programs = 3
    elif config.max_rows <= 32 or size <= 64:
        programs = 2
    else:
        programs = 1
    return programs * max(1, 128 // size)


def choose_splits(spec: DecodeSpec, config: DecodeConfig, num_sms: int) -> int:
    """Return the number of splits: what the caller asked for, or enough to give every SM work.

    It depends only on shapes. The block table's capacity may leave fewer.
    """
    if spec.num_splits is not None:
        return spec.num_splits
    if spec.reach <= KEYS_OF_ONE_SPLIT:
        return 1
    tiles = -(-spec.rows // block_rows(spec, config))
    programs = spec.batch * spec.heads_kv * tiles
    resident = programs_at_once(max(spec.head_dim, spec.head_dim_v), config) * num_sms
    visits = -(-spec.reach // config.block_kv)
    share = -(-visits // max(1, min(resident // programs, SPLITS_MAX)))
    return -(-visits // share)
