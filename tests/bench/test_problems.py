"""Jobs of the problems that suites time: costs, tensors, and calls through their gates."""

from dataclasses import replace

import pytest
import torch

from bench.job import Subject
from bench.peers import FLASH
from bench.problems import attention_jobs, attention_tensors, decode_tensors, fitted
from interop.parity.cases import DecodeCase, FlashCase

CASE = FlashCase("case", batch=1, seq_q=40, seq_kv=72, head_dim=16, causal=True)
EAGER = Subject("eager")
DECODE = DecodeCase("case", lengths=(100, 100), tokens=1, page_size=16, max_pages=64)


def job(operation):
    (made,) = attention_jobs([CASE], (operation,), lambda case: {EAGER: FLASH["eager"]})
    return made


def test_the_cost_is_of_the_operation():
    forward, backward, both = map(job, ("forward", "backward", "both"))
    pairs = 2 * (40 * 32 + 40 * 41 // 2)  # query i sees i + 33 keys
    assert (forward.flops, backward.flops) == (4 * 16 * pairs, 10 * 16 * pairs)
    q, k, lse = 40 * 2 * 16 * 2, 72 * 2 * 16 * 2, 4 * 2 * 40
    assert (forward.bytes, backward.bytes) == (2 * q + 2 * k + lse, 4 * q + 4 * k + lse)
    assert both.flops == forward.flops + backward.flops
    assert both.bytes == forward.bytes + backward.bytes


@pytest.mark.parametrize("operation", ["forward", "backward", "both"])
def test_the_gate_takes_what_the_call_gives(operation):
    made, tensors = job(operation), attention_tensors(CASE, "cpu")
    call, check = made.factories[EAGER](tensors), made.check(tensors)
    arrays = call.result(call.run())
    assert check(arrays) < 1
    assert check([x + 1 for x in arrays]) > 1


def test_the_pool_does_not_grow_with_the_capacity():
    wide, narrow = decode_tensors(DECODE, "cpu"), decode_tensors(fitted(DECODE), "cpu")
    assert wide.block_tables.shape == (2, 64)
    assert torch.equal(wide.block_tables[:, :7], narrow.block_tables)
    assert (wide.block_tables[:, 7:] == -1).all()
    assert wide.k_pages.shape == narrow.k_pages.shape == (17, 16, 2, 64)


def test_pages_are_in_random_order_and_what_is_unused_is_poisoned():
    tensors = decode_tensors(DECODE, "cpu")
    used = tensors.block_tables[:, :7].flatten()
    assert used.unique().numel() == 14
    assert (used.diff() != 1).any()
    assert tensors.k_pages.isnan().flatten(1).any(1).sum() == 5  # 3 spare ones, 2 that end early


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
def test_the_dense_cache_is_what_the_pages_hold(kv_dtype):
    tensors = decode_tensors(replace(DECODE, kv_dtype=kv_dtype), "cpu")
    names = {"q", "k_pages", "v_pages", "block_tables", "seq_lens"}
    assert set(tensors.arguments) - names == ({"k_scale", "v_scale"} if kv_dtype else set())
    for x, pool in zip(tensors.dense, (tensors.k_pages, tensors.v_pages), strict=True):
        assert x.shape == (2, 100, 2, 64)
        for sequence, key in ((0, 0), (0, 99), (1, 16)):
            page = tensors.block_tables[sequence, key // 16]
            assert torch.equal(x[sequence, key].float(), pool[page, key % 16].float())
