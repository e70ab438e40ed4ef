"""Strided torch views mean what contiguous tensors mean (JAX arrays have no strides).

The kernels give the same bits; the reference's matrix products may choose their order.
"""

from dataclasses import replace

import pytest
import torch

from interop.parity.cases import FlashCase
from interop.parity.inputs import make_inputs
from tests.oracle import assert_within_budget
from tests.sides import TorchSide, attention, poisoned_memory

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
    """The same tensors as views of one [B, S, heads + 1, D] tensor whose last head is NaN."""
    gap = torch.full_like(tensors[0][:, :, :1], float("nan"))
    sizes = [x.shape[2] for x in tensors]
    return torch.cat([*tensors, gap], dim=2).split([*sizes, 1], dim=2)[:-1]


def in_a_poisoned_box(x):
    """`x` as the inside of a larger tensor of NaN; its first element is aligned to nothing."""
    box = torch.full([n + 2 for n in x.shape], float("nan"), dtype=x.dtype, device=x.device)
    inside = box[tuple(slice(1, n + 1) for n in x.shape)]
    inside.copy_(x)
    return inside


def every_other_row(x):
    wide = torch.full_like(x.repeat_interleave(2, dim=1), float("nan"))
    wide[:, ::2] = x
    return wide[:, ::2]


LAYOUTS = {
    "packed": packed,
    "heads first": lambda *qkv: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv],
    "sequence first": lambda *qkv: [x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv],
    "poisoned box": lambda *qkv: [in_a_poisoned_box(x) for x in qkv],
    "every other row": lambda *qkv: [every_other_row(x) for x in qkv],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_q_k_v(torch_side, implementation, torch_device, layout):
    inputs = make_inputs(CASE, torch_device)
    q, k, v = LAYOUTS[layout](*(inputs[name] for name in "qkv"))
    assert not q.is_contiguous()
    strided = inputs | {"q": q, "k": k, "v": v}
    assert_layout_does_not_matter(torch_side, inputs, strided, CASE, implementation)


def test_expanded_inputs(torch_side, implementation, torch_device):
    """A stride of 0: one sequence and one kv head, shown as many."""
    inputs = make_inputs(CASE, torch_device)
    strided = inputs | {name: inputs[name][:1, :, :1].expand_as(inputs[name]) for name in "kv"}
    inputs |= {name: strided[name].contiguous() for name in "kv"}
    assert_layout_does_not_matter(torch_side, inputs, strided, CASE, implementation)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
        in_a_poisoned_box,
    ],
    ids=["heads first", "last dimension strided", "poisoned box"],
)
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
    shape = inputs["q"].shape
    strides = list(
        inputs["q"].transpose(0, dimension).contiguous().transpose(0, dimension).stride()
    )
    strides[dimension] = 2**31 // (shape[dimension] - 1) + 8
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    far = {
        name: inputs[name].new_empty(size).as_strided(shape, strides).copy_(inputs[name])
        for name in "qkv"
    }
    strided = inputs | far
    assert_layout_does_not_matter(torch_side, inputs, strided, case, "triton")


def test_unwritten_memory_is_seen(torch_device):
    """The other tests rely on it: memory that a call allocates holds NaN until written."""
    with poisoned_memory():
        for x in (
            torch.empty(3, 4, device=torch_device),
            torch.empty_like(torch.ones(5, device=torch_device, dtype=torch.bfloat16)),
        ):
            assert x.isnan().all()
