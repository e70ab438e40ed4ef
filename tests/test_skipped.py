import pytest

from tests.skipped import LOWERING, LOWERS_ALL, should_run

NEWEST = ".".join(map(str, LOWERS_ALL))
pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("path", "reason", "jax", "is_error"),
    [
        (LOWERING + "test_mosaic.py", "its kernels need jax 0.11 or newer", NEWEST, True),
        (LOWERING + "test_mosaic.py", "private names that it needs are missing", NEWEST, True),
        (LOWERING + "test_mosaic.py", "its kernels need jax 0.11 or newer", "0.10.2", False),
        (LOWERING + "test_mosaic.py", "private names that it needs are missing", "99.0", False),
        (
            LOWERING + "test_triton_in_jax.py",
            "jaxlib's CUDA plugin is not installed",
            NEWEST,
            False,
        ),
        ("tests/models/test_parity.py", "could not import 'flax'", NEWEST, False),
    ],
)
def test_what_is_an_error(path, reason, jax, is_error):
    assert should_run(path, reason, jax) == is_error


@pytest.mark.parametrize("is_error", [False, True])
def test_a_run_lists_files_and_fails(pytester, monkeypatch, is_error):
    monkeypatch.setattr("tests.skipped.should_run", lambda *_: is_error)
    pytester.makeconftest(
        "from tests.skipped import pytest_sessionfinish, pytest_terminal_summary\n"
    )
    pytester.makepyfile(
        test_whole="import pytest\npytest.skip('too old', allow_module_level=True)\n"
        "def test_a(): pass\ndef test_b(): pass",
        test_other="def test_c(): pass",
    )
    run = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    error = "ERROR, these versions should run it: " if is_error else ""
    run.stdout.fnmatch_lines([f"test_whole.py: 2, {error}too old"])
    assert run.ret == int(is_error)
