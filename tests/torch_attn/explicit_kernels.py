"""Checks of explicit Gluon kernels, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch

from tests.torch_attn.gluon_interpreter import READS_FIRST, WRITES_FIRST, Mode, interpreted
from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.check import agreements
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import Expectation, evaluate, expectations, parts_of
from twin_attention.targets import config
from twin_attention.targets.conditions import CONDITIONS
from twin_attention.targets.family import FAMILIES, Backend

MODES = {"writes first": WRITES_FIRST, "reads first": READS_FIRST, "random": Mode()}


def in_turn(cases: Iterable[Any], first: str = "writes first") -> pytest.MarkDecorator:
    """Run each case in one mode, in turn, from mode `first` on."""
    names = [*MODES] * 2
    modes = cycle(names[names.index(first) :][: len(MODES)])
    runs = [
        pytest.param(case, MODES[mode], id=f"{case.name}-{mode}")
        for case, mode in zip(cases, modes, strict=False)
    ]
    return pytest.mark.parametrize(("case", "mode"), runs)


# Lengths that end one key behind a tile, and tiles of keys that begin where queries end.
EDGES = [
    FlashCase("one key more", 1, 130, 257, 1, 1, 64),
    FlashCase("one key more, causal", 1, 129, 257, 1, 1, 128, causal=True),
    FlashCase("slopes", 1, 256, 256, 1, 1, 64, alibi="heads"),
    *(FlashCase(f"table of {n}", 1, 130, 130, 1, 1, 64, relative=n) for n in (1, 2, 3)),
]


def lower_scores(inputs: dict[str, torch.Tensor]) -> None:
    """Bring all scores near -300, so that a key which does not exist would count alone."""
    width = inputs["q"].shape[-1]
    inputs["q"][..., 0], inputs["k"][..., 0] = 20.0, -15.0 * width**0.5


# The tiles of every kernel are listed first.
LISTED = [
    FlashCase("documents", 1, 260, 260, 1, 1, 64, segments="documents", causal=True),
    FlashCase("shuffled", 2, 140, 150, 1, 1, 128, segments="shuffled", softcap=5.0, sinks=True),
    FlashCase("tree", 1, 300, 300, 1, 1, 96, tree="nested", causal=True),
    FlashCase(
        "depths", 2, 70, 140, 1, 1, 64, tree="nested", segments="documents", depths=True,
        causal=True, window_size=(9, None),
    ),
    FlashCase(
        "any ends", 1, 150, 200, 2, 1, 64, tree="any", segments="documents", causal=True,
        window_size=(90, None),
    ),
    VarlenCase(
        "packed trees", ((140, 150), (0, 30), (70, 70)), (9, 9), 2, 1, tree="nested", depths=True,
        window_size=(9, None),
    ),
    FlashCase("large heads", 1, 70, 140, 1, 1, 192, segments="shuffled", tree="any", causal=True),
    FlashCase("prefix and spans", 1, 300, 300, 2, 1, 64, ranges="both", causal=True),
    FlashCase("spans", 1, 260, 390, 1, 1, 128, ranges="spans", window_size=(30, 9)),
    FlashCase(
        "any ranges", 2, 140, 200, 1, 1, 128, ranges="any", tree="any", segments="documents",
        depths=True, causal=True, window_size=(9, None), softcap=5.0,
    ),
    FlashCase("ranges of large heads", 1, 70, 260, 1, 1, 256, ranges="spans", causal=True),
    VarlenCase("packed ranges", ((140, 150), (0, 30), (70, 300)), (9, 9), 2, 1, 96, ranges="any"),
]  # fmt: skip


@contextmanager
def summing(sums: bool) -> Iterator[None]:
    names = (">= 1024 keys", ">= 2048 keys", "sees 640 keys on average")
    with mock.patch.dict(CONDITIONS, dict.fromkeys(names, lambda spec: sums)):
        config._shipped.cache_clear()
        yield
    config._shipped.cache_clear()


def gluon_backend(target: str) -> Backend:
    (family,) = (x for x in FAMILIES["torch_attn"] if (x.name, x.folder) == ("gluon", target))
    return Backend(family, target)


def check_results(results: dict[str, torch.Tensor], expected: Expectation) -> None:
    for name, agreement in agreements(results, expected).items():
        assert agreement.ok, (name, agreement)


def check_forward(
    case: FlashCase | VarlenCase,
    mode: Mode,
    backend: Backend,
    replaced: Any = None,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> list[str]:
    """Return the names of the kernels; `change` changes the inputs first."""
    inputs, spec = make_inputs(case, "cpu"), case.spec
    if change is not None:
        change(inputs)
    (expected,) = expectations(inputs, parts_of(spec))
    del inputs["dout"], inputs["dlse"]
    with interpreted(mode, replace=replaced) as launched:
        results = backend.family.function("flash_fwd")(_operands(case)(**inputs), spec, backend)
    names = ["out", "lse", *["rest"] * bool(spec.terms), *["row_max"] * spec.row_max]
    found = dict(zip(names, results, strict=True))
    found.pop("rest", None)
    check_results(found, expected)
    return launched


def check_backward(
    case: FlashCase | VarlenCase,
    mode: Mode,
    backend: Backend,
    replaced: Any = None,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> list[str]:
    """Return the names of the kernels. The gradient of lse is NaN in rows without a key."""
    inputs, spec = make_inputs(case, "cpu"), case.spec
    if change is not None:
        change(inputs)
    (expected,) = expectations(inputs, parts_of(spec))
    exact = evaluate(inputs, spec, torch.float32)
    out, lse = exact["out"].to(inputs["q"].dtype), exact["lse"]
    inputs["dlse"][lse.isneginf()] = torch.nan
    dout, dlse = inputs.pop("dout"), inputs.pop("dlse")
    rest = torch.zeros_like(lse) if spec.terms else None
    flash_bwd = backend.family.function("flash_bwd")
    with interpreted(mode, replace=replaced) as launched:
        gradients = flash_bwd(dout, dlse, _operands(case)(**inputs), out, lse, rest, spec, backend)
    named = gradients._asdict().items()
    check_results({f"d{name}": x for name, x in named if x is not None}, expected)
    return launched


def _operands(case: FlashCase | VarlenCase) -> Any:
    return VarlenOperands if isinstance(case, VarlenCase) else FlashOperands
