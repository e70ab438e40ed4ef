"""The table that a run prints."""

from dataclasses import replace

from rich.console import Console

from bench.records import Times
from bench.runner import _print


def printed(records) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        _print(records, console)
    return capture.get()


def line(text: str, *words: str) -> list[str]:
    """The cells of the one row with these words."""
    (found,) = [row for row in text.splitlines() if all(word in row for word in words)]
    return [cell.strip() for cell in found.split("│")[1:-1]]


def test_a_row_stands_beside_the_peak_and_the_best_peer(record):
    peak = replace(record(operation="peak", target=None, tflops=800.0), case={"name": "matmul"})
    peers = [
        record(implementation=name, target=None, times=Times(ms, ms, ms))
        for name, ms in (("FA2", 3.0), ("cuDNN", 1.0))
    ]
    text = printed([peak, record(), *peers])
    assert line(text, "torch triton sm90")[3:] == [
        "2.0000",
        "10.0%",
        "",
        "100.0",
        "",
        "12.5%",
        "0.50",
    ]


def test_what_is_absent_is_counted_and_what_failed_is_shown(record):
    absent = record(implementation="peer", target=None, status="absent", message="not installed")
    failed = record(implementation="[b]other", status="failed", message="RuntimeError")
    text = printed([record(), absent, failed])
    assert "1 absent" in text
    assert "│ peer " not in text
    assert line(text, "[b]other")[3] == "failed"
