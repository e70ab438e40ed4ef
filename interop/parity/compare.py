"""Results against the oracle, and against the other framework's."""

from __future__ import annotations

import math

from interop.parity.inputs import Tensors
from interop.parity.oracle import Expectation
from interop.parity.records import ORACLE, Comparison
from interop.parity.run import Runner, twins
from twin_attention.contract.tolerances import (
    Agreement,
    compare_lse,
    compare_to_reference,
    compare_twins,
)


def compare(
    results: dict[Runner, Tensors], expected: list[Expectation], dtype: str
) -> list[Comparison]:
    """Hold every result to its budget, and each torch_attn to each pallas_attn result.

    Args:
        results: what each runner gave.
        expected: what it should have given, everything at once or on samples.
        dtype: the name of the inputs' dtype.

    Returns:
        One comparison for each runner and output and for each pair of twins and output; of
        samples, the worst one.
    """
    found = [c for expectation in expected for c in _on_part(results, expectation, dtype)]
    if len(expected) > 1:
        found += _nan_outside_samples(results)
    worst: dict[tuple[str, str], Comparison] = {}
    for c in found:
        lane = (c.title, c.output)
        if lane not in worst or c.agreement.ratio > worst[lane].agreement.ratio:
            worst[lane] = c
    return list(worst.values())


def _on_part(results: dict[Runner, Tensors], expected: Expectation, dtype: str) -> list[Comparison]:
    got = {runner: expected.crop(tensors) for runner, tensors in results.items()}
    agreements = {
        runner: {name: _agreement(name, x, expected, dtype) for name, x in tensors.items()}
        for runner, tensors in got.items()
    }
    found = [
        Comparison(runner.label, ORACLE, name, agreement)
        for runner, by_name in agreements.items()
        for name, agreement in by_name.items()
    ]
    for a, b in twins(list(got)):
        for name in got[a]:
            x, y = got[a][name], got[b][name]
            budgets = agreements[a][name], agreements[b][name]
            agreement = compare_lse(x, y) if name == "lse" else compare_twins(x, y, *budgets)
            found.append(Comparison(a.label, b.label, name, agreement))
    return found


def _agreement(name: str, got, expected: Expectation, dtype: str) -> Agreement:
    if name == "lse":
        return compare_lse(got, expected.ref[name])
    kind = "output" if name == "out" else "gradient"
    return compare_to_reference(got, expected.ref[name], expected.lp[name], dtype, kind)


def _nan_outside_samples(results: dict[Runner, Tensors]) -> list[Comparison]:
    """A failed comparison for each result with a NaN anywhere."""
    nan = Agreement(math.inf, 0.0, math.inf, 0.0, finite=False)
    return [
        Comparison(runner.label, ORACLE, name, nan)
        for runner, tensors in results.items()
        for name, x in tensors.items()
        if x.isnan().any()
    ]
