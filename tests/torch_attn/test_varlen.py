import inspect
import re
from functools import partial
from itertools import accumulate

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sides import poisoned_memory
from tests.torch_attn.operators import check_operator
from torch_attn import check_offsets, flash_attention, flash_attention_varlen
from torch_attn.adapters.flash_attn import flash_attn_varlen_func
from torch_attn.interpreter import interpreted
from torch_attn.kernels.explicit.sequences import find_sequence as find_by_scalars
from torch_attn.kernels.library.sequences import find_sequence, first_tile, rows_of_tile
from twin_attention.targets.config import use_configs

SMALL_TILES = {
    "flash_fwd": {"block_q": 16, "block_kv": 32},
    "flash_bwd_preprocess": {"block_q": 32},
    "flash_bwd_dq": {"block_q": 32, "block_kv": 16},
    "flash_bwd_dkdv": {"block_q": 16, "block_kv": 16},
}
LENGTHS_Q, LENGTHS_KV = (3, 0, 37, 1, 5), (5, 6, 50, 1, 0)
HEADS = 2  # of queries, which share one head of keys: an interpreted program takes milliseconds
OPTIONS = {
    "causal": {"causal": True},
    "window-softcap": {"window_size": (20, 3), "softcap": 3.0},
    "sinks": {"causal": True, "sinks": True},
}


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def packed(padding: int = 7) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    cu_q, cu_kv = offsets(*LENGTHS_Q), offsets(*LENGTHS_KV)
    qkv = []
    for cu, heads, size in ((cu_q, HEADS, 16), (cu_kv, 1, 16), (cu_kv, 1, 24)):
        x = draw(int(cu[-1]) + padding, heads, size)
        x[int(cu[-1]) :] = torch.nan
        qkv.append(x)
    return qkv, cu_q, cu_kv


def _attend(cu_q, cu_kv, q, k, v, **options):
    return flash_attention_varlen(q, k, v, cu_q, cu_kv, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_packed_batch_has_the_bits_of_its_sequences_one_by_one(options):
    options = {"implementation": "triton", "deterministic": True, "return_lse": True} | options
    sinks = draw(HEADS) if options.pop("sinks", False) else None
    qkv, cu_q, cu_kv = packed()
    dout, dlse = draw(len(qkv[0]), HEADS, 24), draw(HEADS, len(qkv[0]))
    dout[int(cu_q[-1]) :] = torch.nan

    def results(attend, *x):
        x = [x.detach().requires_grad_() for x in x]
        *x, sink = x if sinks is not None else (*x, None)
        out, lse = attend(*x, sinks=sink, **options)
        inputs = [*x] if sink is None else [*x, sink]
        return out, lse, inputs

    with use_configs(SMALL_TILES), poisoned_memory():
        given = (*qkv, sinks) if sinks is not None else tuple(qkv)
        out, lse, inputs = results(partial(_attend, cu_q, cu_kv), *given)
        dq, dk, dv, *dsinks = torch.autograd.grad((out, lse), inputs, (dout, dlse))
        expected = torch.zeros(HEADS)
        for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_kv[:-1], cu_kv[1:], strict=True):
            queries, keys = slice(q0, q1), slice(k0, k1)
            one = [x[None, rows] for x, rows in zip(qkv, (queries, keys, keys), strict=True)]
            one = one if sinks is None else [*one, sinks]
            want, want_lse, inputs = results(flash_attention, *one)
            of_one = dout[None, queries], dlse[None, :, queries]
            gradients = torch.autograd.grad((want, want_lse), inputs, of_one)
            assert torch.equal(out[queries], want[0])
            if k0 < k1:
                assert torch.equal(lse[:, queries], want_lse[0])
            else:  # the dense call runs the reference
                torch.testing.assert_close(lse[:, queries], want_lse[0])
            for got, x, rows in zip((dq, dk, dv), gradients, (queries, keys, keys), strict=False):
                assert torch.equal(got[rows], x[0])
            expected += sum(gradients[3:])
    rest_q, rest_kv = slice(int(cu_q[-1]), None), slice(int(cu_kv[-1]), None)
    for x in (out[rest_q], dq[rest_q], dk[rest_kv], dv[rest_kv]):
        assert not x.any()
    nothing = torch.full((HEADS,), -torch.inf) if sinks is None else sinks
    torch.testing.assert_close(lse[:, rest_q], nothing[:, None].expand(HEADS, 7))
    for got in dsinks:  # a row without a key has its sink alone
        torch.testing.assert_close(got, expected + dlse[:, rest_q].sum(1))


