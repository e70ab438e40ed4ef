import pytest
import torch

from tests.oracle import assert_within_budget
from tests.sides import attention
from twin_attention.contract.reference.merge import merge
from twin_attention.contract.tolerances import compare_lse, compare_to_reference
from twin_attention.interop.parity.cases import DecodeCase, FlashCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import results
from twin_attention.interop.parity.suites.merge import merge_cases


def states_of(num_states, device, dtype=torch.float16):
    """[N, 2, 3, 4, 24] and [N, 2, 4, 3]; parts without keys, and all of one row, hold NaN."""
    make = torch.Generator().manual_seed(num_states)
    outs = torch.randn(num_states, 2, 3, 4, 24, generator=make).to(dtype)
    lses = 3 * torch.randn(num_states, 2, 4, 3, generator=make)
    lses[torch.rand(lses.shape, generator=make) < 0.2] = -torch.inf
    lses[:, 1, 2, 0] = -torch.inf
    outs[lses.mT == -torch.inf] = torch.nan
    return outs.to(device), lses.to(device)


def run(side, implementation, outs, lses):
    return side.call("merge_states", {"outs": outs, "lses": lses}, implementation=implementation)


def assert_merged(got, outs, lses):
    out, lse = got
    ref, ref_lse = merge(outs, lses, torch.float64)
    lp, _ = merge(outs, lses, outs.dtype)
    assert (out.shape, out.dtype) == (ref.shape, outs.dtype)
    assert (lse.shape, lse.dtype) == (ref_lse.shape, torch.float32)
    name = str(outs.dtype).removeprefix("torch.")
    agreement = compare_to_reference(out, ref, lp, name, "output")
    assert agreement.ok, agreement
    agreement = compare_lse(lse, ref_lse)
    assert agreement.ok, agreement


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_states", [2, 33])
def test_merging_is_within_budget(side, implementation, torch_device, num_states, dtype):
    states = states_of(num_states, torch_device, dtype)
    assert_merged(run(side, implementation, *states), *states)


def test_results_of_one_token_need_no_dimension_for_it(side, implementation, torch_device):
    outs, lses = states_of(3, torch_device)
    outs, lses = outs[:, :, :1], lses[..., :1]
    out, lse = run(side, implementation, outs.squeeze(2), lses.squeeze(3))
    assert_merged((out.unsqueeze(1), lse.unsqueeze(2)), outs, lses)


def test_one_state_is_its_own_merge(side, implementation, torch_device):
    outs, lses = states_of(1, torch_device)
    out, lse = run(side, implementation, outs, lses)
    assert torch.equal(out, outs[0].nan_to_num())
    assert compare_lse(lse, lses[0].double()).ok


def test_merging_is_associative(side, implementation, torch_device):
    """In float32, so that merging again rounds no more."""
    outs, lses = states_of(5, torch_device, torch.float32)
    first = run(side, implementation, outs[:2], lses[:2])
    rest = run(side, implementation, outs[2:], lses[2:])
    both = (torch.stack(x) for x in zip(first, rest, strict=True))
    assert_merged(run(side, implementation, *both), outs, lses)


def test_lses_that_overflow_exp(side, implementation, torch_device):
    outs, lses = states_of(3, torch_device)
    for shift in (-1000.0, 1000.0):
        assert_merged(run(side, implementation, outs, lses + shift), outs, lses + shift)


@pytest.mark.parametrize("size", [1e10, -1e10, 3e38, -3e38])
def test_equal_states_of_any_lse_have_equal_weights(side, implementation, torch_device, size):
    outs = torch.ones(2, 1, 1, 1, 16, device=torch_device)
    outs[1] = 3
    lses = torch.full((2, 1, 1, 1), size, device=torch_device)
    inputs = {"outs": outs, "lses": lses, "dout": outs[0], "dlse": torch.zeros_like(lses[0])}
    got = gradients(side, implementation, inputs)
    assert (got["out"] == 2).all()
    assert (got["lse"] == lses[0]).all()
    assert (got["douts"] == 0.5).all()
    assert got["dlses"].flatten().tolist() == [-8, 8]


