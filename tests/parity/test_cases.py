from collections import Counter

import pytest

from twin_attention.contract.paged_spec import (
    DECODE_DTYPES,
    QUANTIZED_DTYPES,
    SPLITS_MAX,
    TOKENS_MAX,
)
from twin_attention.contract.spec import DTYPES
from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.interop.parity.suites.append import append_cases
from twin_attention.interop.parity.suites.block_sparse import block_sparse_cases
from twin_attention.interop.parity.suites.choose import QUICK, SUITES
from twin_attention.interop.parity.suites.decode import decode_cases
from twin_attention.interop.parity.suites.flash import flash_cases
from twin_attention.interop.parity.suites.kinds import KINDS
from twin_attention.interop.parity.suites.paged import paged_cases
from twin_attention.targets.config import PACKAGES, find_configs, load_table, table_path
from twin_attention.targets.target import TARGETS

of_all_kinds = pytest.mark.parametrize("cases", KINDS)


def every(cases):
    return [case for suite in ("full", "large") for case in cases(suite)]


@pytest.mark.parametrize("suite", SUITES)
def test_names_are_unique(suite):
    names = Counter(case.name for cases in KINDS for case in cases(suite))
    assert not [name for name, n in names.items() if n > 1]
    assert suite != "quick" or names.keys() == set(QUICK)


@of_all_kinds
def test_suites_contain_each_other(cases):
    assert set() < set(cases("quick")) <= set(cases("small")) < set(cases("full"))


@of_all_kinds
def test_a_pattern_selects_by_name(cases):
    chosen = cases("full", "bf16")
    assert chosen
    assert chosen == [case for case in cases("full") if "bf16" in case.name]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("package", PACKAGES)
def test_the_full_suite_reaches_every_configuration(package, target):
    path = table_path(package, target)
    reached = set()
    kinds = (flash_cases, block_sparse_cases, decode_cases, paged_cases, append_cases)
    for case in [case for cases in kinds for case in cases("full")]:
        specs = [case.spec]
        if isinstance(case, DecodeCase):
            specs += [case.spec.merge(2)]
        reached |= {id(config) for spec in specs for config in find_configs(path, spec).values()}
    # Of rows with the same key, cards of less shared memory take the others.
    first = {
        (kernel, row.key): row
        for kernel, rows in load_table(path, "portable").items()
        for row in reversed(rows)
    }
    rows = [(kernel, row) for (kernel, _), row in first.items()]
    missed = [(kernel, row) for kernel, row in rows if id(row.config) not in reached]
    assert not missed


@pytest.mark.parametrize("suite", ["quick", "full"])
def test_suites_cover_every_option(suite):
    cases = flash_cases(suite)
    assert {case.dtype for case in cases} == set(DTYPES)
    assert any(case.heads_q > case.heads_kv > 1 for case in cases)
    assert any(case.heads_q > case.heads_kv == 1 for case in cases)
    assert any(case.seq_q > case.seq_kv > 0 and case.causal for case in cases)
    assert any(0 < case.seq_q < case.seq_kv and case.causal for case in cases)
    assert any(case.shapes[0][3] != case.shapes[2][3] for case in cases)
    assert any(case.softcap and case.window_size and case.causal for case in flash_cases("quick"))
    assert any(case.layout == "strided" for case in cases)
    assert {case.segments for case in cases} == {"", "documents", "shuffled"}
    assert {"", "any"} <= {case.ranges for case in cases}
    assert any(case.scale is not None for case in cases)
    assert any(case.spec.is_empty for case in cases)


def test_a_strided_case_has_tensors_that_can_be_packed():
    """q, k and v are slices of one tensor along its heads, so all else must agree."""
    strided = [case for case in every(flash_cases) if case.layout == "strided"]
    assert strided
    for case in strided:
        assert len({(b, s, d) for b, s, _, d in case.shapes}) == 1


@pytest.mark.parametrize("cases", [decode_cases, paged_cases])
def test_a_decode_case_has_room_for_its_sequences(cases):
    for case in every(cases):
        cache = case.spec.cache
        assert max(case.lengths, default=0) <= cache.capacity or case.spec.is_empty, case.name
        assert cache.num_pages > len(case.lengths) * cache.max_pages, case.name


@pytest.mark.parametrize("suite", ["quick", "full"])
def test_suites_cover_every_option_of_a_decode(suite):
    cases = decode_cases(suite)
    assert {case.dtype for case in cases} == set(DECODE_DTYPES)
    assert {case.kv_dtype for case in cases} == {None, *QUANTIZED_DTYPES}
    assert {len(case.scale_shape) for case in cases if case.kv_dtype} == {0, 1}
    assert {case.tokens is None for case in cases} == {False, True}
    assert {None, 1} < {case.num_splits for case in cases}
    assert any(case.page_size & (case.page_size - 1) for case in cases)
    assert any(case.spec.group_size == 1 for case in cases)
    assert any(case.head_dim != case.spec.head_dim_v for case in cases)
    assert any(case.sinks and case.softcap and case.window_size and case.scale for case in cases)
    assert any(case.tree for case in cases)
    assert any(case.spec.is_empty for case in cases)


def test_a_decode_has_lengths_around_a_pages_end():
    (case,) = decode_cases("small", "decode-bf16")
    size = case.page_size
    assert {0, 1, size - 1, size, size + 1, case.spec.cache.capacity} == set(case.lengths)


def test_the_full_suite_reaches_the_limits_of_a_decode():
    cases = decode_cases("full")
    assert {case.tokens for case in cases} >= {1, TOKENS_MAX}
    assert {case.page_size for case in cases} >= {1, 256}
    assert max(case.num_splits or 1 for case in cases) <= SPLITS_MAX
