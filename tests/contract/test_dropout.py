import array_api_compat
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from twin_attention.contract.dropout import DropoutRule, philox

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    "array", [lambda x: np.asarray([x]), lambda x: torch.tensor([x]), lambda x: jnp.uint32([x])]
)
@pytest.mark.parametrize(
    ("rounds", "counter", "key", "answer"),
    [
        (7, (0,) * 4, (0,) * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, (ONES,) * 4, (ONES,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, *PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
        (10, (0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, (ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, *PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_random123(array, rounds, counter, key, answer):
    counter, key = tuple(map(array, counter)), tuple(map(array, key))
    words = philox(array_api_compat.array_namespace(*key), counter, key, rounds)
    assert " ".join(f"{int(x[0]):08x}" for x in words) == answer


def test_a_rate_is_rounded():
    assert DropoutRule.of(0.0) is DropoutRule.of(1e-6) is None
    assert DropoutRule.of(0.5) == (32768, 2.0)
    assert DropoutRule.of(1 - 1e-9) == (65535, 65536.0)
