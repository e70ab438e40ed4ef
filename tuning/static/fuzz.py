"""Compile the kernels of random problems, without a GPU, and find compilers' mistakes.

The gate has few combinations of features. Speed is not judged: a rare combination may spill.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import count, islice

from tuning.static.gate import FAMILIES, compiler
from tuning.static.resources import measure
from twin_attention.contract.spec import AttentionSpec
from twin_attention.interop.parity.cases import ContextCase, FlashCase, VarlenCase
from twin_attention.interop.parity.fuzz.command import reproduce
from twin_attention.interop.parity.fuzz.problems import VARIANTS, Problem, draw

LONGEST = 2048


@dataclass(frozen=True)
class Compilation:
    problem: Problem
    spec: AttentionSpec
    sinks: bool
    framework: str
    target: str
    family: str


@dataclass(frozen=True)
class Mistake:
    compilation: Compilation
    reason: str

    def __str__(self) -> str:
        of = self.compilation
        name = f"{of.problem.name}, {of.framework} {of.family} on {of.target}"
        return f"{name}: {self.reason}\n    {reproduce(of.problem)}"


def compilations(framework: str, target: str, number: int, seed: int) -> list[Compilation]:
    return [
        Compilation(problem, case.spec, case.sinks, framework, target, family)
        for problem, case in islice(_problems(seed), number)
        for family, targets in FAMILIES[framework].items()
        if family != "triton" and target in targets
    ]


def _problems(seed: int) -> Iterator[tuple[Problem, FlashCase | VarlenCase]]:
    for index in count(step=VARIANTS):
        problem = draw(seed, index, LONGEST)
        case = problem.case
        if isinstance(case, ContextCase) or not isinstance(case, FlashCase | VarlenCase):
            continue
        if case.dtype != "float32" and case.spec.seq_q and case.spec.seq_kv:
            yield problem, case


def find_mistakes(of: Compilation) -> tuple[int, list[Mistake]]:
    compile_kernels = compiler(of.framework, of.family)
    options = {"family": of.family} if of.family == "gluon" else {}
    try:
        with redirect_stdout(io.StringIO()):  # Triton prints the PTX that ptxas did not take
            found = compile_kernels(of.spec, of.target, sinks=of.sinks, **options)
    except NotImplementedError:
        return 0, []
    except Exception as error:  # whatever a compiler raises
        reason = " ".join(str(error).split())[:100]
        return 0, [Mistake(of, f"{type(error).__name__}: {reason}")]
    mistakes = []
    for kernel, _config, binary in found:
        taken = measure(binary, of.target)
        if taken.unwritten:
            mistakes.append(Mistake(of, f"{kernel} reads registers that nothing wrote"))
        if taken.overwritten:
            mistakes.append(Mistake(of, f"{kernel} overwrites barriers' numbers"))
        if taken.serialized:
            mistakes.append(Mistake(of, f"{kernel} waits for each wgmma"))
    return len(found), mistakes
