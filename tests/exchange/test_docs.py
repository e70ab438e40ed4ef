import doctest

import jax
import pytest

import twin_attention.interop.exchange.dlpack


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_docstrings():
    results = doctest.testmod(twin_attention.interop.exchange.dlpack)
    assert results.attempted > 0
    assert results.failed == 0
