"""The results of a run, written as ``parity.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from twin_attention.contract.tolerances import Agreement

# What a subject may claim of cases (`features_of`), and of what it returns or reads.
FEATURES = (
    "flash_attention", "flash_attention_varlen", "block_sparse_attention", "dilated_attention",
    "paged_decode", "paged_attention", "float16", "bfloat16", "float32", "tf32", "float8_e4m3fn",
    "int8", "gradients", "lse", "gradient of lse", "NaN", "causal", "Sq != Skv", "window", "scale",
    "scale of 0 or less", "softcap", "sinks", "segments", "tree", "depths", "bias", "relative",
    "alibi", "wide terms",
    "packed terms", "dropout_rate", "row_max", "GQA", "Dv != D", "D > 128", "D > 256",
    "D not 64, 128 or 256", "rows without a key", "no tokens", "empty sequences",
    "several lengths", "several tokens", "padding", "strided", "cascade", "scale_shape",
    "batch_invariant",
)  # fmt: skip
SCHEMA_VERSION = 1
ORACLE = "float64"


@dataclass(frozen=True)
class Comparison:
    """One output of one implementation, compared with the oracle or with a twin."""

    subject: str
    against: str
    output: str
    agreement: Agreement

    @property
    def title(self) -> str:
        return title(self.subject, self.against)

    @property
    def ok(self) -> bool:
        return self.agreement.ok

    @property
    def status(self) -> str:
        return _status(self.ok)


@dataclass(frozen=True)
class RunRecord:
    """One implementation on one case; `seconds` include compilation."""

    subject: str
    seconds: float | None = None
    ran: str | None = None
    error: str | None = None
    refused: str | None = None


@dataclass(frozen=True)
class CaseResult:
    """The results of one case; `line` is the command that repeats a random problem."""

    name: str
    problem: dict[str, Any]
    seconds: float
    runs: list[RunRecord] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    error: str | None = None
    line: str = ""

    @property
    def errors(self) -> list[str]:
        found = [] if self.error is None else [self.error]
        return found + [f"{run.subject}: {run.error}" for run in self.runs if run.error]

    @property
    def ok(self) -> bool:
        return not self.errors and all(comparison.ok for comparison in self.comparisons)

    @property
    def status(self) -> str:
        return _status(self.ok)


@dataclass(frozen=True)
class Report:
    """A run of the harness; after an interrupt `planned` cases are more than `cases`."""

    facts: dict[str, str]
    planned: int
    cases: list[CaseResult]

    @property
    def failed(self) -> list[CaseResult]:
        return [case for case in self.cases if not case.ok]

    @property
    def complete(self) -> bool:
        return len(self.cases) == self.planned

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def status(self) -> str:
        return _status(self.ok)

    @property
    def summary(self) -> str:
        done = f"{len(self.cases) - len(self.failed)} passed, {len(self.failed)} failed"
        left = self.planned - len(self.cases)
        return f"{done}, {left} not run (interrupted)" if left else done

    @property
    def titles(self) -> list[str]:
        comparisons = [c for case in self.cases for c in case.comparisons]
        return list(dict.fromkeys(c.title for c in sorted(comparisons, key=_is_twin)))

    def to_json(self) -> str:
        """Return the report as JSON; numbers that are not finite become null."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "complete": self.complete,
            "planned": self.planned,
            "facts": self.facts,
            "cases": [_case_to_json(case) for case in self.cases],
        }
        return json.dumps(document, indent=1, allow_nan=False)


def title(subject: str, against: str) -> str:
    if against == ORACLE:
        return subject
    (_, *ours), (_, *theirs) = subject.split(), against.split()
    return " ".join(("twins", *ours)) if ours == theirs else f"{subject} ~ {against}"


