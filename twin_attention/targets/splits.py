"""Choose in how many parts a paged decode works on each sequence's keys."""

from __future__ import annotations

from twin_attention.contract.spec import SPLITS_MAX, DecodeSpec
from twin_attention.targets.conditions import KEYS_OF_ONE_SPLIT
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.kernels import DecodeConfig, WarpDecodeConfig


def block_rows(spec: DecodeSpec, config: DecodeConfig) -> int:
    """Return the query rows per program: a power of two from 16 to the configured `max_rows`."""
    rows = spec.tokens * spec.group_size
    return min(config.max_rows, max(16, 1 << (rows - 1).bit_length()))


def tiles_ahead(config: DecodeConfig) -> int:
    """Return how many tiles of keys, and of values, a program loads ahead.

    Each takes two stages of the pipeline: the table's entries are loaded before the keys.
    """
    return max(1, (config.num_stages - 1) // 2)


def programs_at_once(head_dim: int, config: DecodeConfig) -> int:
    """Return how many programs per SM saturate memory bandwidth.

    A program of a small head size has fewer bytes in flight, so more programs are needed. One of a
    larger size with many query rows is the fastest alone: two hardly fit shared memory, and on an
    A100 they do not.
    """
    if isinstance(config, WarpDecodeConfig):
        return config.num_programs
    size = padded_head_dim(head_dim)
    if tiles_ahead(config) == 1:
        programs = 3
    elif config.max_rows <= 32 or size <= 64:
        programs = 2
    else:
        programs = 1
    return programs * max(1, 128 // size)


def choose_splits(spec: DecodeSpec, config: DecodeConfig, num_sms: int) -> int:
    """Return the number of splits: what the caller asked for, or enough to give every SM work.

    It follows from shapes alone. Each split takes its share of a sequence's real length, so more
    splits than a short sequence needs cost little. There are fewer where the capacity of the block
    table would leave some splits without a tile.
    """
    if spec.num_splits is not None:
        return spec.num_splits
    if spec.reach <= KEYS_OF_ONE_SPLIT:
        return 1
    tiles = -(-spec.tokens * spec.group_size // block_rows(spec, config))
    programs = spec.batch * spec.heads_kv * tiles
    resident = programs_at_once(max(spec.head_dim, spec.head_dim_v), config) * num_sms
    visits = -(-spec.reach // config.block_kv)
    share = -(-visits // max(1, min(resident // programs, SPLITS_MAX)))
    return -(-visits // share)
