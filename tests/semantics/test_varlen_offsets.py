import pytest
import torch

from twin_attention.interop.parity.cases import VarlenCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import results

LENGTHS = {"some": ((40, 40), (0, 0), (1, 1), (70, 70)), "none": ()}


@pytest.mark.parametrize("first", [33, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_first_offset_counts_as_0(side, implementation, torch_device, lengths, first):
    case = VarlenCase("first", lengths=LENGTHS[lengths], head_dim=16, dtype="float16", sinks=True)
    inputs = make_inputs(case, torch_device)
    options = case.options | {"implementation": implementation}
    want = results(side, "flash_attention_varlen", inputs, **options)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        inputs[name][0] = first
    got = results(side, "flash_attention_varlen", inputs, **options)
    for name, x in want.items():
        assert torch.equal(got[name], x), name
