import time

import pytest

from tests.parity.planted import DENSE, FAULTS, PACKED, dense, packed, planted
from twin_attention.testing import check_attention

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"suite": None, "longest": 12, "shrink_seconds": 0.0}


@pytest.mark.parametrize(("function", "claims"), [(dense, DENSE), (packed, PACKED)])
def test_a_right_attention_passes(function, claims):
    worst = check_attention(function, claims, seconds=2, **SMALL)
    assert 0 < max(worst.values()) <= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    function, claims = planted(fault)
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"check_attention\(\.\.\., problem='"):
        check_attention(function, claims, seconds=60, **SMALL)
    print(f"{fault}: {time.monotonic() - begin:.1f}")
