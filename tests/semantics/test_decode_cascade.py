from dataclasses import replace
from random import Random

import pytest
import torch

from tests.oracle import assert_within_budget
from tests.sides import takes
from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.interop.parity.inputs import make_inputs

# Pages that fill no tile and straddle two; full tiles of 8 sequences and others.
CASE = DecodeCase(
    "cascade", lengths=(150, 300, 0, 299, 150, 7, 300, 200, 299, 290),
    heads_q=8, heads_kv=1, head_dim=32, head_dim_v=16, dtype="float16", page_size=12,
    max_pages=25, cascade=True, common_pages=20,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _families(implementation, side):
    if not takes(side, implementation, CASE):
        pytest.skip("the family has no cascades")


def decode(side, implementation, inputs, **options):
    options = CASE.options | {"implementation": implementation, "return_lse": True} | options
    return side.call("paged_decode", inputs, **options)


@pytest.mark.parametrize(
    ("seed", "options"), [(0, {}), (0, {"tokens": 3, "sinks": True}), (1, {"kv_dtype": "int8"})]
)
def test_whatever_is_shared_gives_the_same(side, implementation, torch_device, seed, options):
    case = replace(CASE, name=f"cascade-{seed}", **options)
    random = Random(seed)
    lengths = tuple(random.choice((0, 1, 300, random.randint(0, 300))) for _ in CASE.lengths)
    inputs = make_inputs(replace(case, lengths=lengths), torch_device)
    assert_within_budget(decode(side, implementation, inputs), inputs, case.spec)


@pytest.mark.parametrize("options", [{}, {"sinks": True, "tokens": 2}, {"kv_dtype": "int8"}])
def test_keys_in_one_part(side, implementation, torch_device, options):
    """The decode itself joins what is shared: tables are too short to divide a sequence's keys."""
    case = replace(CASE, lengths=(156, 150, 140, 156, 149, 155, 156, 144, 156), max_pages=13)
    case = replace(case, **options)
    inputs = make_inputs(case, torch_device)
    inputs["block_tables"][:] = inputs["block_tables"][:1].clone()
    assert_within_budget(decode(side, implementation, inputs), inputs, case.spec)


@pytest.mark.parametrize("page", [0, 10, 11])
def test_pages_are_shared_up_to_the_first_that_differs(side, implementation, torch_device, page):
    case = replace(CASE, lengths=(300,) * 8)
    inputs = make_inputs(case, torch_device)
    tables = inputs["block_tables"]
    other = tables[7, page].clone()
    tables[:] = tables[:1].clone()
    for name in ("k_pages", "v_pages"):  # of large values, whose absence shows
        inputs[name].nan_to_num_(0.5)
        inputs[name][other.long()] = 2.0
    tables[3, page] = other
    assert_within_budget(decode(side, implementation, inputs), inputs, case.spec)


def test_more_tiles_have_a_prefix_than_full_tiles_would(side, implementation, torch_device):
    """Sequences share in pairs, and programs take several pairs' prefixes."""
    case = replace(CASE, lengths=(300,) * 10)
    inputs = make_inputs(case, torch_device)
    tables = inputs["block_tables"]
    tables[5:] = tables[:5].clone()
    values = torch.arange(1, 1 + len(inputs["k_pages"]), device=torch_device) / 64
    for name in ("k_pages", "v_pages"):  # of each page its own, so that another's shows
        inputs[name] = inputs[name].nan_to_num(0.5) + values[:, None, None, None].half()
    assert_within_budget(decode(side, implementation, inputs), inputs, case.spec)


@pytest.mark.parametrize("new", [0, 1, 3])
def test_tables_that_agree_past_a_length_do_not_matter(side, implementation, torch_device, new):
    """New tokens' keys are not shared: 192 keys are full pages and full tiles of keys."""
    length = 192 + new
    case = replace(CASE, lengths=(300, length, 250, 300, length, 260, 299, 200), tokens=3)
    inputs = make_inputs(case, torch_device)
    inputs["block_tables"][:] = inputs["block_tables"][:1].clone()
    for name in ("k_pages", "v_pages"):
        inputs[name].nan_to_num_(0.5)
    assert_within_budget(decode(side, implementation, inputs), inputs, case.spec)


def test_wrong_lengths_and_ids_stay_within_the_pool(side, implementation, torch_device):
    inputs = make_inputs(replace(CASE, lengths=(300,) * 10), torch_device)
    for name in ("k_pages", "v_pages"):
        inputs[name].nan_to_num_(0.5)
    wrong = -(2**31), -1, 2**31 - 1, 400, 0
    inputs["seq_lens"][:] = 400
    inputs["seq_lens"][:5] = torch.tensor(wrong, dtype=torch.int32, device=torch_device)
    inputs["block_tables"][:] = inputs["block_tables"][:1].clone()
    inputs["block_tables"][:, 2] = 2**31 - 1
    inputs["block_tables"][5:9, 0] = -7
    # In torch a view of a table whose other entries are alike, and are not read.
    wide = torch.nn.functional.pad(inputs["block_tables"], (0, 15), value=3)
    inputs["block_tables"] = wide[:, :25]
    clamped = inputs | {
        "seq_lens": inputs["seq_lens"].clamp(0, 300),
        "block_tables": inputs["block_tables"].clamp(0, len(inputs["k_pages"]) - 1),
    }
    assert_within_budget(decode(side, implementation, inputs), clamped, CASE.spec)