def problem_text(problem: dict[str, Any]) -> str:
    get = problem.get
    if get("new_tokens") is not None:
        lengths, tokens = problem["lengths"], sum(problem["new_tokens"]) + problem["padding"]
        words = [f"B{len(lengths)} Tq{tokens} Skv{max(lengths, default=0)}"]
        words.append("pages {max_pages}x{page_size}".format(**problem))
    elif "lengths" in problem and "max_pages" not in problem:
        queries, keys = zip(*problem["lengths"], problem["padding"], strict=True)
        words = [f"N{len(problem['lengths'])} Tq{sum(queries)} Tkv{sum(keys)} longest={max(keys)}"]
    elif "lengths" in problem:
        lengths = problem["lengths"]
        counts = f"B{len(lengths)} T{problem['tokens'] or 1} Skv{max(lengths, default=0)}"
        words = [counts, "pages {max_pages}x{page_size}".format(**problem)]
    elif "num_states" in problem:
        shape = "N{num_states} B{batch} S{tokens} H{heads} Dv{head_dim_v} {dtype}"
        return shape.format(**problem)
    else:
        words = ["B{batch} Sq{seq_q} Skv{seq_kv}".format(**problem)]
    words.append("Hq{heads_q} Hkv{heads_kv} D{head_dim}".format(**problem))
    if problem["head_dim_v"] is not None:
        words.append(f"Dv{problem['head_dim_v']}")
    words.append(problem["dtype"])
    if get("precision", "ieee") != "ieee":
        words.append(problem["precision"])
    if get("rotary_dim"):
        words.append(f"rotary={problem['rotary_dim']}")
    flags = ("causal", "sinks", "cascade", "latent", "rotary_interleaved")
    words += [name.removeprefix("rotary_") for name in flags if get(name)]
    given = ("kv_dtype", "scale", "window_size", "softcap", "num_splits")
    words += [f"{name}={problem[name]}" for name in given if get(name) is not None]
    said = {
        f"bias={get('bias') or 1}": get("bias") is not None,
        f"relative={get('relative')}": get("relative") is not None,
        f"alibi={get('alibi')}": get("alibi"),
        f"dropout_rate={get('dropout_rate')}": get("dropout_rate"),
        "row_max": get("row_max"),
        "forward mode": get("tangents"),
        f"up to {get('common_pages')} pages in common": get("common_pages"),
        f"tree={get('tree')}": get("tree"),
        f"ranges={get('ranges')}": get("ranges"),
        f"tree of {len(get('parents') or ())} segments": get("parents"),
        get("pattern"): get("pattern"),
        f"{get('ranks')} ranks {get('sharding')}": get("ranks"),
        get("exchange"): get("exchange"),
        f"{len(get('documents') or ())} documents": get("documents"),
        f"rates={tuple(get('dilation_rates') or ())}": get("dilation_rates"),
        "scales of heads": get("scale_shape"),
        "strided": get("layout") == "strided",
        "forward only": get("gradients") is False,
    }
    words += [text for text, is_so in said.items() if is_so]
    return " ".join(words)


def function_of(problem: dict[str, Any]) -> str:
    if "num_states" in problem:
        return "merge_states"
    if "page_size" in problem:
        if "softcap" not in problem:
            return "append_kv"
        return "paged_decode" if problem.get("new_tokens") is None else "paged_attention"
    if "ranks" in problem:
        return "context_attention"
    if "dilation_rates" in problem:
        return "dilated_attention"
    if "tile_q" in problem:
        return "block_sparse_attention"
    return "flash_attention_varlen" if "lengths" in problem else "flash_attention"


def failures(result: CaseResult) -> list[str]:
    lines = list(result.errors)
    for c in result.comparisons:
        if not c.ok:
            a = c.agreement
            lines.append(
                f"{c.title}: {c.output} against {c.against}: "
                f"max error {a.max_error:.3g} (budget {a.max_budget:.3g}), "
                f"rmse {a.rmse:.3g} (budget {a.rmse_budget:.3g})"
                + (f", one row or number {a.each:.3g} times its budget" if a.each > 1 else "")
                + ("" if a.finite else ", NaN or an unexpected infinity")
            )
    return lines


# A failure's subject and kind: an exception, a hang, a death or wrong numbers.
Failure = tuple[str, str]


def failures_of(result: CaseResult) -> set[Failure]:
    found = {(run.subject, _kind(run.error)) for run in result.runs if run.error}
    if result.error is not None:
        subject = result.error.rpartition(", in ")[2].partition(",")[0]
        found.add((subject, _kind(result.error)))
    return found | {(c.subject.partition(",")[0], "wrong") for c in result.comparisons if not c.ok}


def _kind(error: str) -> str:
    """Return the start of an error, such as an exception's name."""
    words = error.removeprefix("guarded: ").removeprefix("first: ").removeprefix("again: ")
    return words.partition(":")[0]


def without_rounds(result: CaseResult) -> CaseResult:
    """Return a random problem's result with its subjects' labels only."""
    labels = (replace(c, subject=c.subject.partition(",")[0]) for c in result.comparisons)
    return replace(result, comparisons=[*labels])


