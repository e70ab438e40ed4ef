"""The gate on shipped configurations: no spilled tiles, shared memory that fits, tensor cores used.

``make sm80`` compiles every configuration with every feature; here a few stand for all.
"""

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context

import pytest

from tests.kernels.test_cubin import kernels_of, planned
from tests.tuning.conftest import FIT
from tuning.static import triton_aot
from tuning.static.gate import (
    FLASH_FEATURES,
    FRAMEWORKS,
    Problem,
    check,
    compiler,
    failures,
    not_compiled,
    problems,
)
from tuning.static.operands import run_kernels
from tuning.static.resources import measure
from tuning.static.shared_memory import only_shared_memory
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.interop.kernels.cubin import compile_launch
from twin_attention.interop.parity.cases import AppendCase
from twin_attention.targets import sm90
from twin_attention.targets.config import load_table, table_path, use_configs
from twin_attention.targets.kernels import (
    FAMILY_KERNELS,
    KERNELS,
    DecodeConfig,
    FlashConfig,
    FwdConfig,
    PreprocessConfig,
    SpecializedConfig,
    WarpDecodeConfig,
)
from twin_attention.targets.steps import splits_group
from twin_attention.targets.target import NUM_SMS, SHARED_MEMORY_OF_SMALLER_CARDS, TARGETS

DENSE = {"flash_fwd", "flash_bwd_preprocess", "flash_bwd_dq", "flash_bwd_dkdv"}


def assert_fit(verdicts, kernels):
    assert {verdict.kernel for verdict in verdicts} == kernels
    assert not {v.kernel: v.failures for v in verdicts if v.failures}


