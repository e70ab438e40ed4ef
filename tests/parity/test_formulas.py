import numpy as np
import pytest
import torch

from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import evaluate
from twin_attention.interop.parity.subjects.formulas import confirm, formulas, is_known
from twin_attention.interop.parity.suites.flash import flash_cases
from twin_attention.interop.parity.suites.kinds import KINDS

CASES = [case for cases in KINDS for case in cases("small") if is_known(case)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_oracles_agree(case):
    inputs = make_inputs(case, "cpu")
    arrays = {
        x: y.double().numpy() if y.is_floating_point() else y.numpy() for x, y in inputs.items()
    }
    found = formulas(case, arrays)
    assert found is not None
    wanted = evaluate(inputs, case.spec, torch.float64)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x.numpy(), 1e-9, 1e-9, err_msg=name)


def test_a_failure_that_the_second_oracle_denies_is_not_shown():
    (case,) = flash_cases("small", "one-token")
    inputs = make_inputs(case, "cpu")
    ref = evaluate(inputs, case.spec, torch.float64)
    confirm(case, inputs, ref)
    ref["dq"][-1, -1, -1] += 1e-3
    with pytest.raises(AssertionError, match="two oracles disagree on dq"):
        confirm(case, inputs, ref)


def test_both_oracles_keep_the_sum_of_a_row_of_low_scores():
    case = FlashCase("", 1, 9, 9, 1, 1, 16, dtype="float32", relative=9)
    inputs = make_inputs(case, "cpu")
    inputs["relative_bias"][:] = -1e12
    confirm(case, inputs, evaluate(inputs, case.spec, torch.float64))
