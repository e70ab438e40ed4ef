"""The named problems: unique, nested, and valid as they stand."""

from collections import Counter

import pytest

from interop.contract.cases import SUITES, FlashCase, flash_cases
from interop.contract.spec import DTYPES
from interop.contract.validate import Operand, check_flash_attention

EVERY = {case.name: case for suite in SUITES for case in flash_cases(suite)}


@pytest.mark.parametrize("suite", SUITES)
def test_names_are_unique(suite):
    repeated = [
        name for name, n in Counter(case.name for case in flash_cases(suite)).items() if n > 1
    ]
    assert not repeated


def test_full_contains_quick():
    assert set(flash_cases("quick")) < set(flash_cases("full"))


def test_an_unknown_suite_is_an_error():
    with pytest.raises(KeyError, match="huge"):
        flash_cases("huge")


def test_a_pattern_selects_by_name():
    chosen = flash_cases("full", "softcap")
    assert chosen
    assert chosen == [case for case in flash_cases("full") if "softcap" in case.name]


@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_a_case_describes_the_call_that_validation_accepts(case: FlashCase):
    q, k, v = (
        Operand(name, shape, case.dtype) for name, shape in zip("qkv", case.shapes, strict=True)
    )
    assert check_flash_attention(q, k, v, **case.options) == case.spec


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
    assert any(case.scale is not None for case in cases)
    assert any(case.spec.is_empty for case in cases)


def test_a_large_case_passes_two_to_the_31_elements():
    sizes = [
        batch * seq * heads * size
        for case in flash_cases("large")
        for batch, seq, heads, size in case.shapes
    ]
    assert max(sizes) > 2**31


def test_a_strided_case_has_tensors_that_can_be_packed():
    """q, k and v are slices of one tensor along its heads, so all else must agree."""
    strided = [case for case in EVERY.values() if case.layout == "strided"]
    assert strided
    for case in strided:
        assert len({(b, s, d) for b, s, _, d in case.shapes}) == 1
