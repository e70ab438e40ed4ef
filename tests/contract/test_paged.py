from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from twin_attention.contract.operands import DecodeOperands, PagedOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.reference.paged import paged_forward, ragged_forward
from twin_attention.contract.spec import MergeSpec
from twin_attention.interop.parity.cases import PagedCase
from twin_attention.interop.parity.inputs import make_inputs

# A chunk, no new token, a whole prompt, more new tokens than keys.
CASE = PagedCase(
    "contract", (60, 33, 9, 3), new_tokens=(20, 0, 9, 5), padding=4, page_size=7, max_pages=9,
    head_dim=16, head_dim_v=24, dtype="float16", sinks=True,
)  # fmt: skip


def operands(case):
    inputs = {name: x.numpy() for name, x in make_inputs(case, "cpu").items()}
    return PagedOperands(**inputs)


@pytest.mark.parametrize(
    "changes", [{}, {"window_size": (6, None), "softcap": 3.0}, {"tree": "any"}], ids=str
)
def test_sequences_are_those_one_by_one(changes):
    case = replace(CASE, **changes)
    given, spec = operands(case), case.spec
    out, lse = ragged_forward(given, spec, np.float64)
    for b, (begin, end) in enumerate(pairwise(given.cu_seqlens_q)):
        own = DecodeOperands(
            given.q[None, begin:end], given.k_pages, given.v_pages,
            given.block_tables[b : b + 1], given.seq_lens[b : b + 1], given.sinks,
            tree_ends=None if given.tree_ends is None else given.tree_ends[None, begin:end],
        )  # fmt: skip
        want, want_lse = paged_forward(own, spec.sequence(end - begin), np.float64)
        np.testing.assert_allclose(out[begin:end], want[0], atol=1e-12)
        np.testing.assert_allclose(lse[:, begin:end], want_lse[0], atol=1e-12)
    assert not out[end:].any()
    np.testing.assert_allclose(lse[:, end:], np.broadcast_to(given.sinks[:, None], (4, 4)))


def test_what_follows_from_a_problem():
    spec = CASE.spec
    assert (spec.batch, spec.tokens, spec.group_size) == (4, 38, 2)
    assert spec.rows == 20  # 10 tokens each, rounded up
    assert spec.merge(3) == MergeSpec(3, 1, 38, 4, 24, "float16")
    assert type(spec.sequence(5)) is DecodeSpec
    assert (spec.sequence(5).batch, spec.sequence(5).rows) == (1, 10)