APPENDS = [
    AppendCase("packed", (9,), new_tokens=(20,), head_dim=80, kv_dtype="float8_e4m3fn"),
    AppendCase("halves", (9,), tokens=2, head_dim=128, rotary_dim=96, kv_dtype="int8"),
    AppendCase(
        "interleaved", (9,), new_tokens=(20,), heads_q=8, head_dim=128, rotary_dim=128,
        rotary_interleaved=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", APPENDS, ids=lambda case: case.name)
@pytest.mark.parametrize(("framework", "target"), zip(FRAMEWORKS, TARGETS, strict=True))
def test_every_kind_of_append_kv_compiles_without_spills(framework, target, case):
    ((kernel, _, compiled),) = compiler(framework)(case.spec, target)
    resources = measure(compiled, target)
    assert (kernel, resources.spill_stores, resources.spill_loads) == ("append_kv", 0, 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_int8_is_stored_as_the_integer_that_was_rounded(framework, target):
    """The assembler would convert a float to an integer before it stores a byte.

    With an odd number of pairs the second half of a key passes through shared memory.
    """
    case = AppendCase("odd-pairs", (9,), tokens=1, head_dim=64, rotary_dim=62, kv_dtype="int8")
    ((_, _, compiled),) = compiler(framework)(case.spec, target)
    assert "STG.E.U8" in compiled.asm["sass"]
    assert "F2I" not in compiled.asm["sass"]


LISTS = {"tile_lists"}


def test_an_explicit_kernel_is_fit_for_sm90():
    """The others take a minute to compile; ``make sm90`` has them all."""
    verdicts = check(Problem("torch", "sm90", "bfloat16", 80, "chunks-in-one-part", "gluon"))
    assert_fit(verdicts, {"paged_attention"})


@pytest.mark.parametrize(("framework", "family"), [("torch", "gluon"), ("jax", "mosaic")])
def test_explicit_backwards_share_tiles_of_keys_in_one_feature(framework, family):
    for problem in problems(framework, "sm90", family):
        has_backward = sm90.supports("flash_bwd", problem.spec, "sm90") is None
        if problem.feature in FLASH_FEATURES and has_backward:
            is_split = splits_group(problem.spec, 64, 128, NUM_SMS["sm90"])
            assert is_split == problem.feature.startswith("few-kv-heads"), problem


@pytest.mark.parametrize("shared_memory", [None, SHARED_MEMORY_OF_SMALLER_CARDS])
def test_mosaic_kernels_are_fit_for_sm80(shared_memory):
    """Only the smallest kernels, since all take minutes to compile."""
    problem = Problem("jax", "sm80", "int8", 64, "decode", "mosaic", shared_memory)
    if (reason := not_compiled(problem)) is not None:
        pytest.skip(reason)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # what it prints is caught there
        verdicts = pool.submit(check, problem).result()
    assert_fit(verdicts, {*FAMILY_KERNELS["paged"]})


def test_explicit_kernels_fit_smaller_cards():
    """Another row is used where the first takes too much: dk and dv at both head dimensions."""
    limit, found = SHARED_MEMORY_OF_SMALLER_CARDS, {}
    for head_dim in (64, 256):
        spec = Problem("torch", "sm80", "bfloat16", head_dim, "causal", "gluon").spec
        with only_shared_memory():
            compiled = compiler("torch")(spec, "sm80", lambda kernel: limit, family="gluon")
        found |= {(kernel, head_dim): binary.metadata.shared for kernel, _, binary in compiled}
    assert found.keys() == {*product({*FAMILY_KERNELS["sm80"]} - LISTS, (64, 256))}
    assert max(found.values()) <= limit


def test_gate_judges_a_changed_configuration(monkeypatch):
    monkeypatch.setattr(triton_aot, "run_kernels", partial(run_kernels, deterministic=()))
    problem = Problem("torch", "sm80", "bfloat16", 64, "causal")
    greedy = {"block_q": 128, "block_kv": 128, "num_warps": 4, "num_stages": 8}
    with use_configs({"flash_fwd": greedy}, "torch_attn"):
        (forward,) = check(problem)
    assert forward.config == FlashConfig(**greedy)
    spills, shared = forward.failures
    assert spills.startswith("spills ")
    assert shared == f"{forward.resources.shared} B of shared memory, of {99 * 1024}"


def test_four_programs_of_head_dimension_64_share_an_sm_of_sm90(monkeypatch):
    monkeypatch.setattr(triton_aot, "run_kernels", partial(run_kernels, deterministic=()))
    verdicts = check(Problem("torch", "sm90", "bfloat16", 64, "causal"))
    (forward,) = (x for x in verdicts if x.kernel == "flash_fwd")
    assert forward.resources.occupancy == 4
    assert forward.resources.spill_loads <= 16  # scalars, no part of a tile


@pytest.mark.parametrize(("framework", "feature"), [("torch", "causal"), ("jax", "tf32")])
def test_float32_products_are_of_tensor_cores_where_tf32_was_asked_for(framework, feature):
    verdicts = check(Problem(framework, "sm80", "float32", 16, feature))
    assert_fit(verdicts, DENSE)
    for verdict in verdicts:
        wanted = feature == "tf32" and verdict.kernel != "flash_bwd_preprocess"
        assert (verdict.resources.mma > 0) == wanted


SMALL = FlashConfig(block_q=64, block_kv=64, num_warps=4, num_stages=2)
FEW_KEYS = replace(SMALL, block_kv=32)
FWD = FwdConfig(block_q=64, block_kv=64, num_warps=4, num_stages=1, q_in_registers=0)
SPECIALIZED = SpecializedConfig(128, 128, num_warps=12, num_stages=2, ping_pong=1)
WARPS = WarpDecodeConfig(16, 64, num_warps=4, num_stages=1, num_programs=2)
DECODE = DecodeConfig(max_rows=64, block_kv=64, num_warps=4, num_stages=3)
SM80 = Problem("torch", "sm80", "bfloat16", 64, "causal")
SM90 = replace(SM80, target="sm90")
TF32 = replace(SM90, dtype="float32", feature="tf32")
FLOAT32 = replace(SM80, dtype="float32", framework="jax")
WIDE = FwdConfig(block_q=128, block_kv=64, num_warps=8, num_stages=1, q_in_registers=0)
GLUON_80, GLUON_90 = replace(SM80, family="gluon"), replace(SM90, family="gluon")
WIDE_80 = replace(GLUON_80, head_dim=256)
MOSAIC = Problem("jax", "sm80", "bfloat16", 64, "decode", "mosaic", 99 * 1024)
INT8 = Problem("torch", "sm80", "int8", 64, "decode")
NO_PRODUCTS = {"mma": 0, "wgmma": 0, "cp_async": 0}
OVER_99_KIB = "101377 B of shared memory, of 101376"


@pytest.mark.parametrize(
    ("problem", "kernel", "config", "change", "failure"),
    [
        (SM80, "flash_fwd", SMALL, {}, None),
        (SM80, "flash_fwd", SMALL, {"spill_loads": 124, "loop_spills": 32}, None),
        (SM80, "flash_fwd", SMALL, {"spill_loads": 128}, "spills 0 B of stores, 128 B of loads"),
        (SM80, "flash_fwd", SMALL, {"spill_loads": 36, "loop_spills": 36},
         "spills 0 B of stores, 36 B of loads"),
        (SM80, "flash_fwd", SMALL, {"shared": 99 * 1024 + 1}, OVER_99_KIB),
        (SM80, "flash_fwd", SMALL, {"mma": 0}, "no mma.sync"),
        (SM80, "flash_fwd", SMALL, {"cp_async": 0}, "no cp.async"),
        (SM80, "flash_fwd", SMALL, {"wgmma": 0}, None),
        (SM90, "flash_fwd", SMALL, {"spill_loads": 4}, None),
        (SM90, "flash_fwd", SMALL, {"shared": 200 * 1024}, None),
        (SM90, "flash_fwd", SMALL, {"shared": 227 * 1024 + 1},
         "232449 B of shared memory, of 232448"),
        (SM90, "flash_fwd", SMALL, {"mma": 0, "cp_async": 0}, None),
        (SM90, "flash_fwd", SMALL, {"wgmma": 0}, "no wgmma"),
        # A backward of SM80 may take an A100's shared memory.
        (SM80, "flash_bwd_dq", SMALL, {"shared": 163 * 1024}, None),
        (SM80, "flash_bwd_dq", SMALL, {"shared": 163 * 1024 + 1},
         "166913 B of shared memory, of 166912"),
        (FLOAT32, "flash_fwd", SMALL, NO_PRODUCTS, None),
        (SM80, "flash_bwd_preprocess", PreprocessConfig(64, 4), NO_PRODUCTS, None),
        # Tiles that leave a choice of products, or have no pipeline
        (SM90, "flash_bwd_dkdv", FEW_KEYS, {"wgmma": 0}, None),
        (SM90, "flash_bwd_dq", FEW_KEYS, {"wgmma": 0}, "no wgmma"),
        (TF32, "flash_bwd_dq", FEW_KEYS, {"wgmma": 0}, "no wgmma"),
        (TF32, "flash_fwd", FEW_KEYS, {"wgmma": 0}, None),
        (TF32, "flash_fwd", FEW_KEYS, {"mma": 0}, "no mma.sync"),
        (SM80, "flash_bwd_dq", replace(FEW_KEYS, num_stages=1), {"cp_async": 0}, None),
        (replace(INT8, target="sm90"), "paged_decode", DECODE, {"mma": 0}, None),
        (INT8, "paged_decode", DECODE, {"mma": 0, "wgmma": 0}, "no mma.sync or wgmma"),
        (GLUON_80, "flash_fwd", FWD,
         {"spill_stores": 400, "spill_loads": 400, "loop_spills": 255}, None),
        (GLUON_80, "flash_fwd", FWD, {"loop_spills": 256},
         "spills 256 B in a step of its main loop"),
        # So may a forward with a row for smaller cards.
        (WIDE_80, "flash_fwd", WIDE, {"shared": 163 * 1024}, None),
        (WIDE_80, "flash_fwd", WIDE, {"shared": 163 * 1024 + 1},
         "166913 B of shared memory, of 166912"),
        (GLUON_80, "flash_fwd", FWD, {"mma": 0}, "no mma.sync"),
        (GLUON_80, "flash_fwd", FWD, {"cp_async": 0}, "no cp.async"),
        (GLUON_80, "flash_fwd", FWD, {"ldmatrix": 0}, "no ldmatrix"),
        (GLUON_90, "flash_fwd", SPECIALIZED, {"mma": 0, "cp_async": 0, "ldmatrix": 0}, None),
        (GLUON_90, "flash_fwd", SPECIALIZED, {"wgmma": 0}, "no wgmma"),
        (GLUON_90, "flash_fwd", SPECIALIZED, {"tma": 0}, "no TMA"),
        (GLUON_90, "flash_fwd", SPECIALIZED, {"serialized": True}, "waits for each wgmma"),
        (GLUON_90, "flash_fwd", SPECIALIZED, {"unwritten": 2},
         "reads registers that nothing wrote in 2 instructions"),
        (GLUON_90, "flash_fwd", SPECIALIZED, {"overwritten": 1},
         "overwrites the numbers of 1 barriers too early"),
        (GLUON_90, "flash_fwd", SPECIALIZED, {"fixed_bounds": 2},
         "begins or ends 2 loops always at the same place"),
        (MOSAIC, "paged_decode", WARPS, {"wgmma": 0, "tma": 0}, None),
        (MOSAIC, "paged_decode", WARPS, {"cp_async": 0}, "no cp.async"),
        (replace(MOSAIC, target="sm90"), "paged_decode", WARPS, {"ldmatrix": 0}, "no ldmatrix"),
        (MOSAIC, "paged_decode", WARPS, {"shared": 99 * 1024 + 1}, OVER_99_KIB),
    ],
)  # fmt: skip
def test_what_fails(problem, kernel, config, change, failure):
    found = failures(problem, kernel, config, replace(FIT, **change))
    assert found == (() if failure is None else (failure,))


@pytest.mark.parametrize("feature", ["causal", "packed"])
def test_a_fifth_part_uses_no_named_barrier(feature):
    """The numbers from 5 on are those of `torch_attn.kernels.explicit.barriers`."""
    spec = Problem("torch", "sm90", "bfloat16", 64, feature, "gluon").spec
    card, plan = planned(("gluon", "sm90"), "sm90", spec, "flash_bwd")
    (fused,) = (x.code for x in kernels_of(plan) if x.code.name == "flash_bwd_fused")
    ptx = compile_launch(fused, card).ptx
    assert "red.release" in ptx  # the part that converts is there
    found = re.findall(r"\bbar\.(?:sync|arrive)\s+(\d+)", ptx)
    assert {"0", "2"} <= {*found} <= {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_problem_reads_every_portable_row(framework, target):
    """If this fails for a new row, add a problem to tuning/static/gate.py."""
    specs = {problem.spec for problem in problems(framework, target)}
    specs |= {spec.merge(spec.num_splits or 2) for spec in specs if isinstance(spec, DecodeSpec)}
    for name, rows in load_table(table_path(FRAMEWORKS[framework], target)).items():
        solved = [spec for spec in specs if isinstance(spec, KERNELS[name].spec)]
        read = {next(row.key for row in rows if row.serves(spec)) for spec in solved}
        assert not solved or {row.key for row in rows} == read, name
