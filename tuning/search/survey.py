"""Compile configurations without launching, in many processes, and read their resources.

Triton's disk cache keeps the code for launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import NamedTuple

from tuning.search.cases import TimedCase, reader
from tuning.search.table import ConfigTable, Row
from tuning.static.gate import FRAMEWORKS, Problem, compiler, failures, problems
from tuning.static.resources import Resources, measure
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import use_configs
from twin_attention.targets.kernels import KernelConfig

# Bytes per thread. SM90's rows may spill and are chosen by times; more is not worth a launch.
MOST_SPILLED = 4096


@dataclass(frozen=True)
class Survey:
    """A compiled configuration: the resources of the first problem that failed, or of the first."""

    config: KernelConfig
    resources: Resources | None
    reason: str | None = None
    code: str | None = None


class Plan(NamedTuple):
    package: str
    target: str
    kernel: str
    problems: tuple[Problem, ...]
    spec: AttentionSpec | DecodeSpec
    device: str | None


def survey(
    pool: Executor,
    table: ConfigTable,
    package: str,
    target: str,
    device: str | None,
    row: Row,
    case: TimedCase,
    configs: Sequence[KernelConfig],
) -> Iterator[Survey]:
    """Return a survey of each configuration of a row, in order, made in all processes.

    Raise LookupError if no problem of the static gate reads the row.
    """
    if package == "pallas_attn" and device != target:
        device = None  # its recordings are compiled for the target's own devices alone
    reading = tuple(gate_problems(table, package, target, row))[::-1]  # plain ones rule out little
    if not reading:
        raise LookupError(f"{row}: expected a problem of tuning/static/gate.py that reads it")
    plan = Plan(package, target, row.kernel, reading, case.spec, device)
    return pool.map(partial(compile_one, plan), configs)


def gate_problems(table: ConfigTable, package: str, target: str, row: Row) -> Iterator[Problem]:
    (framework,) = (name for name, side in FRAMEWORKS.items() if side == package)
    for problem in problems(framework, target):
        if table.index_of(row.kernel, reader(row.kernel, problem.spec)) == row.index:
            yield problem


def compile_one(plan: Plan, config: KernelConfig) -> Survey:
    compile_kernels = compiler(plan.problems[0].framework)
    first = code = None
    try:
        with use_configs({plan.kernel: vars(config)}, plan.package):
            for problem in plan.problems:
                for kernel, _, binary in compile_kernels(problem.spec, plan.target):
                    if kernel != plan.kernel:
                        continue
                    resources = measure(binary, plan.target)
                    first = first or resources
                    code = code or sha256(binary.asm["cubin"]).hexdigest()
                    if reasons := _reasons(problem, kernel, config, resources):
                        return Survey(config, resources, f"{problem.feature}: {reasons[0]}")
            if plan.device == plan.target:
                compile_kernels(plan.spec, plan.target)
            elif plan.device is not None:
                compile_kernels(plan.spec, plan.target, device=plan.device)
    except Exception as error:  # a compiler's
        return Survey(config, first, f"{type(error).__name__}: {error}".splitlines()[0])
    return Survey(config, first, code=code)


def _reasons(
    problem: Problem, kernel: str, config: KernelConfig, resources: Resources
) -> tuple[str, ...]:
    found = failures(problem, kernel, config, resources)
    spilled = resources.spill_stores + resources.spill_loads
    if spilled > MOST_SPILLED:
        found += (f"spills {spilled} B",)
    if resources.occupancy == 0:
        found += ("no block fits an SM",)
    return found
