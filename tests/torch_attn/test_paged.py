from itertools import accumulate

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torch_attn.operators import check_operator
from torch_attn import paged_attention
from torch_attn.interpreter import interpreted
from torch_attn.kernels.explicit import sequences as scalars
from torch_attn.kernels.library.sequences import locate_tokens

op = torch.ops.twin_attention.paged_attention.default


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(9, 4, 16, generator=generator).to(dtype)
    pools = torch.randn(2, 5, 8, 2, 16, generator=generator).bfloat16()
    tables = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    return q, *pools, tables, torch.tensor([13, 4], dtype=torch.int32), offsets(3, 4)


@triton.jit
def _locate_kernel(
    cu_seqlens,
    found,
    num_tokens,
    num_sequences,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALARS: tl.constexpr,
):
    tile = tl.program_id(0)
    if SCALARS:
        place = scalars.locate_tokens(cu_seqlens, tile, num_tokens, num_sequences, ROWS, BLOCK)
    else:
        place = locate_tokens(cu_seqlens, tile, num_tokens, num_sequences, ROWS, BLOCK)
    for i in tl.static_range(4):
        tl.store(found + tile * 4 + i, place[i])


def locate(cu, num_tokens: int, rows: int, block: int, of_scalars: bool = False) -> list[list[int]]:
    count = len(cu) - 1
    tiles = num_tokens * rows // block + count + 1
    found = torch.empty(tiles, 4, dtype=torch.int32)
    numbers = {"ROWS": rows, "BLOCK": block, "SCALARS": of_scalars}
    interpreted(_locate_kernel)[(tiles,)](cu, found, num_tokens, count, **numbers)
    return found.tolist()


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [((), 3), ((0,), 3), ((7, 0, 30, 1, 1), 3), ((7, 0, 30, 1, 1), 40), ((1,) * 130, 1)],
)
@pytest.mark.parametrize("of_scalars", [False, True])
def test_tiles_have_each_row_of_each_sequence_once(lengths, rows, of_scalars):
    cu = offsets(*lengths)
    total, seen = int(cu[-1]) + 4, []
    for sequence, first, tokens, start in locate(cu, total, rows, 16, of_scalars):
        ends = [*cu.tolist(), total]
        assert (first, first + tokens) == (ends[sequence], ends[sequence + 1])
        end = min(start + 16, tokens * rows)
        seen += [first * rows + row for row in range(start, end)]
    assert sorted(seen) == [*range(total * rows)]


def test_the_first_tile_of_each_sequence_comes_before_the_others():
    tiles = locate(offsets(30, 0, 1, 17), 52, 1, 16)
    assert [(sequence, start) for sequence, *_, start in tiles[:5]] == [(n, 0) for n in range(5)]


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-9, 60), min_size=3, max_size=3),
    st.sampled_from([1, 5]),
    st.booleans(),
)
def test_no_offsets_lead_outside_the_tensors(cu, rows, of_scalars):
    cu = torch.tensor(cu).int()
    for sequence, first, tokens, start in locate(cu, 50, rows, 16, of_scalars):
        assert 0 <= sequence <= 2
        assert 0 <= first <= first + tokens <= 50
        assert 0 <= start <= 50 * rows + 3 * 16


def test_opcheck():
    q, *others = operands()
    ends = torch.full((len(q),), 2, dtype=torch.int32)
    for tree_ends, left in ((None, 5), (ends, None)):
        options = tree_ends, None, None, None, left, None, 2, False, None, False
        check_operator(op, q, *others, torch.randn(4), None, None, *options)


def test_compile_with_other_offsets_is_one_graph():
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    attend = torch.compile(paged_attention, backend=backend, fullgraph=True)
    *others, _ = operands()
    for cu in (offsets(3, 4), offsets(0, 9), offsets(8, 1)):
        torch.testing.assert_close(attend(*others, cu), paged_attention(*others, cu))
    assert len(graphs) == 1


def test_autocast_casts_queries_and_never_the_cache():
    with torch.autocast("cpu", torch.bfloat16):
        assert paged_attention(*operands(torch.float32)).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match=r"^q: expected dtype"):
        paged_attention(*operands(torch.float32))


def test_what_has_no_rule_is_refused():
    q, *others = operands()
    message = "paged_attention: vmap is not supported; pack the sequences of the whole batch"
    with pytest.raises(NotImplementedError, match=f"^{message}$"):
        torch.vmap(lambda q: paged_attention(q, *others))(q[None])
    with pytest.raises(NotImplementedError, match=r"^paged_attention: a gradient is not supported"):
        paged_attention(q.requires_grad_(), *others)
    with torch.no_grad():
        paged_attention(q, *others)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replay_a_cuda_graph_with_other_offsets():
    given = [x.cuda() for x in operands()]
    paged_attention(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*given)
    for cu, lengths in (
        (offsets(3, 4), [13, 4]),
        (offsets(0, 9), [1, 16]),
        (offsets(8, 1), [9, 2]),
    ):
        given[4].copy_(torch.tensor(lengths))
        given[5].copy_(cu)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, paged_attention(*given))
