from __future__ import annotations

from dataclasses import replace

import pytest

from tests.torch_attn.explicit_kernels import (
    EDGES,
    LISTED,
    MODES,
    check_backward,
    check_forward,
    gluon_backend,
    in_turn,
    lower_scores,
)
from tests.torch_attn.gluon_interpreter import READS_FIRST, WRITES_FIRST, edited
from torch_attn.kernels.sm80.flash_bwd import flash_bwd_dkdv_kernel, flash_bwd_dq_kernel
from torch_attn.kernels.sm80.flash_fwd import flash_fwd_kernel
from twin_attention.interop.parity.cases import FlashCase, VarlenCase

BACKEND = gluon_backend("sm80")
SUMMED = ["flash_bwd_preprocess", "flash_bwd_fused", "flash_bwd_postprocess"]
DETERMINISTIC = ["flash_bwd_preprocess", "flash_bwd_dq", "flash_bwd_dkdv"]
LENGTHS = ((40, 150), (0, 30), (1, 1), (130, 70))

CASES = [
    FlashCase("full", 1, 128, 192, 1, 1),
    FlashCase("causal", 1, 100, 200, 1, 1, 128, causal=True),
    FlashCase("window", 1, 200, 200, 1, 1, window_size=(70, 20)),
    FlashCase("softcap", 1, 70, 128, 1, 1, 128, softcap=2.0, dtype="float16"),
    FlashCase("ragged", 2, 70, 130, 1, 1, 80, sinks=True),
    FlashCase("unaligned rows", 1, 70, 130, 1, 1, 20),
    FlashCase("narrow values", 1, 70, 140, 2, 2, 96, 64, causal=True),
    FlashCase("wide values", 1, 70, 140, 1, 1, 64, 128),
    FlashCase("large heads", 1, 70, 140, 1, 1, 192, causal=True),
    FlashCase("largest heads", 1, 70, 140, 1, 1, 256, causal=True),
    FlashCase("groups", 2, 70, 200, 4, 2, causal=True),
    FlashCase("hidden rows", 1, 200, 100, 1, 1, causal=True),
    VarlenCase("packed", LENGTHS, sinks=True),
    VarlenCase("packed groups", LENGTHS[:3], (0, 5), 2, 1, 96, dtype="float16"),
]


@in_turn(CASES)
def test_forward(case, mode):
    assert check_forward(case, mode, BACKEND) == ["flash_fwd"]


@in_turn(CASES, "reads first")
def test_backward_that_sums_dq(case, mode):
    assert check_backward(case, mode, BACKEND) == SUMMED


@in_turn(CASES, "random")
def test_deterministic_backward(case, mode):
    case = replace(case, deterministic=True)
    assert check_backward(case, mode, BACKEND) == DETERMINISTIC


SLOT = "slot = (step & 1) ^ 1"
NEXT = "# Wait for the queries; fetch the next ones.\n            wait(0)"
RACES = {
    "no wait": (
        READS_FIRST, check_forward, flash_fwd_kernel, f"{SLOT}\n                wait(0)", SLOT
    ),
    "a group pending": (READS_FIRST, check_backward, flash_bwd_dkdv_kernel, NEXT, "wait(1)"),
    "a stage too early": (WRITES_FIRST, check_forward, flash_fwd_kernel, SLOT, "slot = step & 1"),
    "a stage overwritten": (
        WRITES_FIRST, check_backward, flash_bwd_dkdv_kernel, "do_tile, slot ^ 1", "do_tile, slot"
    ),
    "a copy of no group": (
        READS_FIRST, check_backward, flash_bwd_dq_kernel,
        "True, ASYNC,\n    )  # fmt: skip\n    commit()", "True, ASYNC)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("mode", "check", "kernel", "old", "new"), RACES.values(), ids=RACES)
def test_races_make_wrong_results(mode, check, kernel, old, new):
    case = FlashCase("race", 1, 128, 192, 1, 1, deterministic=True)
    with pytest.raises(AssertionError, match="Agreement"):
        check(case, mode, BACKEND, {kernel: edited(kernel, old, new)})


@pytest.mark.parametrize("case", EDGES[:2], ids=lambda case: case.name)
def test_edges_of_tiles(case):
    check_forward(case, MODES["random"], BACKEND, change=lower_scores)
    for deterministic in (False, True):
        case = replace(case, deterministic=deterministic)
        check_backward(case, MODES["random"], BACKEND, change=lower_scores)


@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.name)
def test_listed_tiles(case):
    mode = MODES["random"]
    assert check_forward(case, mode, BACKEND) == ["tile_lists", "flash_fwd"]
    assert check_backward(case, mode, BACKEND) == [SUMMED[0], "tile_lists", *SUMMED[1:]]


def test_deterministic_backward_of_listed_tiles():
    case = replace(LISTED[1], deterministic=True)
    kernels = [SUMMED[0], "tile_lists", "flash_bwd_dq", "tile_lists", "flash_bwd_dkdv"]
    assert check_backward(case, MODES["writes first"], BACKEND) == kernels
