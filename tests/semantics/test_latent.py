"""Values that are the first columns of their keys, as if they had a pool of their own."""

from dataclasses import replace

import pytest
import torch

from tests.oracle import assert_within_budget
from twin_attention.interop.parity.cases import AppendCase, DecodeCase, PagedCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import call

SIZES = {"heads_kv": 1, "head_dim": 96, "head_dim_v": 64, "page_size": 5, "max_pages": 30}
DECODE = DecodeCase("latent", (70, 0, 150), tokens=2, num_splits=3, latent=True, **SIZES)
PAGED = PagedCase("latent", (70, 33, 150), new_tokens=(20, 1, 0), latent=True, **SIZES)


@pytest.mark.parametrize("case", [DECODE, PAGED], ids=["decode", "paged"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_values_are_a_copy_of_columns(side, implementation, torch_device, case, kv_dtype):
    case = replace(case, kv_dtype=kv_dtype)
    inputs = make_inputs(case, torch_device)
    copied = inputs | {"v_pages": inputs["k_pages"][..., :64].contiguous()}
    if kv_dtype is not None:
        copied["v_scale"] = inputs["k_scale"]
    got = call(side, case, inputs, implementation)
    assert_within_budget(got, copied, replace(case, latent=False).spec)


def test_keys_alone_are_appended(side, implementation, torch_device):
    case = AppendCase("latent", (70, 0, 150), tokens=2, latent=True, **SIZES)
    inputs = make_inputs(case, torch_device)
    both = inputs | {x: inputs[x.replace("v", "k")] + 1 for x in ("v_pages", "v_new")}
    got = call(side, case, inputs, implementation)
    want = call(side, replace(case, latent=False), both, implementation)
    assert got.keys() == {"k_pages"}
    assert torch.equal(got["k_pages"].nan_to_num(7), want["k_pages"].nan_to_num(7))