@pytest.mark.parametrize("size", [torch.inf, torch.nan])
@pytest.mark.parametrize("num_states", [2, 33])
def test_an_infinite_lse_gives_nan(side, implementation, torch_device, num_states, size):
    outs, lses = states_of(num_states, torch_device)
    lses[0, 0, 0, 0] = size
    out, lse = run(side, implementation, outs, lses)
    assert out[0, 0, 0].isnan().all()
    assert lse[0, 0, 0].isnan()
    assert not out[0, 1:].isnan().any()


def test_no_state_and_no_row(side, implementation, torch_device):
    outs, lses = states_of(2, torch_device)
    out, lse = run(side, implementation, outs[:0], lses[:0])
    assert (out.shape, lse.shape) == (outs.shape[1:], lses.shape[1:])
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    out, lse = run(side, implementation, outs[:, :0], lses[:, :0])
    assert (out.shape, lse.shape) == ((0, *outs.shape[2:]), (0, *lses.shape[2:]))


def test_decodes_over_parts_of_the_tables_merge_to_the_whole(side, implementation, torch_device):
    case = DecodeCase("parts", lengths=(0, 9, 40, 75), page_size=5, max_pages=15, head_dim=32)
    inputs = make_inputs(case, torch_device)
    parts = []
    for pages in (slice(0, 5), slice(5, 10), slice(10, 15)):
        before = pages.start * case.page_size
        lengths = (inputs["seq_lens"] - before).clamp(0, 5 * case.page_size)
        tables = inputs["block_tables"][:, pages].contiguous()
        part = inputs | {"block_tables": tables, "seq_lens": lengths}
        options = {"return_lse": True, "implementation": implementation}
        parts.append(side.call("paged_decode", part, **options))
    got = run(side, implementation, *(torch.stack(x) for x in zip(*parts, strict=True)))
    # Each part's output is rounded to bfloat16 before the merge, which lp does once more.
    assert_within_budget(got, inputs, case.spec)


def gradients(side, implementation, inputs):
    return results(side, "merge_states", inputs, implementation=implementation)


@pytest.mark.parametrize("case", merge_cases(), ids=lambda case: case.name)
def test_gradients_are_within_budget(side, implementation, torch_device, case):
    inputs = make_inputs(case, torch_device)
    assert_within_budget(gradients(side, implementation, inputs), inputs, case.spec)


def test_the_gradients_of_parts_merged_are_those_of_the_whole(side, implementation, torch_device):
    """By the chain rule, the merge's gradients are what each part gets."""
    case = FlashCase("parts", 1, 20, 48, heads_q=4, head_dim=16, dtype="float32", softcap=5.0)
    inputs = make_inputs(case, torch_device)
    options = case.options | {"implementation": "reference"}  # of the parts, not of the merge
    parts = [
        inputs | {name: inputs[name][:, keys].contiguous() for name in "kv"}
        for keys in (slice(0, 17), slice(17, 20), slice(20, 48))
    ]
    states = [attention(side, part, **options) for part in parts]
    merged = {f"{x}s": torch.stack([state[x] for state in states]) for x in ("out", "lse")}
    merged = gradients(side, implementation, merged | {x: inputs[x] for x in ("dout", "dlse")})
    found = [
        attention(side, part | {"dout": dout, "dlse": dlse}, **options)
        for part, dout, dlse in zip(parts, merged["douts"], merged["dlses"], strict=True)
    ]
    got = {
        "out": merged["out"],
        "lse": merged["lse"],
        "dq": sum(part["dq"] for part in found),
        **{x: torch.cat([part[x] for part in found], dim=1) for x in ("dk", "dv")},
    }
    assert_within_budget(got, inputs, case.spec)
