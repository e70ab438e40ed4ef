from dataclasses import replace

import pytest
import torch

from twin_attention.interop.parity.cases import DecodeCase, FlashCase, MergeCase
from twin_attention.interop.parity.inputs import POISON_BYTE, make_inputs
from twin_attention.interop.parity.suites.decode import decode_cases

CASE = FlashCase("inputs", seq_q=9, seq_kv=9, heads_q=4, heads_kv=2, head_dim=16)
DECODE = DecodeCase("pages", lengths=(0, 1, 15, 16, 17, 128), head_dim=16)


def test_strided_operands_are_views_of_one_tensor(torch_device):
    inputs = make_inputs(replace(CASE, layout="strided"), torch_device)
    q, k, v = (inputs[name] for name in "qkv")
    assert [tuple(x.shape) for x in (q, k, v)] == list(CASE.shapes)
    assert len({x.untyped_storage().data_ptr() for x in (q, k, v)}) == 1
    assert [x.storage_offset() for x in (q, k, v)] == [0, 4 * 16, 6 * 16]
    assert {x.stride() for x in (q, k, v)} == {(9 * 8 * 16, 8 * 16, 16, 1)}


@pytest.mark.parametrize("change", [{"seq_kv": 8}, {"head_dim_v": 24}])
def test_strided_operands_must_fit_one_tensor(change, torch_device):
    with pytest.raises(ValueError, match="layout: expected Sq == Skv and D == Dv"):
        make_inputs(replace(CASE, layout="strided", **change), torch_device)


@pytest.mark.parametrize("case", [CASE, replace(DECODE, kv_dtype="int8")])
def test_the_name_is_the_seed(case, torch_device):
    first, again = make_inputs(case, torch_device), make_inputs(case, torch_device)
    other = make_inputs(replace(case, name="other"), torch_device)
    for name in first.keys() - {"seq_lens"}:
        assert torch.equal(first[name], again[name]), name
        assert not torch.equal(first[name], other[name]), name


def test_only_a_case_with_gradients_has_output_gradients(torch_device):
    assert make_inputs(CASE, torch_device).keys() == {"q", "k", "v", "dout", "dlse"}
    forward_only = replace(CASE, gradients=False)
    assert make_inputs(forward_only, torch_device).keys() == {"q", "k", "v"}


def used_slots(case: DecodeCase, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[P, page_size], found a key at a time."""
    used = torch.zeros(inputs["k_pages"].shape[:2], dtype=torch.bool)
    for table, length in zip(inputs["block_tables"].tolist(), case.lengths, strict=True):
        for key in range(length):
            page, slot = divmod(key, case.page_size)
            assert not used[table[page], slot], "no slot belongs to two keys"
            used[table[page], slot] = True
    return used


@pytest.mark.parametrize("name", ["bf16", "fp16", "page-7", "int8", "fp8", "no-sequence"])
def test_slots_that_hold_no_key_are_poisoned(name, torch_device):
    (case,) = decode_cases("small", f"decode-{name}")
    inputs = {name: x.cpu() for name, x in make_inputs(case, torch_device).items()}
    used = used_slots(case, inputs)
    assert used.sum() == sum(case.lengths)
    for pool in (inputs["k_pages"], inputs["v_pages"]):
        assert pool[used].float().isfinite().all()
        unused = pool[~used]
        if pool.dtype == torch.int8:
            assert (unused == POISON_BYTE).all()
        else:
            assert unused.float().isnan().all()


def test_pages_are_in_no_order_and_unused_table_entries_are_no_pages(torch_device):
    inputs = make_inputs(DECODE, torch_device)
    num_pages = inputs["k_pages"].shape[0]
    tables = inputs["block_tables"].tolist()
    pages = [-(-length // DECODE.page_size) for length in DECODE.lengths]
    used = [table[:count] for table, count in zip(tables, pages, strict=True)]
    unused = [table[count:] for table, count in zip(tables, pages, strict=True)]
    assert sorted(used[-1]) != used[-1]
    assert all(0 <= page < num_pages for row in used for page in row)
    assert {page for row in unused for page in row} == {-1, 2**31 - 1}


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_quantized_pool_holds_normal_numbers_over_its_scales(kv_dtype, shape, torch_device):
    case = replace(DECODE, kv_dtype=kv_dtype, scale_shape=shape)
    inputs = {name: x.cpu() for name, x in make_inputs(case, torch_device).items()}
    used = used_slots(case, inputs)
    for x in ("k", "v"):
        pool, scale = inputs[f"{x}_pages"], inputs[f"{x}_scale"]
        assert (str(pool.dtype), scale.shape) == (f"torch.{kv_dtype}", shape)
        values = pool[used].float() * scale.reshape(-1, 1)
        torch.testing.assert_close(values.std(), torch.tensor(1.0), rtol=0.1, atol=0)
        assert values.abs().max() > 2
    assert not torch.equal(inputs["k_scale"], inputs["v_scale"])


def test_parts_of_a_merge_that_saw_no_key_hold_nan(torch_device):
    inputs = make_inputs(MergeCase("merge", num_states=10, tokens=50), torch_device)
    nothing = inputs["lses"].mT == -torch.inf
    assert torch.equal(inputs["outs"].isnan(), nothing[..., None].expand(inputs["outs"].shape))
    assert nothing[:, 0, 0, 0].all()
    assert 0.15 < nothing.float().mean() < 0.25
