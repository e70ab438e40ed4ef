"""Put any attention through parity's problems: for authors of kernels, in their own tests.

The oracle runs in PyTorch; a JAX function needs JAX as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import Parameter, signature
from typing import Any, Literal

from twin_attention.interop.parity.cases import Case
from twin_attention.interop.parity.fuzz.problems import Problem, draw_claimed
from twin_attention.interop.parity.fuzz.shrink import failures_of, shrink
from twin_attention.interop.parity.fuzz.trial import run_problem
from twin_attention.interop.parity.records import FEATURES, CaseResult, failures, features_of
from twin_attention.interop.parity.subjects.library import OPERANDS, Library
from twin_attention.interop.parity.suites.kinds import KINDS

# What a claim needs as a parameter, where the names differ.
PARAMETERS = {"window": "window_size", "segments": "q_segment_ids", "tree": "kv_ends",
              "alibi": "alibi_slopes", "relative": "relative_bias"}  # fmt: skip
NAMED = ("causal", "scale", "softcap", "sinks", "bias")


def check_attention(
    function: Callable[..., Any],
    supports: Iterable[str],
    *,
    framework: Literal["torch", "jax"] = "torch",
    device: str = "cpu",
    suite: str | None = "quick",
    seconds: float = 20.0,
    seed: int = 0,
    longest: int = 40,
    problem: str | None = None,
    shrink_seconds: float = 20.0,
) -> dict[str, float]:
    """Compare an attention with the float64 oracle on named and random problems.

    Args:
        function: takes operands and options of one of `torch_attn`'s functions by name, as far as
            it has parameters for them, and returns out, or out and the log-sum-exp.
        supports: names of `FEATURES`: the function, dtypes and options that it computes, with
            "gradients", "lse" and "gradient of lse" for what it returns; "NaN" if padding may hold
            it.
        suite: of named cases; None for none.
        seconds: of random problems, of `longest` tokens or so.
        problem: only this one, as a failure prints it.

    Returns:
        The worst error over its budget, by feature.

    Raises:
        ValueError: a claim that is unknown, or that the function has no parameter for.
        AssertionError: a result is outside of its budget, or raised. The message has the smallest
            problem found, for `problem`.

    Source: the budgets are `twin_attention.contract.tolerances`'.

    >>> from torch_attn import flash_attention
    >>> claims = {"flash_attention", "float32", "causal", "gradients"}
    >>> worst = check_attention(flash_attention, claims, suite=None, seconds=1)
    >>> worst["causal"] <= 1
    True
    """
    claims = frozenset(supports)
    parameters = _parameters(function, claims)
    make = partial(_bind, function, parameters)
    subject = Library("the function", framework, framework, make, claims, on_cpu="all")
    run = partial(run_problem, groups=[[subject]], device=device)
    worst: dict[str, float] = {}
    for drawn in _problems(subject, suite, seconds, seed, longest, problem):
        result = run(drawn)
        if not result.ok:
            raise AssertionError(_message(drawn, result, run, shrink_seconds))
        for feature in features_of(result.problem) if result.comparisons else ():
            ratios = (c.agreement.ratio for c in result.comparisons)
            worst[feature] = max(worst.get(feature, 0.0), *ratios)
    if not worst:
        raise AssertionError("supports: expected claims of some problem that runs, got none")
    return worst


def _parameters(function: Callable[..., Any], claims: frozenset[str]) -> set[str] | None:
    """Return the names of a function's parameters; None for any."""
    if unknown := sorted(claims - {*FEATURES}):
        raise ValueError(f"supports: expected some of {', '.join(FEATURES)}, got {unknown}")
    parameters = signature(function).parameters
    if any(x.kind == Parameter.VAR_KEYWORD for x in parameters.values()):
        return None
    needed = {PARAMETERS.get(x, x) for x in claims & {*NAMED, *PARAMETERS}}
    if missing := sorted(needed - {*parameters}):
        raise ValueError(f"supports: expected parameters {', '.join(missing)} for it, got none")
    return {*parameters}


def _bind(
    function: Callable[..., Any], parameters: set[str] | None, case: Case, tensors: dict[str, Any]
) -> Callable[..., Any]:
    """Bind a case's options and tensors, as far as they are taken."""
    bound = case.options | {x: y for x, y in tensors.items() if x not in OPERANDS}
    taken = bound.keys() - {"deterministic", "precision"} if parameters is None else parameters
    return partial(function, **{x: y for x, y in bound.items() if x in taken})


def _problems(
    subject: Library, suite: str | None, seconds: float, seed: int, longest: int, line: str | None
) -> Iterator[Problem]:
    if line is not None:
        yield Problem.of_line(line)
        return
    named = [] if suite is None else [case for cases in KINDS for case in cases(suite)]
    yield from (Problem(case) for case in named if subject.supports(case) is None)
    until = time.monotonic() + seconds
    for problem in draw_claimed([subject], seed, longest):
        if time.monotonic() > until:
            return
        yield problem


def _message(
    problem: Problem, result: CaseResult, run: Callable[[Problem], CaseResult], seconds: float
) -> str:
    if seconds:
        problem = shrink(problem, failures_of(result), run, None, seconds)
        result = run(problem)
    lines = "\n    ".join(failures(result))
    return f"{lines}\n    check_attention(..., problem={problem.to_line()!r})"
