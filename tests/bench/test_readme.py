"""What the README says of speeds is what the committed records say."""

from collections import defaultdict
from pathlib import Path

import pytest

from bench.records import load

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def groups():
    """Median times by suite, operation and case, then by label; head sizes 64 and 128."""
    found = defaultdict(dict)
    for record in load(ROOT / "bench" / "results" / "h200.jsonl.gz"):
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
def test_the_table(groups, row, suite, operation, keep, peers):
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {row}"))
    for peer in peers:
        least, most = speeds(groups, "sm90", suite, operation, peer, keep)
        assert f"{least:.2f} to {most:.2f}" in line, peer


def test_the_sentence_about_sm80_code(groups):
    (forward, backward) = (
        "{:.2f} to {:.2f}".format(*speeds(groups, "sm80", "flash", operation, "FA2"))
        for operation in ("forward", "backward")
    )
    sentence = f"{forward} of FlashAttention-2's speed forward and {backward} backward"
    assert sentence in " ".join(README.split())


def speeds(groups, target, suite, operation, peer, keep=None):
    """A peer's time over ours, the least and the most of Triton and Pallas over the cases."""
    ratios = [
        group[peer] / group[ours]
        for (*where, _), group in groups.items()
        for ours in (f"torch triton {target}", f"jax triton {target}")
        if where == [suite, operation] and {peer, ours} <= group.keys()
        if keep is None or keep(group["case"])
    ]
    return min(ratios), max(ratios)
