"""What the README says of speeds is what the committed records say."""

from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import pytest

from bench.records import load
from interop.parity.cases import FlashCase, VarlenCase
from twin_attention.targets.foreign import gluon_is_faster

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def by_case(name, head_dims):
    found = defaultdict(dict)
    for record in load(ROOT / "bench" / "results" / name):
        if record.times is not None and record.case.get("head_dim") in head_dims:
            key = record.suite, record.operation, record.case["name"]
            found[key] |= {record.label: record.times.median, "case": record.case}
    return found


def is_long_decode(case):
    if case["name"].startswith("cascade"):  # whose sequences share pages
        return False
    return case["tokens"] == 1 and case["kv_dtype"] is None and max(case["lengths"]) >= 1024


def is_chunks(case):
    return case["name"].startswith(("chunks", "mixed"))


EXPLICIT = ("torch gluon sm90", "jax mosaic sm90")
MOSAIC = ("jax mosaic sm90",)  # in JAX without PyTorch
PORTABLE = ("torch triton sm90", "jax triton sm90")


def by_default(operation, group):
    case = {name: tuple(x) if type(x) is list else x for name, x in group["case"].items()}
    spec = (VarlenCase if "lengths" in case else FlashCase)(**case).spec
    function = {"forward": "flash_fwd", "backward": "flash_bwd"}[operation]
    family = "gluon" if gluon_is_faster(function, spec, "sm90") else "mosaic"
    return "torch gluon sm90", f"jax {family} sm90"


@pytest.mark.parametrize(
    ("row", "records", "ours", "suite", "operation", "keep", "peers"),
    [
        ("forward, ", "h100-sm90-peers", by_default, "flash", "forward", None,
         ("FA4", "FA3", "cuDNN")),
        ("forward in JAX", "h100-sm90-peers", MOSAIC, "flash", "forward", None,
         ("FA4", "FA3", "cuDNN")),
        ("backward, ", "h100-sm90-peers", by_default, "flash", "backward", None,
         ("FA4", "cuDNN")),
        ("backward in JAX", "h100-sm90-peers", MOSAIC, "flash", "backward", None,
         ("FA4", "cuDNN")),
        ("packed sequences, forward", "h200-packed-sm90", by_default, "packed", "forward", None,
         ("FA4 varlen", "FA3 varlen", "cuDNN padded")),
        ("packed in JAX without PyTorch, forward", "h200-packed-sm90", MOSAIC, "packed", "forward",
         None, ("FA4 varlen", "FA3 varlen", "cuDNN padded")),
        ("packed sequences, backward", "h200-packed-sm90", by_default, "packed", "backward", None,
         ("FA4 varlen", "cuDNN padded")),
        ("packed in JAX without PyTorch, backward", "h200-packed-sm90", MOSAIC, "packed",
         "backward", None, ("FA4 varlen", "cuDNN padded")),
        ("prefill, ", "h100-flashinfer", EXPLICIT, "prefill", "forward", is_chunks,
         ("FlashInfer",)),
        ("paged decode ", "h100-flashinfer", PORTABLE, "kvcache", "decode", is_long_decode,
         ("FlashInfer",)),
    ],
)  # fmt: skip
def test_the_table(row, records, ours, suite, operation, keep, peers):
    groups = by_case(f"{records}.jsonl.gz", (64, 96, 128, 256))
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {row}"))
    for peer in peers:
        least, most = speeds(groups, ours, suite, operation, peer, keep)
        assert f"{least:.2f} to {most:.2f}" in line, peer


def test_the_geometric_means():
    means, groups = defaultdict(list), by_case("h100-sm90-peers.jsonl.gz", (64, 96, 128, 256))
    for operation, side in product(("forward", "backward"), (0, 1, 2)):
        ratios = [
            min(time for label, time in group.items() if is_peer(label))
            / group[(*by_default(operation, group), *MOSAIC)[side]]
            for where, group in groups.items()
            if where[:2] == ("flash", operation)
        ]
        assert len(ratios) == 26
        means[operation].append(f"{geometric_mean(ratios):.2f}")
    (forward, *alike), (in_torch, in_jax, alone) = means["forward"], means["backward"]
    assert alike == [forward, forward]
    readme = " ".join(README.split())
    sentence = (
        f"at {forward} of the fastest peer's speed forward, in both frameworks, and {in_torch} "
        f"backward in PyTorch and {in_jax} in JAX ({alone} without PyTorch), over 26 cases"
    )
    assert sentence in readme
    assert 0.995 <= float(forward) <= 1.015  # "as fast as"
    assert f"cuDNN forward, {in_torch} times as fast backward" in readme


def is_peer(label):
    return label != "case" and not label.endswith(("sm80", "sm90"))


def test_the_sentence_about_sm80_code():
    groups = by_case("h100-sm80.jsonl.gz", (64, 96, 128, 256))
    means, ratios = [], []
    for operation in ("forward", "backward"):
        dense = [g for (_, of, _), g in groups.items() if of == operation and "FA2" in g]
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
    assert sentence in " ".join(README.split())


def speeds(groups, labels, suite, operation, peer, keep=None):
    """The least and the most of a peer's time over ours, of both sides and all cases."""
    ratios = [
        group[peer] / group[ours]
        for (*where, _), group in groups.items()
        if where == [suite, operation] and peer in group
        for ours in (labels(operation, group) if callable(labels) else labels)
        if ours in group
        if keep is None or keep(group["case"])
    ]
    return min(ratios), max(ratios)
