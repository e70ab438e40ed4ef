"""The suites, and the choice of a kind's cases from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from twin_attention.interop.parity.cases import Case

# A case's name says what it covers; its suite says how large it is.
SUITES = (
    "quick",  # each operation and each kind of option once
    "small",  # small enough for the frameworks' interpreters on a CPU (contains quick)
    "full",  # every feature, dtype and awkward size, a few hundred tokens long (contains small)
    "large",  # sizes that only a GPU takes, tensors past 2^31 elements among them
)
# The cases of "quick", a newcomer's first run: a minute on two cores.
QUICK = (
    "fp32-causal", "tf32-causal", "mqa-d128", "all-options", "row-max", "segments-shuffled",
    "tree-any", "ranges-any", "bias", "bias-all-options", "deterministic", "strided", "no-keys",
    "varlen-all-options", "varlen-terms", "varlen-tree-any", "varlen-ranges",
    "block-sparse-all-options", "dilated-fp32-one-pair", "context-all-options", "context-gather",
    "context-fp32-heads", "decode-fp16-one-split", "decode-mha-d128", "decode-d80-dv72",
    "decode-page-7", "decode-int8", "decode-fp8", "decode-all-options", "decode-tree",
    "decode-cascade", "decode-no-sequence", "paged-all-options", "paged-tree", "append-packed",
    "append-rotary-interleaved", "merge-bf16", "merge-no-state",
)  # fmt: skip

# Cases that run in forward mode too.
WITH_TANGENTS = (
    "fp32-causal", "tf32-causal", "all-options", "segments-shuffled", "tree-any", "ranges-any",
    "bias-keys", "bias-all-options", "dropout-all-options", "strided", "one-token", "no-keys",
    "varlen-all-options", "varlen-terms", "varlen-tree-any",
)  # fmt: skip

Change = tuple[str, dict[str, Any]]  # part of a case's name, and the fields that differ
C = TypeVar("C", bound=Case)
Make = Callable[[], Iterator[C]]


def in_dtypes(base: C, changes: Callable[[], Iterator[Change]], *without: str) -> Iterator[C]:
    """Yield the changed cases in each dtype, except those in `without`."""
    for dtype, short in {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.items():
        for name, fields in changes() if dtype not in without else ():
            named = {"name": f"{base.name}-{short}-{name}", "dtype": dtype}
            yield replace(base, **named | fields)


def choose(suite: str, pattern: str, small: Make[C], full: Make[C], large: Make[C]) -> list[C]:
    """Return a suite's cases from these functions, whose names contain `pattern`."""
    makers = {"quick": [small], "small": [small], "full": [small, full], "large": [large]}[suite]
    found = [case for make in makers for case in make() if pattern in case.name]
    return [
        replace(case, **{"tangents": True} if case.name in WITH_TANGENTS else {})
        for case in found
        if suite != "quick" or case.name in QUICK
    ]
