"""Check results against the oracle and against the other side, by their error budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from twin_attention.contract.paged_spec import AppendSpec, PagedSpec
from twin_attention.contract.spec import AttentionSpec, MergeSpec, VarlenSpec
from twin_attention.contract.tolerances import (
    Agreement,
    compare_lse,
    compare_to_reference,
    compare_twins,
    lse_tolerance,
    lse_unit,
)
from twin_attention.contract.validate.errors import fail
from twin_attention.interop.parity.cases import Case
from twin_attention.interop.parity.inputs import Tensors
from twin_attention.interop.parity.oracle import (
    OF_ROWS,
    OF_TANGENTS,
    SAMPLES,
    SUMS,
    Expectation,
    Spec,
    expectations,
    sample_of,
)
from twin_attention.interop.parity.records import ORACLE, Comparison
from twin_attention.interop.parity.subjects.formulas import confirm
from twin_attention.interop.parity.subjects.subject import Subject, twins

_WITH_ROWS = ("out", "dq", "dk", "dv", "tout")
NAN = Agreement(math.inf, 0.0, math.inf, 0.0, finite=False)


def agreements(results: Tensors, expected: Expectation) -> dict[str, Agreement]:

    spec = expected.part.spec
    is_tf32 = isinstance(spec, AttentionSpec) and spec.precision == "tf32"
    dtype = "tf32" if is_tf32 else spec.dtype

    def agreement(name: str, got: torch.Tensor) -> Agreement:
        ref, lp = expected.ref[name], expected.lp[name]
        if name in OF_ROWS:
            exponents = None if isinstance(spec, MergeSpec) else expected.exponents
            unit = 1.0 if exponents is None else lse_unit(exponents)
            return compare_lse(got, ref, lse_tolerance(ref, lp, dtype), unit)
        kind = "gradient" if name.startswith("d") or name in OF_TANGENTS else "output"
        return compare_to_reference(
            got, ref, lp, dtype, kind, expected.exponents, expected.cancelled.get(name, 0.0),
            "number" if name in SUMS else "row" if name in _WITH_ROWS else None,
            expected.errors.get(name, 0.0),
        )  # fmt: skip

    return {name: agreement(name, x) for name, x in expected.crop(results).items()}


def worst(results: Tensors, expected: Sequence[Expectation]) -> float:
    """Return the largest error over its budget; above 1 the results are wrong."""
    return max(a.ratio for part in expected for a in agreements(results, part).values())


def sample_check(
    inputs: Tensors, spec: Spec, names: Sequence[str], samples: int = SAMPLES
) -> Callable[[Sequence[Any]], float]:
    """Return a check of results on all rows of a few heads, or a few sequences of a decode.

    The oracle runs at once. The check takes results in the order of `names`. `samples` is 2 or
    more.
    """
    return check_of(expectations(inputs, sample_of(spec, samples)), names)


def check_of(
    expected: Sequence[Expectation], names: Sequence[str]
) -> Callable[[Sequence[Any]], float]:
    def check(arrays: Sequence[Any]) -> float:
        tensors = (x.detach() if isinstance(x, torch.Tensor) else _to_torch(x) for x in arrays)
        return worst(dict(zip(names, tensors, strict=True)), expected)

    return check


def _to_torch(x: Any) -> torch.Tensor:
    from twin_attention.interop.exchange import to_torch  # needs JAX

    return to_torch(x)


def compare(
    results: Mapping[Subject, Tensors], expected: Sequence[Expectation], case: Case, inputs: Tensors
) -> list[Comparison]:
    """Check every result by its budget, and each torch_attn result against each pallas_attn one.

    A second oracle confirms a failure; AssertionError if it does not.

    Return one comparison per subject and output and per twins and output: the worst of all samples.
    """
    found = [c for part in expected for c in _compare_part(results, part)]
    if len(expected) == 1 and not all(c.ok for c in found):
        confirm(case, inputs, expected[0].ref)
    if len(expected) > 1:
        found += [
            Comparison(subject.label, ORACLE, name, NAN)  # it may lie between the samples
            for subject, tensors in results.items()
            for name, x in tensors.items()
            if x.isnan().any()
        ]
    lanes: dict[tuple[str, str], Comparison] = {}
    for c in found:
        lane = (c.title, c.output)
        if lane not in lanes or c.agreement.ratio > lanes[lane].agreement.ratio:
            lanes[lane] = c
    return list(lanes.values())


def compare_sides(
    name: str, a: torch.Tensor, b: torch.Tensor, *budgets: Agreement,
    exponents: torch.Tensor | None = None,
) -> Agreement:  # fmt: skip
    if name in OF_ROWS:
        unit = lse_unit(b if exponents is None else exponents)
        return compare_lse(a, b, max(budget.max_budget for budget in budgets), unit)
    return compare_twins(a, b, *budgets)


def check_layout(results: Tensors, inputs: Tensors, spec: Spec, case: str) -> None:
    """Refuse results without the contract's shapes, dtypes and devices (ValueError)."""
    first = inputs[{MergeSpec: "outs", AppendSpec: "k_new"}.get(type(spec), "q")]
    rows = first.shape[1:-1] if isinstance(spec, MergeSpec) else first.shape[:-1]
    heads = 0 if isinstance(spec, VarlenSpec | PagedSpec) else 1
    alike = {name: (tuple(x.shape), x.dtype) for name, x in inputs.items()}
    layouts = {f"d{name}": layout for name, layout in alike.items()} | {
        "out": ((*rows, spec.head_dim_v), first.dtype)
    }
    layouts["tout"] = layouts["out"]
    layouts |= dict.fromkeys(
        (*OF_ROWS, "tlse"), ((*rows[:heads], rows[-1], *rows[heads:-1]), torch.float32)
    )
    if isinstance(spec, AppendSpec):  # of the pools, and of rotated queries
        layouts = alike
    for name, got in results.items():
        shape, dtype = layouts[name]
        if (tuple(got.shape), got.dtype, got.device) != (shape, dtype, first.device):
            expected = f"{shape} {dtype} on {first.device}"
            actual = f"{tuple(got.shape)} {got.dtype} on {got.device}"
            fail(ValueError, f"{case}: {name}", expected, actual)


def _compare_part(results: Mapping[Subject, Tensors], expected: Expectation) -> list[Comparison]:
    budgets = {subject: agreements(tensors, expected) for subject, tensors in results.items()}
    found = [
        Comparison(subject.label, ORACLE, name, agreement)
        for subject, by_name in budgets.items()
        for name, agreement in by_name.items()
    ]
    for a, b in twins([*results]):
        x, y = expected.crop(results[a]), expected.crop(results[b])
        for name in (name for name in x if name in y or name not in OF_TANGENTS):
            both = budgets[a][name], budgets[b][name]
            exponents = expected.exponents
            agreement = compare_sides(name, x[name], y[name], *both, exponents=exponents)
            found.append(Comparison(a.label, b.label, name, agreement))
    return found
