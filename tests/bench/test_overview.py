from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean

from bench.records import load
from bench.report import overview

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_the_files_are_of_the_records():
    for path, text in overview.files().items():
        assert path.read_text(encoding="utf-8") == text, "run python -m bench overview"


def test_the_readme_has_the_numbers():
    found = overview.measured()
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for name in ("forward", "backward"):
        torch, jax = overview.bars(found)[name]
        assert f"| {name} | {torch:.2f} | {jax:.2f} |" in lines


def test_the_sentence_about_sm80_code():
    groups = defaultdict(dict)
    for record in load(ROOT / "bench" / "results" / "h100-sm80.jsonl.gz"):
        if record.times:
            key = record.operation, record.case["name"]
            groups[key] |= {record.label: record.times.median}
    means, ratios = [], []
    for operation in ("forward", "backward"):
        dense = [g for (of, _), g in groups.items() if of == operation and "FA2" in g]
        gluon, mosaic = (
            [g["FA2"] / g[ours] for g in dense] for ours in ("torch gluon sm80", "jax mosaic sm80")
        )
        means.append(f"{geometric_mean(gluon):.2f} and {geometric_mean(mosaic):.2f}")
        ratios += gluon + mosaic
    assert len(ratios) == 4 * 25
    sentence = (
        f"{means[0]} of FlashAttention-2's speed forward, in PyTorch and JAX, and {means[1]} "
        f"backward, over 25 cases ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    assert sentence in " ".join(BENCHMARKS.split())
