"""torch's views mean what contiguous tensors mean; nothing outside them is read or written.

Kernels give the same bits; the reference's products may choose their order.
"""

from dataclasses import replace

import pytest
import torch

import torch_attn
from tests.oracle import assert_within_budget
from tests.semantics.strided import far_apart, heads_first, in_a_poisoned_box
from tests.sides import TorchSide
from twin_attention.interop.parity.cases import DecodeCase, PagedCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = DecodeCase(
    "strides", lengths=(7, 0, 63), tokens=2, head_dim=24, head_dim_v=24, page_size=5, max_pages=13,
    num_splits=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def torch_side(torch_device):
    return TorchSide(torch_device)


def one_pool(k_pages, v_pages):
    pool = torch.stack([k_pages, v_pages], dim=1)
    return pool[:, 0], pool[:, 1]


LAYOUTS = [
    one_pool,
    lambda *pools: [*map(heads_first, pools)],
    lambda *pools: [*map(in_a_poisoned_box, pools)],
]


def decode(side, implementation, inputs, **options):
    options = CASE.options | {"implementation": implementation} | options
    return side.call("paged_decode", inputs, return_lse=True, **options)


def assert_layout_does_not_matter(side, implementation, inputs, strided):
    got = decode(side, implementation, inputs | strided)
    assert_within_budget(got, inputs, CASE.spec)
    if implementation == "triton":
        for a, b in zip(got, decode(side, implementation, inputs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_the_pools(torch_side, implementation, torch_device, layout):
    inputs = make_inputs(CASE, torch_device)
    k_pages, v_pages = layout(inputs["k_pages"], inputs["v_pages"])
    assert not k_pages.is_contiguous()
    strided = {"k_pages": k_pages, "v_pages": v_pages}
    assert_layout_does_not_matter(torch_side, implementation, inputs, strided)


def test_any_layout_of_the_rest(torch_side, implementation, torch_device):
    inputs = make_inputs(CASE, torch_device)
    strided = {name: in_a_poisoned_box(inputs[name]) for name in ("q", "block_tables", "seq_lens")}
    assert_layout_does_not_matter(torch_side, implementation, inputs, strided)


def test_one_table_for_many_sequences(torch_side, implementation, torch_device):
    inputs = make_inputs(CASE, torch_device)
    table = inputs["block_tables"][2:].expand(3, -1)
    inputs["block_tables"] = table.contiguous()
    strided = {"block_tables": table}
    assert_layout_does_not_matter(torch_side, implementation, inputs, strided)


def test_nothing_is_read_outside_the_pool(torch_side, implementation, torch_device):
    """All around the pool and the tables is NaN or no page's id."""
    inputs = make_inputs(replace(CASE, lengths=(63, 64, 65)), torch_device)
    for name in ("k_pages", "v_pages"):
        inputs[name] = in_a_poisoned_box(inputs[name].nan_to_num(1.0))
    pages = len(inputs["k_pages"])
    inputs["block_tables"][0, :4] = torch.tensor([-1, pages, 2**31 - 1, -(2**31)])
    inputs["block_tables"] = in_a_poisoned_box(inputs["block_tables"])
    inputs["seq_lens"] = torch.tensor([63, 66, 2**31 - 1], dtype=torch.int32, device=torch_device)
    for x in decode(torch_side, implementation, inputs):
        assert x.isfinite().all()


def append(implementation, inputs, pools):
    k_new, v_new = inputs["q"][:, :, :2], inputs["q"][:, :, 2:]
    torch_attn.append_kv(
        k_new, in_a_poisoned_box(v_new), *pools, inputs["block_tables"], inputs["seq_lens"],
        implementation=implementation,
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_into_any_layout(implementation, torch_device, layout):
    inputs = make_inputs(CASE, torch_device)
    pools = [inputs[name].nan_to_num(7.0) for name in ("k_pages", "v_pages")]
    strided = layout(*pools)
    around = [x._base.isnan() for x in strided]
    append(implementation, inputs, strided)
    append(implementation, inputs, pools)
    for got, want, outside in zip(strided, pools, around, strict=True):
        assert torch.equal(got, want)
        assert torch.equal(got._base.isnan(), outside)


@pytest.mark.parametrize("axis", [0, 1], ids=["pages", "slots"])
def test_offsets_past_32_bits(torch_side, torch_device, axis):
    """The last page, or slot, lies 2^31 elements away."""
    inputs = make_inputs(CASE, torch_device)
    tables, last = inputs["block_tables"], len(inputs["k_pages"]) - 1
    page = int(tables[2, 12])  # it holds the longest sequence's new tokens, and goes to the end
    inputs["block_tables"] = tables.where(tables != last, page).where(tables != page, last)
    far = {}
    for name in ("k_pages", "v_pages"):
        pool = inputs[name]
        pool[[page, last]] = pool[[last, page]]
        far[name] = far_apart(pool, axis)
    assert_layout_does_not_matter(torch_side, "triton", inputs, far)
    pools = [inputs[name] for name in far]
    append("triton", inputs, pools)
    append("triton", inputs, list(far.values()))
    for got, want in zip(far.values(), pools, strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("axis", [1, 2], ids=["tokens", "heads"])
def test_new_tokens_past_32_bits(torch_side, torch_device, axis):
    """The last new token of a sequence, or the last head, lies 2^31 elements away."""
    inputs = make_inputs(replace(CASE, tokens=3), torch_device)
    far = {"q": far_apart(inputs["q"], axis)}
    for a, b in zip(
        decode(torch_side, "triton", inputs | far), decode(torch_side, "triton", inputs),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(a, b)
    k_new = torch.cat([inputs["q"]] * 2, 2)[:, :, : CASE.heads_kv + 1]
    pools = [inputs[name].nan_to_num(7.0) for name in ("k_pages", "v_pages")]
    written = []
    for new in (k_new, far_apart(k_new, axis)):
        written.append([x.clone() for x in pools])
        new = new[:, :, 1:]
        torch_attn.append_kv(
            new, new, *written[-1], inputs["block_tables"], inputs["seq_lens"],
            implementation="triton",
        )  # fmt: skip
    for got, want in zip(*written, strict=True):
        assert torch.equal(got, want)


def test_heads_of_packed_tokens_past_32_bits(torch_side, torch_device):
    case = PagedCase("strides", lengths=(7, 63), new_tokens=(2, 9), head_dim=24, num_splits=1)
    inputs = make_inputs(case, torch_device)
    results = [
        torch_side.call(
            "paged_attention", inputs | {"q": q}, return_lse=True, implementation="triton",
            **case.options,
        )
        for q in (inputs["q"], far_apart(inputs["q"], 1))
    ]  # fmt: skip
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
