"""No valid problem is refused for want of shared memory."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context

import pytest

from tuning.static.gate import FRAMEWORKS, Problem, compiler, problems, shared_memory_limit
from tuning.static.shared_memory import only_shared_memory
from tuning.static.sweep import FEATURES, lengths_of, misfits_of
from twin_attention.contract.paged_spec import QUANTIZED_DTYPES
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.targets.kernels import FAMILY_KERNELS
from twin_attention.targets.target import SHARED_MEMORY_OF_SMALLER_CARDS, TARGETS

ROW = Problem("jax", "sm90", "bfloat16", 256, "causal")


@pytest.fixture(scope="module")
def in_a_process():
    """Run in another process, where kernels have no code; the tests share it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def shared_memory(framework, spec, target):
    with only_shared_memory():
        compiled = compiler(framework)(spec, target)
    return {kernel: binary.metadata.shared for kernel, _, binary in compiled}


@pytest.mark.parametrize(
    ("framework", "target", "feature"), [("jax", "sm80", "decode"), ("torch", "sm90", "causal")]
)
def test_shared_memory_is_that_of_the_finished_kernels(in_a_process, framework, target, feature):
    spec = Problem(framework, target, "bfloat16", 64, feature).spec
    finished = compiler(framework)(spec, target)
    expected = {kernel: binary.metadata.shared for kernel, _, binary in finished}
    assert in_a_process(shared_memory, framework, spec, target) == expected
    assert max(expected.values()) > 0


def stages_that_fit(specs, limit):
    with only_shared_memory():
        compiled = [compiler("jax")(spec, "sm90", lambda kernel: limit) for spec in specs]
    return [
        config.num_stages
        for kernels in compiled
        for kernel, config, _ in kernels
        if kernel == "flash_fwd"
    ]


@pytest.mark.parametrize(("limit", "stages"), [(227 * 1024, 2), (160 * 1024, 1)])
def test_a_pipeline_has_the_stages_that_fit(in_a_process, limit, stages):
    """Lengths are static: the short problem's loops of a step or two may become plain code."""
    short = FlashCase("", 1, 113, 203, 2, 2, 192, dtype="float16", causal=True).spec
    long = replace(short, seq_q=1024, seq_kv=1024)
    assert in_a_process(stages_that_fit, [short, long], limit) == [stages] * 2


def misfits_of_one(row, number):
    spec = lengths_of(row, (Window(right=0),))[number]
    with only_shared_memory():
        return list(misfits_of(row, spec))


@pytest.mark.parametrize(("target", "number"), [*zip(TARGETS, (0, 1), strict=True)])
def test_no_short_problem_is_refused(in_a_process, target, number):
    misfits = in_a_process(misfits_of_one, replace(ROW, target=target), number)
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
def test_a_card_with_99_kib_refuses_no_backward(in_a_process, framework, row):
    own = Problem(framework, "sm80", *row)
    smaller = replace(own, shared_memory=SHARED_MEMORY_OF_SMALLER_CARDS)
    tiles, tiles_of_smaller = (in_a_process(tiles_of, problem) for problem in (own, smaller))
    if row[:2] == ("bfloat16", 256):
        assert tiles["flash_bwd_dkdv"] == "64×32"
        assert tiles_of_smaller["flash_bwd_dkdv"] == "32×32"
    if row == LARGE[0]:  # what one card takes is no other's
        assert in_a_process(tiles_of, own) == tiles


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
