"""Explicit kernels with 64-bit types enabled, where `vmap` makes untyped integers 64-bit."""

from functools import partial

import jax
import pytest

from tuning.static.gate import problems
from tuning.static.mosaic_aot import family_of
from tuning.static.operands import operands_of, run_kernels
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import FAMILIES, Backend
from twin_attention.targets.kernels import FAMILY_KERNELS
from twin_attention.targets.target import TARGETS

_, SM90, *_ = FAMILIES["pallas_attn"]
FEATURES = {
    ("causal", 64), ("causal", 192), ("packed", 64), ("packed", 128), ("tiles-of-128", 64),
    ("few-kv-heads-odd-length", 128), ("decode", 64), ("chunks-in-one-part", 64),
}  # fmt: skip


def kernels_of(jaxpr):
    for equation in jaxpr.eqns:
        inner = jax.tree.leaves(
            [*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        )
        inner = [getattr(x, "jaxpr", x) for x in inner]
        inner = [x for x in inner if hasattr(x, "eqns")]
        name = equation.params.get("name")
        if any(x in equation.primitive.name for x in ("pallas_call", "mpmd_map", "core_map")):
            yield name, inner
        for each in inner:
            yield from kernels_of(each)


REASON = SM90.supports("flash_fwd", AttentionSpec(1, 64, 64, 1, 1, 64, 64, "bfloat16", 0.1), "sm90")


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_have_no_numbers_of_64_bits(target):
    seen = set()
    for problem in problems("jax", target, "mosaic"):
        is_chosen = (problem.feature, problem.head_dim) in FEATURES
        is_chosen &= problem.dtype in ("bfloat16", "int8") and problem.shared_memory is None
        if not is_chosen:
            continue
        family = family_of(problem.spec, target)
        operands = operands_of(
            problem.spec, lambda dtype, *x: jax.ShapeDtypeStruct((2, *x), dtype), problem.sinks
        )
        run = partial(run_kernels, problem.spec, Backend(family, target))
        with jax.enable_x64(True):
            traced = jax.jit(jax.vmap(jax.jit(run))).trace(*operands)  # mapped once it is traced
        for name, programs in kernels_of(traced.jaxpr.jaxpr):
            seen.add(name)
            for program in programs:
                assert not [x for x in ("i64", "u64", "f64") if f":{x}[" in str(program)], name
    of_gluon = {"tile_lists", "flash_jvp"}
    assert seen >= {*FAMILY_KERNELS[target], *FAMILY_KERNELS["paged"]} - of_gluon
