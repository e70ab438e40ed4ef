"""Look for the smallest problem that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

from twin_attention.interop.parity.fuzz.problems import Problem
from twin_attention.interop.parity.records import CaseResult, Failure, failures_of
from twin_attention.interop.parity.workers import run_cases

Change = Callable[[Problem], Iterator[Problem]]


def shrink(
    problem: Problem,
    failures: set[Failure],
    run: Callable[[Problem], CaseResult],
    limit: float | None,
    seconds: float,
) -> Problem:
    """Return the smallest problem found within `seconds` that has one of the same failures.

    `run` is as `trial.run_problem`; a problem hangs after `limit` seconds.
    """
    search = _Search(problem, time.monotonic() + seconds)
    for result in run_cases(search, run, 1, lambda name: None, limit):
        if failures & failures_of(result):
            search.accept()
    return search.smallest


class _Search:
    def __init__(self, problem: Problem, until: float) -> None:
        self.smallest, self._until = problem, until
        self._tried: Problem = problem

    def accept(self) -> None:
        self.smallest = self._tried

    def __iter__(self) -> Iterator[Problem]:
        seen = {self.smallest.to_line()}
        before = None
        while before is not self.smallest:
            before = self.smallest
            for change in _CHANGES:
                yield from self._repeated(change, seen)

    def _repeated(self, change: Change, seen: set[str]) -> Iterator[Problem]:
        before = None
        while before is not self.smallest:
            before = self.smallest
            for self._tried in _valid(change, before):
                line = self._tried.to_line()
                if time.monotonic() > self._until or before is not self.smallest:
                    break
                if line not in seen:
                    seen.add(line)
                    yield self._tried


def _valid(change: Change, problem: Problem) -> Iterator[Problem]:
    try:
        for smaller in change(problem):
            _ = smaller.case.spec
            yield smaller
    except (ValueError, TypeError, ZeroDivisionError):
        return


def _plain_rows(problem: Problem) -> Iterator[Problem]:
    if problem.rows:
        yield replace(problem, rows={})
    for name in problem.rows:
        yield replace(problem, rows={x: y for x, y in problem.rows.items() if x != name})


def _plain_values(problem: Problem) -> Iterator[Problem]:
    plain: dict[str, Any] = {
        "hook": "", "spread": 1.0, "hiding": None, "constants": (), "odd_strides": False
    }  # fmt: skip
    yield replace(problem, **plain)
    for name, value in (plain | {"jax": False}).items():
        yield replace(problem, **{name: value})


def _default(name: str, problem: Problem) -> Iterator[Problem]:
    if name == "causal" and getattr(problem.case, "tree", ""):  # which needs it
        return
    (default,) = [x.default for x in fields(problem.case) if x.name == name] or [None]
    if getattr(problem.case, name, default) != default:
        yield _with(problem, **{name: default})


def _smaller_count(name: str, problem: Problem) -> Iterator[Problem]:
    count = getattr(problem.case, name, None)
    if isinstance(count, int) and count > 1:
        for smaller in (1, count // 2, count - 1):
            yield _with(problem, **{name: smaller})


def _fewer_heads(problem: Problem) -> Iterator[Problem]:
    heads_q, heads_kv = (getattr(problem.case, f"heads_{x}", 0) for x in ("q", "kv"))
    if heads_kv > 1:
        group = heads_q // heads_kv
        yield _with(problem, heads_q=group, heads_kv=1)
        yield _with(problem, heads_q=2 * group, heads_kv=2)
    if heads_q > heads_kv > 0:
        yield _with(problem, heads_q=heads_kv)


def _fewer_sequences(problem: Problem) -> Iterator[Problem]:
    lengths = getattr(problem.case, "lengths", ())
    new = getattr(problem.case, "new_tokens", None) or ()

    def kept(indices: list[int]) -> Problem:
        some: dict[str, Any] = {"lengths": tuple(lengths[i] for i in indices)}
        if new:
            some["new_tokens"] = tuple(new[i] for i in indices)
        return _with(problem, **some)

    count = len(lengths)
    if count > 1:
        yield kept([*range(count // 2)])
        yield kept([*range(count // 2, count)])
        for i in range(count):
            yield kept([x for x in range(count) if x != i])


def _shorter_sequences(problem: Problem) -> Iterator[Problem]:
    for name in ("lengths", "new_tokens"):
        lengths = getattr(problem.case, name, None) or ()
        for i, length in enumerate(lengths):
            for smaller in _halves(length):
                changed = (*lengths[:i], smaller, *lengths[i + 1 :])
                yield _with(problem, **{name: changed})


def _halves(length: Any) -> Iterator[Any]:
    """Yield shorter lengths, or pairs of them."""
    if isinstance(length, tuple):
        for i, one in enumerate(length):
            for smaller in _halves(one):
                yield (*length[:i], smaller, *length[i + 1 :])
    elif length > 1:
        yield length // 2
        yield length - 1


def _smaller_heads(problem: Problem) -> Iterator[Problem]:
    for name in ("head_dim", "head_dim_v"):
        size = getattr(problem.case, name, None)
        if isinstance(size, int):
            for smaller in (16, 64, 128, size - 8):
                if 16 <= smaller < size:
                    yield _with(problem, **{name: smaller})


def _with(problem: Problem, **changes: Any) -> Problem:
    return replace(problem, case=replace(problem.case, **changes))


_PLAIN = (
    "batch_invariant", "latent", "tangents", "row_max", "dropout_rate", "bias", "relative",
    "terms_in_q_dtype", "alibi", "sinks", "segments", "depths", "tree", "ranges", "softcap",
    "window_size", "scale", "deterministic", "precision", "dtype", "causal", "gradients",
    "head_dim_v", "padding", "rotary_dim", "rotary_interleaved", "kv_dtype", "scale_shape",
    "num_splits", "cascade", "common_pages", "own_masks", "tile_q", "tile_kv", "page_size",
    "positions", "exchange", "documents", "sharding",
)  # fmt: skip
_COUNTS = ("batch", "ranks", "seq_q", "seq_kv", "tokens", "num_states", "heads", "max_pages")
_CHANGES: tuple[Change, ...] = (
    _plain_values,
    _plain_rows,
    *(partial(_default, name) for name in _PLAIN),
    _fewer_heads,
    _fewer_sequences,
    *(partial(_smaller_count, name) for name in _COUNTS),
    _shorter_sequences,
    _smaller_heads,
)
