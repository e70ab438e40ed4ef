"""The examples of the exchange run as they are written."""

import doctest
import pathlib

import jax
import pytest

import interop.exchange.dlpack

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "exchange.md"


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_page():
    results = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0
    assert results.failed == 0


def test_docstrings():
    results = doctest.testmod(interop.exchange.dlpack)
    assert results.attempted > 0
    assert results.failed == 0
