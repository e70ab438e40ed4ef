"""Say which test files were skipped as a whole, and which of them should have run."""

import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from pallas_attn.private import TESTED

LOWERING = "tests/pallas_attn_lowering/"
# The first JAX that lowers all of Mosaic's kernels.
LOWERS_ALL = (0, 11, 2)


def files_of(reports: Iterable[Any]) -> list[tuple[str, int, str]]:
    found = {}
    for x in reports:  # of each worker
        if x.nodeid.endswith(".py") and isinstance(x.longrepr, tuple):
            text = Path(x.longrepr[0]).read_text()
            count = len(re.findall(r"^def test_", text, re.MULTILINE))
            found[x.nodeid] = (x.nodeid, count, x.longrepr[2].removeprefix("Skipped: "))
    return sorted(found.values())


def should_run(path: str, reason: str, jax: str = version("jax")) -> bool:
    """Return True if a tested JAX lowers a file's kernels; some need its CUDA plugin as well."""
    found = tuple(map(int, re.findall(r"\d+", jax)[:3]))
    lowers_all = found >= LOWERS_ALL and found[:2] <= TESTED["jax"]
    return path.startswith(LOWERING) and lowers_all and "plugin" not in reason


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not session.exitstatus:
        files = files_of(reporter.stats.get("skipped", ()))
        if any(should_run(path, reason) for path, _, reason in files):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    files = files_of(terminalreporter.stats.get("skipped", ()))
    if files:
        terminalreporter.section("files skipped as a whole: test functions, reason")
    for path, count, reason in files:
        error = "ERROR, these versions should run it: " * should_run(path, reason)
        terminalreporter.write_line(f"{path}: {count}, {error}{reason}")