def features_of(problem: dict[str, Any]) -> list[str]:
    """Return what a subject must know for a case, given its fields; the function comes first.

    >>> features_of({"seq_q": 4, "seq_kv": 4, "dtype": "float32", "head_dim": 64, "softcap": 5.0})
    ['flash_attention', 'float32', 'softcap']
    """
    pairs, (left, right) = _lengths(problem), _window(problem)
    is_packed = "lengths" in problem and "page_size" not in problem
    sizes = {problem.get(x) or problem.get("head_dim") or 64 for x in ("head_dim", "head_dim_v")}
    ids = problem.get("segments") or problem.get("documents") or problem.get("tree") == "any"
    named = {
        "window": problem.get("window_size") not in (None, (None, None)),
        "Sq != Skv": (left, right) != (inf, inf) and any(m != n for m, n in pairs),
        "GQA": problem.get("heads_q") != problem.get("heads_kv") and "softcap" in problem,
        "scale of 0 or less": problem.get("scale") is not None and problem["scale"] <= 0,
        "Dv != D": len(sizes) > 1,
        "D > 128": max(sizes) > 128,
        "D > 256": max(sizes) > 256,
        "D not 64, 128 or 256": not sizes <= {64, 128, 256},
        "rows without a key": bool(ids) or any(_has_empty_row(*x, left, right) for x in pairs)
        or ("tile_q" in problem and "pattern" not in problem),
        "empty sequences": "lengths" in problem and any(0 in x for x in pairs),
        "packed terms": is_packed and any(
            problem.get(x) not in (None, "") for x in ("tree", "relative", "alibi")
        ),
        "no tokens": 0 in (problem.get("batch"), *map(sum, zip(*pairs, strict=True))) or not pairs,
        "several lengths": len({*pairs}) > 1 and "page_size" in problem,
        "padding": any(_as_tuple(problem.get("padding"))),
        "strided": problem.get("layout") == "strided",
        "wide terms": problem["dtype"] != "float32" and not problem.get("terms_in_q_dtype")
        and (problem.get("bias") is not None or problem.get("relative") is not None),
        "several tokens": (problem.get("tokens") or 1) > 1 and "page_size" in problem,
        "tf32": problem.get("precision") == "tf32",
        str(problem.get("kv_dtype")): problem.get("kv_dtype") is not None,
    }  # fmt: skip
    given = ("scale", "softcap", "bias", "relative")  # None for none
    asked = ("causal", "sinks", "segments", "tree", "depths", "ranges", "latent", "alibi",
             "dropout_rate", "row_max", "batch_invariant", "cascade", "rotary_dim",
             "scale_shape")  # fmt: skip
    found = [x for x in asked if problem.get(x)]
    found += [x for x in given if problem.get(x) is not None]
    return [function_of(problem), problem["dtype"], *found, *(x for x, y in named.items() if y)]


def _lengths(problem: dict[str, Any]) -> list[tuple[int, int]]:
    if "num_states" in problem:
        return [(1, 1)]
    if "seq_q" in problem:
        return [(problem["seq_q"], problem["seq_kv"])]
    lengths = problem.get("lengths", ())
    if "page_size" not in problem:
        return [tuple(x) for x in lengths]
    new = problem.get("new_tokens") or [problem.get("tokens") or 1] * len(lengths)
    return [*zip(new, lengths, strict=True)]


def _window(problem: dict[str, Any]) -> tuple[float, float]:
    left, right = (inf if x is None else x for x in problem.get("window_size") or (None, None))
    return left, min(right, 0) if problem.get("causal", "page_size" in problem) else right


def _has_empty_row(queries: int, keys: int, left: float, right: float) -> bool:
    """Return True if the first or last query sees no key."""
    positions = (keys - queries, keys - 1) if queries else ()
    return any(min(p + right, keys - 1) < max(p - left, 0) for p in positions)


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def worst(case: CaseResult, title: str) -> Comparison | None:
    lane = [c for c in case.comparisons if c.title == title]
    return max(lane, key=lambda c: c.agreement.ratio, default=None)


def worst_of_all(cases: Iterable[CaseResult], title: str) -> tuple[CaseResult, Comparison] | None:
    found = [(case, c) for case in cases if (c := worst(case, title)) is not None]
    return max(found, key=lambda pair: pair[1].agreement.ratio, default=None)


def _status(ok: bool) -> str:
    return "passed" if ok else "failed"


def _is_twin(comparison: Comparison) -> bool:
    return comparison.against != ORACLE


def _case_to_json(case: CaseResult) -> dict[str, Any]:
    document = asdict(case)
    document["status"] = case.status
    document["comparisons"] = [
        {
            "subject": c.subject,
            "against": c.against,
            "output": c.output,
            "status": c.status,
            "ratio": _finite(c.agreement.ratio),
            **{name: _finite(value) for name, value in asdict(c.agreement).items()},
        }
        for c in case.comparisons
    ]
    return document


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
