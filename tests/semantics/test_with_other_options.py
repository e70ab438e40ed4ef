from dataclasses import replace

import pytest
import torch

from tests.conftest import ON_GPU
from tests.oracle import assert_within_budget
from tests.semantics import test_bias, test_dropout, test_terms
from tests.sides import attention
from twin_attention.interop.parity.inputs import make_inputs

# A tile one off the diagonal has distances on both sides of R.
NEAR = {"dtype": "bfloat16", "seq_q": 130, "seq_kv": 130, "window_size": None, "relative": 2}
OPTIONS = {
    test_terms: [
        {"scale": 0.0, "relative": 0, "alibi": "heads"},
        {"heads_q": 0, "heads_kv": 0},
        NEAR,
    ],
    test_dropout: [
        {"dtype": "bfloat16", "window_size": (30, 5), "segments": "shuffled", "row_max": True},
    ],
    # The gradient of a bias is summed where it is broadcast.
    test_bias: [
        {"bias": "", "sinks": True},
        {"bias": "q", "sinks": True},
        {"dtype": "float16", "scale": -0.3, "terms_in_q_dtype": True, "window_size": (20, 9)},
        {"seq_q": 1},
        {"seq_kv": 0, "bias": "hqk", "alibi": "all", "relative": 9, "dropout_rate": 0.3},
    ],
}  # fmt: skip
CASES = [
    pytest.param(replace(module.CASE, **changes), id=f"{module.CASE.name}-{changes}")
    for module, several in OPTIONS.items()
    for changes in several
]


@pytest.mark.parametrize("case", CASES)
def test_within_budget(side, implementation, torch_device, case):
    inputs = make_inputs(case, torch_device)
    got = attention(side, inputs, implementation=implementation, **case.options)
    assert_within_budget(got, inputs, case.spec)
    assert not case.sinks or (got["dsinks"] != 0).all()


@pytest.mark.skipif(not ON_GPU, reason="interpreters run a kernel's programs in order")
@pytest.mark.parametrize(
    "case",
    [
        replace(test_bias.CASE, batch=3, bias="qk", deterministic=True),
        replace(
            test_terms.CASE, batch=2, seq_q=140, seq_kv=140, window_size=None, deterministic=True
        ),
    ],
    ids=lambda case: case.name,
)
def test_gradients_of_terms_have_the_same_bits_every_time(bitwise_side, torch_device, case):
    inputs = make_inputs(case, torch_device)
    first, second = (
        attention(bitwise_side, inputs, implementation="triton", **case.options) for _ in range(2)
    )
    assert all(torch.equal(first[name], x) for name, x in second.items())
