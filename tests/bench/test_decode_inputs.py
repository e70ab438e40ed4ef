"""The tensors of decode cases: what dense peers get is what the pages hold."""

from dataclasses import replace

import pytest
import torch

from bench.suites.decode_inputs import decode_tensors, fitted
from interop.parity.cases import DecodeCase

CASE = DecodeCase("case", lengths=(100, 100), tokens=1, page_size=16, max_pages=64)


def test_the_pool_does_not_grow_with_the_capacity():
    wide, narrow = decode_tensors(CASE, "cpu"), decode_tensors(fitted(CASE), "cpu")
    assert wide.block_tables.shape == (2, 64)
    assert torch.equal(wide.block_tables[:, :7], narrow.block_tables)
    assert (wide.block_tables[:, 7:] == -1).all()
    assert wide.k_pages.shape == narrow.k_pages.shape == (17, 16, 2, 64)


def test_pages_are_in_random_order_and_what_is_unused_is_poisoned():
    tensors = decode_tensors(CASE, "cpu")
    used = tensors.block_tables[:, :7].flatten()
    assert used.unique().numel() == 14
    assert (used.diff() != 1).any()
    assert tensors.k_pages.isnan().flatten(1).any(1).sum() == 5  # 3 spare ones, 2 that end early


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
def test_the_dense_cache_is_what_the_pages_hold(kv_dtype):
    tensors = decode_tensors(replace(CASE, kv_dtype=kv_dtype), "cpu")
    names = {"q", "k_pages", "v_pages", "block_tables", "seq_lens"}
    assert set(tensors.arguments) - names == ({"k_scale", "v_scale"} if kv_dtype else set())
    for x, pool in zip(tensors.dense, (tensors.k_pages, tensors.v_pages), strict=True):
        assert x.shape == (2, 100, 2, 64)
        for sequence, key in ((0, 0), (0, 99), (1, 16)):
            page = tensors.block_tables[sequence, key // 16]
            assert torch.equal(x[sequence, key].float(), pool[page, key % 16].float())
