from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from twin_attention.interop.parity.check import agreements, check_layout, compare_sides
from twin_attention.interop.parity.inputs import Tensors
from twin_attention.interop.parity.oracle import Spec, expectations, parts_of

RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks")


def assert_within_budget(got: Tensors | Sequence[Tensor], inputs: Tensors, spec: Spec) -> None:
    got = _named(got)
    check_layout(got, inputs, spec, "got")
    (expected,) = expectations(inputs, parts_of(spec))
    assert got.keys() == expected.ref.keys()
    for name, agreement in agreements(got, expected).items():
        assert agreement.ok, (name, agreement)


def assert_twins(
    a: Tensors | Sequence[Tensor], b: Tensors | Sequence[Tensor], inputs: Tensors, spec: Spec
) -> None:
    a, b = _named(a), _named(b)
    (expected,) = expectations(inputs, parts_of(spec))
    assert a.keys() == b.keys() == expected.ref.keys()
    for name, budget in agreements(a, expected).items():
        agreement = compare_sides(name, a[name], b[name], budget, budget)
        assert agreement.ok, (name, agreement)


def _named(results: Tensors | Sequence[Tensor]) -> Tensors:
    return results if isinstance(results, dict) else dict(zip(RESULTS, results, strict=False))


def poison_padding(inputs: Tensors) -> None:
    """Fill tokens of segment ids below 0, and the gradient of their output, with NaN."""
    padding = inputs["q_segment_ids"] < 0
    for name in ("q", "k", "v", "dout"):
        inputs[name][padding] = float("nan")


def poison_before(inputs: Tensors, edges: Sequence[int]) -> None:
    """Fill keys before each sequence's edge with NaN, and give back pages of only such keys."""
    size = inputs["k_pages"].shape[1]
    for table, edge in zip(inputs["block_tables"], edges, strict=True):
        for key in range(edge):
            for name in {"k_pages", "v_pages"} & inputs.keys():
                inputs[name][table[key // size], key % size] = float("nan")
        table[: max(0, edge) // size] = -1
