"""The README's table of speeds says what the committed records say."""

from collections import defaultdict
from pathlib import Path

import pytest

from bench.records import load

ROOT = Path(__file__).resolve().parents[2]
OURS = ("Triton sm90", "Pallas sm90")


@pytest.fixture(scope="module")
def groups():
    """Median times by suite, operation and case, then by label; head sizes 64 and 128."""
    found = defaultdict(dict)
    for record in load(ROOT / "bench" / "results" / "h200.jsonl"):
        if record.times is not None and record.case.get("head_dim") in (64, 128):
            key = record.suite, record.operation, record.case["name"]
            found[key] |= {record.label: record.times.median, "case": record.case}
    return found


def is_long_decode(case):
    return case["tokens"] == 1 and case["kv_dtype"] is None and max(case["lengths"]) >= 1024


@pytest.mark.parametrize(
    ("row", "suite", "operation", "keep", "peers"),
    [
        ("forward, ", "flash", "forward", None, ("FA2", "cuDNN", "FlexAttention")),
        ("backward, ", "flash", "backward", None, ("FA2", "cuDNN", "FlexAttention")),
        ("paged decode ", "kvcache", "decode", is_long_decode,
         ("FA2 dense", "cuDNN dense", "FlashInfer")),
    ],
)  # fmt: skip
def test_speeds(groups, row, suite, operation, keep, peers):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {row}"))
    for peer in peers:
        ratios = [
            group[peer] / group[ours]
            for (*where, _), group in groups.items()
            for ours in OURS
            if where == [suite, operation] and {peer, ours} <= group.keys()
            if keep is None or keep(group["case"])
        ]
        assert f"{min(ratios):.2f} to {max(ratios):.2f}" in line, peer
