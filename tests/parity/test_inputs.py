"""The tensors of a case."""

from dataclasses import replace

import pytest
import torch

from interop.contract.cases import FlashCase
from interop.parity.inputs import make_inputs

CASE = FlashCase("inputs", seq_q=9, seq_kv=9, heads_q=4, heads_kv=2, head_dim=16)


def test_strided_operands_are_views_of_one_tensor(torch_device):
    inputs = make_inputs(replace(CASE, layout="strided"), torch_device)
    q, k, v = (inputs[name] for name in "qkv")
    assert [tuple(x.shape) for x in (q, k, v)] == list(CASE.shapes)
    assert len({x.untyped_storage().data_ptr() for x in (q, k, v)}) == 1
    assert [x.storage_offset() for x in (q, k, v)] == [0, 4 * 16, 6 * 16]
    assert {x.stride() for x in (q, k, v)} == {(9 * 8 * 16, 8 * 16, 16, 1)}


def test_contiguous_operands_are_contiguous(torch_device):
    assert all(x.is_contiguous() for x in make_inputs(CASE, torch_device).values())


@pytest.mark.parametrize("change", [{"seq_kv": 8}, {"head_dim_v": 24}])
def test_strided_operands_must_fit_one_tensor(change, torch_device):
    with pytest.raises(ValueError, match="layout: expected Sq == Skv and D == Dv"):
        make_inputs(replace(CASE, layout="strided", **change), torch_device)


def test_the_name_is_the_seed(torch_device):
    first, again = make_inputs(CASE, torch_device), make_inputs(CASE, torch_device)
    other = make_inputs(replace(CASE, name="other"), torch_device)
    for name in first:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


def test_dtypes(torch_device):
    inputs = make_inputs(replace(CASE, dtype="float16"), torch_device)
    assert [x.dtype for x in inputs.values()] == [torch.float16] * 4 + [torch.float32]