@triton.jit
def _locate_kernel(
    cu_seqlens, cu_seqlens_other, found, num_rows, num_rows_other, num_sequences,
    BLOCK: tl.constexpr, BY_SCALARS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if BY_SCALARS:
        owner = find_by_scalars(cu_seqlens, tile, num_sequences, BLOCK)
    else:
        owner = find_sequence(cu_seqlens, tile, num_sequences, BLOCK)
    sequence, first, start, end, first_other, size_other = rows_of_tile(
        cu_seqlens, cu_seqlens_other, owner, tile, num_rows, num_rows_other, num_sequences, BLOCK
    )
    padded = first_tile(first, sequence, BLOCK) * BLOCK + start - first
    tl.store(found + tile * 6 + 0, sequence)
    tl.store(found + tile * 6 + 1, start)
    tl.store(found + tile * 6 + 2, end)
    tl.store(found + tile * 6 + 3, first_other)
    tl.store(found + tile * 6 + 4, size_other)
    tl.store(found + tile * 6 + 5, padded)


def locate(by_scalars: bool, cu: torch.Tensor, cu_other: torch.Tensor, rows: int, rows_other: int):
    tiles = rows // 16 + len(cu)
    found = torch.zeros(tiles, 6, dtype=torch.int32)
    sizes = rows, rows_other, len(cu) - 1
    options = {"BLOCK": 16, "BY_SCALARS": by_scalars}
    interpreted(_locate_kernel)[(tiles,)](cu, cu_other, found, *sizes, **options)
    return found.tolist(), tiles


both_searches = pytest.mark.parametrize("by_scalars", [False, True])


@both_searches
@pytest.mark.parametrize("count", [0, 1, 5, 127, 128, 300])
def test_every_row_is_in_one_tile_of_its_sequence(count, by_scalars):
    lengths = torch.arange(count) * 7 % 23 * (torch.arange(count) % 3 > 0)
    lengths_other = torch.arange(count) % 5
    cu, cu_other = offsets(*lengths), offsets(*lengths_other)
    rows = int(cu[-1]) + 37
    found, tiles = locate(by_scalars, cu, cu_other, rows, int(cu_other[-1]) + 9)
    seen, stored = [], []
    for sequence, start, end, first_other, size_other, padded in found:
        for row in range(start, min(start + 16, end)):
            seen.append(row)
            assert sequence == count or cu[sequence] <= row < cu[sequence + 1]
        if start < end:
            stored.append(padded)
            assert padded % 16 == 0
            assert 0 <= padded < tiles * 16
            assert first_other == cu_other[sequence]
            assert size_other == (0 if sequence == count else lengths_other[sequence])
        else:
            assert size_other == 0
    assert sorted(seen) == list(range(rows))
    assert len({*stored}) == len(stored)


anything = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-9, 60), min_size=3, max_size=3)


@both_searches
@settings(max_examples=30, deadline=None)
@given(anything, anything)
def test_no_offsets_lead_outside_the_tensors(by_scalars, one, other):
    cu, cu_other = (torch.tensor(x, dtype=torch.int32) for x in (one, other))
    found, tiles = locate(by_scalars, cu, cu_other, 50, 40)
    for _, start, end, first_other, size_other, padded in found:
        assert 0 <= start <= end <= 50
        assert 0 <= first_other <= first_other + size_other <= 40
        assert 0 <= padded <= (tiles - 1) * 16


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    cu = offsets(9, 14)
    q, k, v = (draw(26, heads, 16, dtype=dtype) for heads in (HEADS, 1, 1))
    return q, k, v, cu, cu


def test_opcheck():
    ops = torch.ops.twin_attention
    q, k, v, cu, _ = operands()
    sinks = draw(HEADS).requires_grad_()
    qkv = [x.requires_grad_() for x in (q, k, v)]
    options = (None, None, 0, None, True, "ieee", False, 0.0, False)
    no_tree_nor_terms = (None,) * 7
    for sink in (None, sinks):
        arguments = (*qkv, cu, cu, sink, *no_tree_nor_terms, *options)
        check_operator(ops.flash_varlen_fwd.default, *arguments)
    out, lse = (x.detach() for x in ops.flash_varlen_fwd(*arguments, "reference"))
    given = (*(x.detach() for x in qkv), cu, cu, sinks.detach(), *no_tree_nor_terms)
    arguments = (out, lse, *given, out, lse, None, "sinks", *options)
    check_operator(ops.flash_varlen_bwd.default, *arguments)


def test_compile_with_other_offsets_is_one_graph():
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    attend = torch.compile(
        lambda *x: flash_attention_varlen(*x, causal=True), backend=backend, fullgraph=True
    )
    q, k, v, *_ = operands()
    for cu in (offsets(9, 14), offsets(20, 3), offsets(0, 26)):
        want = flash_attention_varlen(q, k, v, cu, cu, causal=True)
        torch.testing.assert_close(attend(q, k, v, cu, cu), want)
    assert len(graphs) == 1


def test_autocast_casts_as_flash_attention_does():
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attention_varlen(*operands()).dtype == torch.bfloat16


def test_what_has_no_rule_is_refused():
    q, *others = operands()
    attend = lambda q: flash_attention_varlen(q, *others)  # noqa: E731
    message = "flash_attention_varlen: vmap is not supported; pack the sequences of the whole batch"
    with pytest.raises(NotImplementedError, match=f"^{message}$"):
        torch.vmap(attend)(q[None])
    q.requires_grad_()
    (dq,) = torch.autograd.grad(attend(q).sum(), q)
    assert torch.func.grad(lambda q: attend(q).sum())(q.detach()).equal(dq)


def test_check_offsets_names_the_first_bad_one():
    cu = offsets(9, 14)
    check_offsets(cu, cu, tokens_q=23, tokens_kv=26)
    message = "cu_seqlens_kv[2]: expected an offset from 9 to 22, got 23"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_offsets(cu, cu, tokens_q=23, tokens_kv=22)


def test_the_adapter_has_flash_attns_signature_and_meaning():
    names = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale"
    names += " causal window_size softcap alibi_slopes deterministic return_attn_probs block_table"
    assert list(inspect.signature(flash_attn_varlen_func).parameters) == names.split()
    x = operands()
    got = flash_attn_varlen_func(*x, 14, 14, 0.0, 0.3, True, (5, -1), 2.0)
    options = {"scale": 0.3, "causal": True, "window_size": (5, None), "softcap": 2.0}
    assert got.equal(flash_attention_varlen(*x, **options))
    for name, value in (("block_table", x[3]), ("return_attn_probs", True)):
        with pytest.raises(NotImplementedError, match=f"^{name}: expected"):
            flash_attn_varlen_func(*x, 14, 14, **{name: value})
