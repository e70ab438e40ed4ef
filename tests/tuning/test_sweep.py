"""No valid problem is refused for want of shared memory."""

from dataclasses import replace
from itertools import product

import pytest

from tuning.static import pallas_aot
from tuning.static.gate import FRAMEWORKS, Problem, compiler, problems, shared_memory_limit
from tuning.static.shared_memory import only_shared_memory
from tuning.static.sweep import FEATURES, lengths_of, misfits_of
from twin_attention.contract.paged_spec import QUANTIZED_DTYPES
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.targets.kernels import FAMILY_KERNELS
from twin_attention.targets.target import SHARED_MEMORY_OF_SMALLER_CARDS, TARGETS

ROW = Problem("jax", "sm90", "bfloat16", 256, "causal")


@pytest.mark.parametrize(
    ("framework", "target", "feature"), [("jax", "sm80", "decode"), ("torch", "sm90", "causal")]
)
def test_shared_memory_is_that_of_the_finished_kernels(framework, target, feature):
    """And what has no code is not taken for a finished kernel."""
    spec = Problem(framework, target, "bfloat16", 16, feature).spec
    with only_shared_memory():
        without_code = compiler(framework)(spec, target)
    finished = compiler(framework)(spec, target)
    assert all(binary.asm["cubin"] for _, _, binary in finished)
    found, expected = (
        {kernel: binary.metadata.shared for kernel, _, binary in kernels}
        for kernels in (without_code, finished)
    )
    assert found == expected
    assert max(expected.values()) > 0


@pytest.mark.parametrize(("limit", "stages"), [(227 * 1024, 2), (160 * 1024, 1)])
def test_a_pipeline_has_the_stages_that_fit(monkeypatch, limit, stages):
    """Lengths are static: the short problem's loops of a step or two may become plain code."""
    short = FlashCase("", 1, 113, 203, 2, 2, 192, dtype="float16", causal=True).spec
    long = replace(short, seq_q=1024, seq_kv=1024)
    monkeypatch.setattr(
        pallas_aot,
        "run_kernels",
        lambda spec, backend, x, **_: backend.family.function("flash_fwd")(x, spec, backend),
    )
    with only_shared_memory():
        compiled = [compiler("jax")(spec, "sm90", lambda kernel: limit) for spec in (short, long)]
    found = [(kernel, config.num_stages) for kernels in compiled for kernel, config, _ in kernels]
    assert found == [("flash_fwd", stages)] * 2


@pytest.mark.parametrize(("target", "number"), [*zip(TARGETS, (0, 1), strict=True)])
def test_no_short_problem_is_refused(target, number):
    row = replace(ROW, target=target)
    with only_shared_memory():
        misfits = list(misfits_of(row, lengths_of(row, (Window(right=0),))[number]))
    assert not [misfit for misfit in misfits if misfit.refused]


# The portable kernels' problems that take the most: rows for smaller cards, and one without.
LARGE = (("bfloat16", 256, "all-options"), ("bfloat16", 256, "tiles-of-128"),
         ("float32", 256, "tf32-all-options"))  # fmt: skip


def tiles_of(problem):
    """Return a backward's tiles. An error says that a kernel is refused."""
    card = {"shared_memory": problem.shared_memory} if problem.framework == "jax" else {}
    limit = {
        kernel: problem.shared_memory or shared_memory_limit(kernel, "sm80")
        for kernel in FAMILY_KERNELS["portable"]
    }
    with only_shared_memory():
        found = compiler(problem.framework)(problem.spec, "sm80", limit.__getitem__, **card)
    assert all(binary.metadata.shared <= limit[kernel] for kernel, _, binary in found)
    return {kernel: config.tile for kernel, config, _ in found if "bwd_d" in kernel}


@pytest.mark.parametrize(("framework", "row"), zip(("torch", "jax", "torch"), LARGE, strict=True))
def test_a_card_with_99_kib_refuses_no_backward(framework, row):
    own = Problem(framework, "sm80", *row)
    smaller = replace(own, shared_memory=SHARED_MEMORY_OF_SMALLER_CARDS)
    tiles, tiles_of_smaller = map(tiles_of, (own, smaller))
    if row[:2] == ("bfloat16", 256):
        assert tiles["flash_bwd_dkdv"] == "64×32"
        assert tiles_of_smaller["flash_bwd_dkdv"] == "32×32"
    if row == LARGE[0]:  # what one card takes is no other's
        assert tiles_of(own) == tiles


def test_the_sweep_has_every_row_and_lengths_of_every_kind():
    for kind in product(FRAMEWORKS, TARGETS):
        rows = [row for row in problems(*kind) if row.feature in FEATURES]
        assert {row.head_dim for row in rows} == {16, 32, 64, 128, 256, 512}
        assert {row.spec.softcap for row in rows} == {None, 30.0}
        dtypes = [{row.dtype for row in rows if row.feature == name} for name in FEATURES]
        assert dtypes == [{"bfloat16", "float32"}] * 2 + [{"bfloat16", *QUANTIZED_DTYPES}] * 2
    specs = [spec for spec in lengths_of(ROW) if isinstance(spec, AttentionSpec)]
    assert {spec.window for spec in specs} >= {Window(), Window(right=0)}
    assert {spec.seq_q < spec.seq_kv for spec in specs} == {True, False}
