"""Checks of a pool of pages, and of the tables and lengths that say which pages are in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twin_attention.contract.paged_spec import PAGE_SIZE_MAX, TOKENS_MAX
from twin_attention.contract.spec import WINDOW_UNLIMITED
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.offsets import check_offset_values
from twin_attention.contract.validate.operands import Operand, check_dtype
from twin_attention.contract.validate.options import check_integer


def check_pages_arguments(
    k_pages: Operand,
    block_tables: Operand,
    seq_lens: Operand,
    cu_seqlens_q: Operand | None,
    num_new_tokens: Any,
) -> None:
    """Contents are not checked."""
    if num_new_tokens is not None:
        check_integer("num_new_tokens", num_new_tokens, 0, TOKENS_MAX)
        if cu_seqlens_q is not None:
            fail(ValueError, "num_new_tokens", "None beside cu_seqlens_q", num_new_tokens)
    check_pool(k_pages)
    batch, *_ = (block_tables if len(block_tables.shape) == 2 else seq_lens).shape[:1] or (0,)
    check_tables(k_pages, block_tables, seq_lens, batch)
    if cu_seqlens_q is not None:
        check_dtype(cu_seqlens_q, "int32")
        if cu_seqlens_q.shape != (batch + 1,):
            fail(ValueError, "cu_seqlens_q", f"shape {(batch + 1,)}", cu_seqlens_q.shape)


def check_page_ids(
    tables: np.ndarray,
    lengths: np.ndarray,
    offsets: np.ndarray | None,
    num_new_tokens: int | None,
    pool: Sequence[int],
) -> None:
    """Check where a decode reads and writes: lengths, and the page ids in use.

    Two sequences may not have new tokens in one page. offsets: [B + 1] integers, of packed new
    tokens. num_new_tokens: without packing, how many tokens of each sequence are new; 1 for None.
    """
    num_pages, page_size = pool
    if offsets is None:
        new = np.full(lengths.shape, 1 if num_new_tokens is None else num_new_tokens)
    else:
        check_offset_values("cu_seqlens_q", offsets, WINDOW_UNLIMITED)
        new = np.diff(offsets)
    capacity = tables.shape[1] * page_size
    used = np.arange(tables.shape[1]) * page_size < lengths[:, None]
    missing = used & ((tables < 0) | (tables >= num_pages))
    impossible = (lengths < 0) | (lengths > capacity)
    for b in np.flatnonzero(impossible | missing.any(axis=1))[:1]:
        if impossible[b]:
            fail(ValueError, f"seq_lens[{b}]", f"a length from 0 to {capacity}", lengths[b])
        i = np.flatnonzero(missing[b])[0]
        expected = f"one of the pool's {num_pages} pages"
        fail(ValueError, f"block_tables[{b}, {i}]", expected, tables[b, i])
    end = np.arange(1, tables.shape[1] + 1) * page_size
    written = used & (end > (lengths - new)[:, None]) & (new > 0)[:, None]
    writers: dict[int, int] = {}
    for b, i in np.argwhere(written):
        page = int(tables[b, i])
        if (other := writers.setdefault(page, b)) != b:
            expected = f"a page that sequence {other} does not write to as well"
            fail(ValueError, f"block_tables[{b}, {i}]", expected, page)


def check_pool(k_pages: Operand) -> None:
    if len(k_pages.shape) != 4:
        expected = "4 dimensions [P, page_size, Hkv, D]"
        fail(ValueError, "k_pages", expected, f"shape {k_pages.shape}")
    if not 1 <= k_pages.shape[1] <= PAGE_SIZE_MAX:
        expected = f"a page size from 1 to {PAGE_SIZE_MAX}"
        fail(NotImplementedError, "k_pages", expected, k_pages.shape[1])


def check_tables(k_pages: Operand, block_tables: Operand, seq_lens: Operand, batch: int) -> None:
    """Contents are not checked."""
    for x in (block_tables, seq_lens):
        check_dtype(x, "int32")
    if len(block_tables.shape) != 2 or block_tables.shape[0] != batch:
        fail(ValueError, "block_tables", f"shape ({batch}, max_pages)", block_tables.shape)
    if seq_lens.shape != (batch,):
        fail(ValueError, "seq_lens", f"shape {(batch,)}", seq_lens.shape)
    capacity = block_tables.shape[1] * k_pages.shape[1]
    if capacity >= 2**31:
        fail(NotImplementedError, "block_tables", "a capacity of less than 2^31 keys", capacity)
