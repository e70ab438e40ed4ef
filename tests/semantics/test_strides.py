"""Strided torch views mean what contiguous tensors mean (JAX arrays have no strides).

Kernels give the same bits; the reference's products may choose their order.
"""

from dataclasses import replace

import pytest
import torch

from tests.oracle import assert_within_budget
from tests.semantics.strided import far_apart, heads_first, in_a_poisoned_box
from tests.sides import TorchSide, attention, poisoned_memory
from torch_attn.layouts import layouts_of
from torch_attn.operands import rows_aligned
from twin_attention.interop.parity.cases import (
    AppendCase,
    BlockSparseCase,
    ContextCase,
    DecodeCase,
    DilatedCase,
    FlashCase,
    MergeCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import call

CASE = FlashCase(
    "strides", batch=2, seq_q=70, seq_kv=70, heads_q=2, heads_kv=2, head_dim=40, causal=True
)


@pytest.fixture(scope="module")
def torch_side(torch_device):
    return TorchSide(torch_device)


def assert_layout_does_not_matter(side, inputs, strided, case, implementation):
    options = case.options | {"implementation": implementation}
    assert_within_budget(attention(side, strided, **options), inputs, case.spec)
    options["deterministic"] = True
    got = attention(side, strided, **options)
    assert_within_budget(got, inputs, case.spec)
    if implementation != "reference":
        for name, x in attention(side, inputs, **options).items():
            assert torch.equal(got[name], x)


def packed(*tensors):
    """Views of one [B, S, heads + 1, D] tensor whose last head is NaN."""
    gap = torch.full_like(tensors[0][:, :, :1], float("nan"))
    sizes = [x.shape[2] for x in tensors]
    return torch.cat([*tensors, gap], dim=2).split([*sizes, 1], dim=2)[:-1]


def every_other_row(x):
    wide = torch.full_like(x.repeat_interleave(2, dim=1), float("nan"))
    wide[:, ::2] = x
    return wide[:, ::2]


LAYOUTS = {
    "packed": packed,
    "heads first": lambda *qkv: [*map(heads_first, qkv)],
    "sequence first": lambda *qkv: [x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv],
    "poisoned box": lambda *qkv: [*map(in_a_poisoned_box, qkv)],
    "every other row": lambda *qkv: [*map(every_other_row, qkv)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_q_k_v(torch_side, implementation, torch_device, layout):
    inputs = make_inputs(CASE, torch_device)
    q, k, v = LAYOUTS[layout](*(inputs[name] for name in "qkv"))
    assert not q.is_contiguous()
    strided = inputs | {"q": q, "k": k, "v": v}
    assert_layout_does_not_matter(torch_side, inputs, strided, CASE, implementation)


def test_expanded_inputs(torch_side, implementation, torch_device):
    inputs = make_inputs(CASE, torch_device)
    strided = inputs | {name: inputs[name][:1, :, :1].expand_as(inputs[name]) for name in "kv"}
    inputs |= {name: strided[name].contiguous() for name in "kv"}
    assert_layout_does_not_matter(torch_side, inputs, strided, CASE, implementation)


@pytest.mark.parametrize("layout", [heads_first, lambda x: x.mT.contiguous().mT, in_a_poisoned_box])
def test_any_layout_of_dout(torch_side, implementation, torch_device, layout):
    inputs = make_inputs(CASE, torch_device)
    dlse = inputs["dlse"].mT.contiguous().mT
    strided = inputs | {"dout": layout(inputs["dout"]), "dlse": dlse}
    assert_layout_does_not_matter(torch_side, inputs, strided, CASE, implementation)


def test_expanded_gradients(torch_side, implementation, torch_device):
    """What ``(out.sum() + lse.sum()).backward()`` sends: one number with strides of 0."""
    inputs = make_inputs(CASE, torch_device)
    sent = {x: inputs[x].new_ones(()).expand_as(inputs[x]) for x in ("dout", "dlse")}
    strided = inputs | sent
    inputs |= {name: x.contiguous() for name, x in sent.items()}
    assert_layout_does_not_matter(torch_side, inputs, strided, CASE, implementation)


@pytest.mark.parametrize(
    ("dimension", "sizes"),
    [(0, {"batch": 2}), (1, {"seq_q": 300, "seq_kv": 300}), (2, {"heads_q": 2, "heads_kv": 2})],
    ids=["batch", "rows", "heads"],
)
def test_offsets_past_32_bits(torch_side, torch_device, dimension, sizes):
    """A dimension's last element lies 2^31 elements away. Untouched pages take no memory."""
    case = replace(CASE, **({"batch": 1, "heads_q": 1, "heads_kv": 1, "head_dim": 16} | sizes))
    inputs = make_inputs(case, torch_device)
    far = {name: far_apart(inputs[name], dimension) for name in "qkv"}
    strided = inputs | far
    assert_layout_does_not_matter(torch_side, inputs, strided, case, "triton")


ONE = {"batch": 1, "heads_q": 1, "heads_kv": 1, "head_dim": 16}
PAGE = {"heads_kv": 1, "head_dim": 16, "page_size": 1, "max_pages": 1}
SMALLEST = (
    FlashCase("one key", **ONE, seq_q=1, seq_kv=1, bias="bhqk", sinks=True, alibi="all"),
    FlashCase("one column", **ONE, seq_q=1, seq_kv=9, bias="bhq", relative=0),
    FlashCase("ids", **ONE, seq_q=1, seq_kv=1, segments="documents", dropout_rate=0.5),
    FlashCase("tree", **ONE, seq_q=1, seq_kv=1, tree="nested", causal=True),
    VarlenCase("packed", ((1, 1),), (0, 0), 1, 1, 16, sinks=True, relative=0),
    VarlenCase("slopes", ((1, 1),), (0, 0), 1, 1, 16, alibi="all", tree="nested"),
    BlockSparseCase("mask", **ONE, seq_q=1, seq_kv=1, kept=1.0),
    DilatedCase("dilated", **ONE, seq_q=1, seq_kv=1, segment_lengths=(1,), dilation_rates=(1,)),
    ContextCase("ranks", **ONE, seq_q=2, seq_kv=2, sharding="contiguous"),
    DecodeCase("decode", (1,), heads_q=1, **PAGE, sinks=True, kv_dtype="int8", scale_shape=(1,)),
    DecodeCase("drafts", (1,), 1, 1, **PAGE, tree="drafts", kv_dtype="float8_e4m3fn"),
    DecodeCase("cascade", (1, 1), heads_q=1, **PAGE, cascade=True, common_pages=1, latent=True),
    PagedCase("chunks", (1,), heads_q=1, **PAGE, new_tokens=(1,), alibi="all"),
    AppendCase("append", (1,), 1, heads_q=1, **PAGE, rotary_dim=2, positions=1),
    MergeCase("merge", num_states=1, batch=1, tokens=1, heads=1, head_dim_v=16),
)


def with_odd_strides(x):
    """Give each axis of size 1 a stride that is a multiple of nothing."""
    strides = (7 if size == 1 else n for size, n in zip(x.shape, x.stride(), strict=True))
    return x.as_strided(x.shape, tuple(strides))


@pytest.mark.parametrize("case", SMALLEST, ids=lambda case: case.name)
def test_an_axis_of_size_one_may_have_any_stride(torch_side, implementation, torch_device, case):
    inputs = make_inputs(case, torch_device)
    odd = {name: with_odd_strides(x) for name, x in inputs.items()}
    assert any(x.stride() != inputs[name].stride() for name, x in odd.items())
    got, want = (call(torch_side, case, x, implementation) for x in (odd, inputs))
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=0, equal_nan=True)


def test_launches_do_not_see_the_stride_of_an_axis_of_size_one(torch_device):
    for shape in ((1, 1, 1, 16), (1, 5, 1, 16), (1, 1), (3, 1, 1, 4, 1), (1,), ()):
        x = torch.zeros(shape, dtype=torch.float16, device=torch_device)
        odd = with_odd_strides(x)
        assert layouts_of((odd,)) == layouts_of((x,))
        assert rows_aligned(odd) == rows_aligned(x)


def test_unwritten_memory_is_seen(torch_device):
    """Other tests need memory that a call allocates to hold NaN."""
    with poisoned_memory():
        for x in (
            torch.empty(3, 4, device=torch_device),
            torch.empty_like(torch.ones(5, device=torch_device, dtype=torch.bfloat16)),
        ):
            assert x.isnan().all()
