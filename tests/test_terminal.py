"""What commands print: help without markup, tables in 80 columns, progress."""

import io
import re

import pytest
from rich.console import Console

from bench import __main__ as bench
from bench.compare import Change, _grid
from bench.records import Times
from bench.registry import SUITES
from bench.report.cards import CAPTION, cards
from bench.runner import _print
from tests.bench.conftest import record  # noqa: F401
from tuning import __main__ as tuning
from twin_attention.contract.tolerances import Agreement
from twin_attention.interop.parity import __main__ as parity
from twin_attention.interop.parity.records import CaseResult, Comparison
from twin_attention.interop.parity.suites.kinds import KINDS
from twin_attention.interop.parity.table import CaseTable
from twin_attention.interop.rendering.tables import NARROW, console_of, to_terminal

COMMANDS = [
    (bench, ()), (bench, ("mine",)), (bench, ("all",)), (bench, ("report",)), (bench, ("compare",)),
    *((bench, (name,)) for name in SUITES),
    (parity, ()), (tuning, ()), (tuning, ("static",)),
]  # fmt: skip
IN_NEED = [(bench, ()), (bench, ("report",)), (bench, ("compare",)), (tuning, ())]


def name_of(value):
    return value.__name__.split(".")[-2] if hasattr(value, "__name__") else "-".join(value) or "-"


@pytest.mark.parametrize(("module", "command"), COMMANDS, ids=name_of)
def test_help_has_no_markup_and_fits_80_columns(module, command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit:
        module.main([*command, "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert not re.search(r"`|\*\*|::|:\w+:", text)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert f"usage: python -m {module.__name__.removesuffix('.__main__')}" in text


@pytest.mark.parametrize(("module", "command"), IN_NEED, ids=name_of)
def test_a_command_that_needs_arguments_prints_its_help_without_any(
    module, command, monkeypatch, capsys
):
    try:
        code = module.main([*command])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: ")
    assert "show this help message and exit" in printed.err


def printed_at_80(*tables):
    console = Console(file=io.StringIO(), width=80)
    for table in tables:
        table(console) if callable(table) else console.print(table)
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if len(line.rstrip()) > 80] == []
    assert "…" not in "".join(lines)
    return lines


@pytest.fixture
def wide(record):  # noqa: F811
    case = record().case | {"name": "64x8192-heads-32-8-float8_e4m3fn"}

    def make(name, target, **fields):
        times = Times(123.4567, 120.0, 130.0)
        shared = {
            "times": times,
            "host": Times(0.123, 0.1, 0.2),
            "tflops": 987.6,
            "bytes_per_second": 4.85e12,
        }
        made = record(implementation=name, target=target, **shared | fields)
        return type(made)(**vars(made) | {"case": case})

    return [
        make("torch gluon deterministic", "sm90"), make("jax mosaic", "sm90"), make("FA2", None),
        make("cuDNN padded", None),
    ]  # fmt: skip


def test_tables_of_bench_fit_80_columns(wide):
    lines = printed_at_80(lambda console: _print(wide, console))
    assert any("torch gluon deterministic sm90" in line and "123.4567" in line for line in lines)
    grid = _grid([Change(each, each.times, each.times) for each in wide])
    printed_at_80(to_terminal(grid))
    (card,) = cards(wide)
    lines = printed_at_80(to_terminal(card.grid, caption=CAPTION, **NARROW))
    assert any("forward" in line and "988" in line for line in lines)


@pytest.mark.parametrize("count", [3, 12])
def test_a_row_of_parity_fits_80_columns(count):
    names = [case.name for cases in KINDS for case in cases("small")]
    titles = [f"torch_attn mosaic sm9{number}" for number in range(count)]
    agreement = Agreement(0.97, 1.0, 0.5, 1.0, True)
    comparisons = [Comparison(title, "float64", "dsinks", agreement) for title in titles]
    longest = max(names, key=len)

    def show(console):
        table = CaseTable(console, titles, names)
        table.print_titles()
        table.finish(CaseResult(longest, {}, 123.4, [], comparisons))

    caption, *_, row = printed_at_80(show)
    assert caption == "error / budget, worst output"
    assert row.split() == [longest, *["0.97", "dsinks"] * (3 if count == 3 else 1), "123.4",
                           "passed"]  # fmt: skip


def test_a_log_is_as_wide_as_columns_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert console_of(160).width == 80
    monkeypatch.delenv("COLUMNS")
    assert console_of(160).width == 160
