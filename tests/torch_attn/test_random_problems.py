"""Random problems of parity's ``--fuzz`` that the explicit kernels take, interpreted.

To run others, or more:

    RANDOM_SEED=7 RANDOM_PROBLEMS=500 python -m pytest tests/torch_attn/test_random_problems.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from random import Random
from unittest import mock

import pytest

from tests.torch_attn.explicit_kernels import check_backward, check_forward, gluon_backend, summing
from tests.torch_attn.gluon_interpreter import READS_FIRST, WRITES_FIRST, Mode
from torch_attn.kernels.sm90 import flash_bwd, flash_fwd
from twin_attention.interop.parity.cases import BlockSparseCase, FlashCase, VarlenCase
from twin_attention.interop.parity.fuzz.problems import VARIANTS, draw
from twin_attention.targets.family import Backend

SEED = int(os.environ.get("RANDOM_SEED", "0"))
PROBLEMS = int(os.environ.get("RANDOM_PROBLEMS", "6"))  # of each target
LONGEST = 150  # tokens of a long sequence; a few are longer
MOST_PAIRS = 500_000  # of a query and a key, of all heads and any two sequences


def random_cases(backend: Backend) -> Iterator[FlashCase | VarlenCase]:
    """Yield random problems of differentiable functions that a family takes, without an end."""
    for index in count():
        case = draw(SEED, index * VARIANTS, LONGEST).case
        if not isinstance(case, FlashCase | VarlenCase) or isinstance(case, BlockSparseCase):
            continue
        case = replace(case, tangents=False)
        if isinstance(case, FlashCase):
            case = replace(case, gradients=True)
        spec = case.spec
        pairs = spec.batch * spec.heads_q * spec.seq_q * spec.seq_kv
        if 0 < pairs <= MOST_PAIRS and takes(backend, "flash_fwd", case):
            yield case


def takes(backend: Backend, operation: str, case: FlashCase | VarlenCase) -> bool:
    return backend.family.supports(operation, case.spec, backend.target) is None


@contextmanager
def any_choice(random: Random) -> Iterator[None]:
    """Choose at random what depends on sizes that no problem here has."""
    with (
        summing(random.random() < 0.5),
        mock.patch.object(flash_bwd, "KEYS_BESIDE_ROWS", random.choice((0, 1000))),
        mock.patch.object(flash_bwd, "SECTION_BYTES", random.choice((0, 2**24))),
        mock.patch.object(flash_bwd, "ITEMS_OF_SECTIONS", random.choice((0, 24))),
        mock.patch.object(flash_fwd, "COUNTED_STEPS", random.choice(({512: 2**30}, {512: 1}))),
    ):
        yield


@pytest.mark.parametrize(
    ("target", "case"),
    [
        pytest.param(target, case, id=f"{target}-{case.name}")
        for target in ("sm80", "sm90")
        for case in islice(random_cases(gluon_backend(target)), PROBLEMS)
    ],
)
def test_random_problems(target, case):
    backend, random = gluon_backend(target), Random(f"{target}, {case.name}")
    mode = random.choice((WRITES_FIRST, READS_FIRST, Mode(seed=random.randrange(100))))
    with any_choice(random):
        check_forward(case, mode, backend)
        if takes(backend, "flash_bwd", case):
            check_backward(case, mode, backend)
