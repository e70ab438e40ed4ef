from dataclasses import replace

import pytest

from bench import __main__ as command
from bench.compare import changes, summary
from bench.records import Record, Times, append

RECORD = Record(
    suite="flash", case={"name": "a"}, operation="forward",
    implementation="torch triton", target="sm90",
    device="NVIDIA H200", versions={"triton": "3.6.0"}, commit="1", date="2026-11-21",
    status="ok", times=Times(1.0, 0.98, 1.02),
)  # fmt: skip


def times(median, fastest=None, slowest=None, p20=None, p80=None, **fields):
    other = Times(median, fastest or median, slowest or median, p20, p80)
    return replace(RECORD, times=other, **fields)


def test_the_same_measurement_is_paired_whatever_the_commit_if_both_have_a_time():
    failed = replace(RECORD, case={"name": "b"}, status="failed", message="an error", times=None)
    peak = replace(RECORD, operation="peak", implementation="torch", target=None)
    before = [times(3.0), times(2.0), times(9.0, case={"name": "gone"}), failed, peak]
    after = [
        times(1.0, commit="2", versions={"triton": "3.7.0"}),
        times(5.0, case={"name": "new"}),
        times(6.0, target="sm80"),
        times(6.0, case={"name": "b"}),
        peak,
    ]
    (change,) = changes(before, after)
    assert (change.before.median, change.after.median) == (2.0, 1.0)
    assert change.relative == -0.5


@pytest.mark.parametrize(
    ("after", "gap"),
    [
        (times(1.04, 1.02, 1.06), 0),
        (times(1.04, 1.03, 1.06), 0.01),
        (times(1.04, 1.03, 1.06, p20=1.01, p80=1.05), 0),
        (times(0.9, 0.8, 0.9, p20=0.8, p80=0.93), 0.05),
    ],
)
def test_ranges_meet_or_lie_apart(after, gap):
    (change,) = changes([RECORD], [after])
    assert change.gap == pytest.approx(gap)


def test_the_summary_counts():
    before = [times(1.0, case={"name": str(i)}) for i in range(4)]
    before += [times(1.0, implementation="FA2", target=None)]
    after = [times(1.0 + i / 125, case={"name": str(i)}) for i in range(4)]
    after += [times(0.9, implementation="FA2", target=None)]
    assert summary(changes(before, after)) == [
        "5 measured in both runs: ranges of 1 meet, 1 lie apart by up to 1%, 3 by more",
        "ours: medians differ by 1.2% in the middle, by 2.4% at most; 0 of 4 are faster in the "
        "later run",
        "peers: medians differ by 10.0% in the middle, by 10.0% at most; 1 of 1 are faster in the "
        "later run",
    ]


@pytest.mark.parametrize(
    ("after", "code"),
    [
        (times(1.0), 0), (times(1.03, 1.025), 0), (times(1.2), 1), (times(0.8), 0),
        (times(1.0, case={"name": "b"}), 2),
        (times(2.0, implementation="FA2", target=None), 0),  # a slower peer is no regression
    ],
)  # fmt: skip
def test_the_command(tmp_path, capsys, monkeypatch, after, code):
    monkeypatch.setenv("COLUMNS", "120")
    paths = [tmp_path / "before.jsonl", tmp_path / "after.jsonl"]
    before = RECORD if after.target else times(1.0, implementation="FA2", target=None)
    for path, record in zip(paths, (before, after), strict=True):
        append(path, [record])
    assert command.main(["compare", *map(str, paths)]) == code
    printed = capsys.readouterr()
    if code == 2:
        assert "expected a measurement with times in both files, got none" in printed.err
    elif code == 1:
        row = "a forward torch triton sm90 1.0000 1.2000 +20.0%"
        assert row in " ".join(printed.out.split())
    assert ("1 measured in both runs" in printed.out) == (code != 2)
