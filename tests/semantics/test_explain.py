from dataclasses import replace

import pytest

from twin_attention.interop.parity.cases import (
    AppendCase,
    BlockSparseCase,
    DecodeCase,
    DilatedCase,
    FlashCase,
    MergeCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import SIDES, Ours, call

SIZES = {"batch": 1, "seq_q": 64, "seq_kv": 64, "dtype": "float16"}
FLASH = {"flash_fwd", "flash_bwd_preprocess", "flash_bwd_dq", "flash_bwd_dkdv"}
DECODE = DecodeCase("decode", (9, 20), page_size=8, max_pages=3)
PAGED = PagedCase("chunks", (9, 20), new_tokens=(2, 9), page_size=8, max_pages=3)
# case: (its kernels, splits of each sequence if they are said)
KERNELS = {
    FlashCase("dense", **SIZES): (FLASH, None),
    VarlenCase("packed"): (FLASH, None),
    BlockSparseCase("mask", **SIZES): (FLASH, None),
    DilatedCase("dilated", **SIZES, segment_lengths=(32, 64), dilation_rates=(1, 2)): (FLASH, None),
    DECODE: ({"paged_decode"}, 1),
    replace(DECODE, name="splits", num_splits=3): ({"paged_decode", "combine"}, 3),
    replace(DECODE, name="cascade", cascade=True): ({"paged_decode"}, None),
    PAGED: ({"paged_attention"}, None),
    replace(PAGED, name="chunks in splits", num_splits=2): ({"paged_attention", "combine"}, 2),
    AppendCase("append", (9, 20), 2, page_size=8, max_pages=3, rotary_dim=8): ({"append_kv"}, None),
}


@pytest.fixture(params=SIDES)
def package(request):
    return request.param


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.name)
def test_kernels_by_the_interpreter(package, case):
    kernels, num_splits = KERNELS[case]
    said = Ours(package, "triton").explain(case, make_inputs(case, "cpu"))
    assert (said.implementation, said.execution) == ("triton", "interpreter")
    assert (said.device, said.target) == ("cpu", None)
    assert {*said.configs} == kernels
    if num_splits is not None:
        assert said.num_splits == num_splits
        assert f"splits of each sequence: {num_splits}" in str(said)
    if isinstance(case, BlockSparseCase):  # tiles of kernels are no larger than the mask's
        sizes = [
            max(x.block_q, x.block_kv) for x in said.configs.values() if hasattr(x, "block_kv")
        ]
        assert max(sizes) <= case.tile_q


def test_the_reference_by_default_and_no_kernel_for_nothing(package):
    inputs = make_inputs(DECODE, "cpu")
    best = Ours(package, None).explain(DECODE, inputs)
    assert (best.implementation, best.execution, best.configs) == ("reference", "framework", {})
    assert best.passed_over[-1] == "triton: its kernels compile for CUDA devices only"
    nothing = inputs | {"block_tables": inputs["block_tables"][:, :0].contiguous()}
    empty = Ours(package, "triton").explain(DECODE, nothing)
    assert (empty.execution, empty.configs, empty.num_splits) == ("framework", {}, None)


def test_a_merge_says_who_computes_its_gradient():
    case = MergeCase("merge", head_dim_v=16)
    inputs = make_inputs(case, "cpu")
    said = {x: Ours("torch_attn", x).explain(case, inputs) for x in ("triton", None)}
    assert said["triton"].backward == "the framework's own operations"
    assert said[None].backward is None  # as the reference's


def test_single_tokens_of_chunks_are_a_decode_in_torch():
    case = replace(PAGED, new_tokens=(1, 1))
    said = Ours("torch_attn", "triton").explain(case, make_inputs(case, "cpu"))
    assert [*said.configs] == ["paged_decode"]


def test_a_result_is_no_function(package):
    case = FlashCase("dense", **SIZES)
    out = SIDES[package]().share(make_inputs(case, "cpu"))["q"]
    message = r"as in explain\(flash_attention, q, k, v\), got [\w.]+$"
    with pytest.raises(ValueError, match=message):
        SIDES[package].api.explain(out)


def test_the_log_says_once_what_runs(package, caplog):
    case = FlashCase("dense", **SIZES, causal=True)
    inputs = make_inputs(case, "cpu")  # once: where tensors lie is part of a problem
    for level, said in (("INFO", []), ("DEBUG", ["flash_fwd", "flash_bwd"]), ("DEBUG", [])):
        caplog.clear()
        with caplog.at_level(level, package):
            call(SIDES[package](), case, inputs, "triton")
        assert [x.getMessage().split("(")[0] for x in caplog.records] == said
        for message in caplog.messages:
            assert "seq_q=64" in message
            assert "implementation='triton' was asked for" in message
