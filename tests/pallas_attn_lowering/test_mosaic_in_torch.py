"""Mosaic GPU kernels outlined and lowered for `torch_attn`, on any machine.

They guard what `pallas_attn.ahead` finds in a lowered program. When one fails after an update of
JAX, compare ``jax/_src/pallas/mosaic_gpu/torch.py``, which finds the same.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from interop.parity.cases import DecodeCase, PagedCase
from tuning.static.operands import flash_operands
from twin_attention.contract.operands import DecodeOperands, PagedOperands
from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window
from twin_attention.targets.family import FOREIGN, Backend

SPEC = AttentionSpec(2, 300, 300, 4, 2, 128, 128, "bfloat16", 0.1, Window(None, 0))
*EXPLICIT, PAGED = FOREIGN["torch_attn"]
FAMILIES = {family.folder: family for family in EXPLICIT}
if (reason := FAMILIES["sm80"].supports("flash_fwd", SPEC, "sm80")) is not None:
    pytest.skip(reason, allow_module_level=True)

from pallas_attn import ahead  # noqa: E402
from pallas_attn.ahead import lower_ahead  # noqa: E402
from pallas_attn.outline import outline  # noqa: E402


class Card(NamedTuple):
    """A card with the memory of its target."""

    capability: int
    num_sms: int = 132
    shared_memory: int = 232448


def packed(spec, lengths=3):
    fields = vars(spec) | {"batch": 1}
    return VarlenSpec(**fields, num_sequences=lengths)


def outline_of(spec, target, operation, sinks=False, dlse=True):
    """Return the outline of a forward or of a backward."""
    family = FAMILIES[target]
    operands = flash_operands(spec, lambda dtype, *shape: of(shape, dtype), sinks)
    if operation == "flash_bwd":
        batch = () if spec.is_packed else (spec.batch,)
        out = of((*batch, spec.seq_q, spec.heads_q, spec.head_dim_v), spec.dtype)
        lse = of((*batch, spec.heads_q, spec.seq_q), "float32")
        given = (out, lse if dlse else None, operands, out, lse, None)
    else:
        given = (operands,)
    function, backend = family.function(operation), Backend(family, target)
    card = Card(int(target.removeprefix("sm")))
    return outline(lambda *x: function(*x, spec, backend), given, card)


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_the_steps_of_a_paged_decode(kv_dtype):
    """The merge writes into what the decode has written, and a pool is not copied."""
    case = DecodeCase(
        "", (300, 40), heads_q=8, heads_kv=2, head_dim=128, max_pages=64, num_splits=3,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    spec, cache = case.spec, case.spec.cache
    assert PAGED.supports("paged_decode", spec, "sm90") is None
    pool = of((cache.num_pages, cache.page_size, 2, 128), cache.dtype)
    scales = [of((2,), "float32")] * 2 if kv_dtype else [None, None]
    q, tables = of((2, 1, 8, 128), spec.dtype), of((2, cache.max_pages), "int32")
    operands = DecodeOperands(q, pool, pool, tables, of((2,), "int32"), None, *scales)
    function, backend = PAGED.function("paged_decode"), Backend(PAGED, "sm90")
    found = outline(lambda x: function(x, spec, backend), (operands,), Card(90))
    views = ["reshape", "bitcast"] * 2
    assert names(found) == [*(views if kv_dtype else ()), "kernel", "kernel"]
    decode, merge = found.steps[-2:]
    assert (decode.num_aliased, merge.num_aliased) == (0, 2)
    assert merge.operands[-2:] == decode.results[:2]
    assert tuple(found.results) == merge.results


def test_the_steps_of_paged_attention():
    case = PagedCase(
        "", (3000, 4000), heads_q=8, heads_kv=8, head_dim=128, max_pages=300,
        new_tokens=(2048, 3000), num_splits=1,
    )  # fmt: skip
    spec, cache, family = case.spec, case.spec.cache, FAMILIES["sm90"]
    assert family.supports("paged_attention", spec, "sm90") is None
    pool = of((cache.num_pages, cache.page_size, 8, 128), cache.dtype)
    q, tables = of((spec.tokens, 8, 128), spec.dtype), of((2, cache.max_pages), "int32")
    operands = PagedOperands(q, pool, pool, tables, of((2,), "int32"), of((3,), "int32"))
    function, backend = family.function("paged_attention"), Backend(family, "sm90")
    assert names(outline(lambda x: function(x, spec, backend), (operands,), Card(90))) == ["kernel"]


def of(shape, dtype):
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def names(found):
    return [getattr(step, "name", "kernel") for step in found.steps]


@pytest.mark.parametrize(
    ("target", "deterministic", "expected"),
    [
        ("sm90", True, ["kernel", "kernel", "sinks_gradient"]),
        # Preprocess, sums of dk and dv, the kernel, and postprocesses of three gradients.
        ("sm90", False, ["kernel", "full", "full", *["kernel"] * 4, "sinks_gradient"]),
        ("sm80", True, ["kernel", "kernel", "kernel", "sinks_gradient"]),
        ("sm80", False, ["kernel", "kernel", "kernel", "sinks_gradient"]),
    ],
)
def test_the_steps_of_a_backward(target, deterministic, expected):
    # Of one kv head and a short batch, programs share tiles of keys.
    spec = replace(SPEC, batch=1, seq_q=2100, seq_kv=2100, heads_kv=1, deterministic=deterministic)
    found = outline_of(spec, target, "flash_bwd", sinks=True)
    assert names(found) == expected
    kernels = [step for step in found.steps if hasattr(step, "call")]
    aliased = [step.num_aliased for step in kernels]
    of_sums = [0, 3, 0, 0, 0] if target == "sm90" else [0, 1, 0]
    assert aliased == ([0] * len(kernels) if deterministic else of_sums)
    for kernel, count in zip(kernels, aliased, strict=True):
        for i in range(-count, 0):
            before, after = kernel.operands[i], kernel.results[i]
            assert (before.shape, before.dtype) == (after.shape, after.dtype)


@pytest.mark.parametrize("target", FAMILIES)
def test_nothing_else_is_between_kernels(target):
    heads = ((64, 64), (96, 40), (256, 256)) if target == "sm90" else ((64, 72),)
    for head_dims, is_packed, dlse in product(heads, (False, True), (False, True)):
        spec = replace(SPEC, head_dim=head_dims[0], head_dim_v=head_dims[1])
        spec = packed(spec) if is_packed else spec
        for operation in ("flash_fwd", "flash_bwd"):
            if FAMILIES[target].supports(operation, spec, target) is None:
                found = outline_of(spec, target, operation, sinks=dlse, dlse=dlse)
                assert "kernel" in names(found)


def test_a_kernel_is_lowered_to_its_module(monkeypatch):
    monkeypatch.setattr(ahead, "compiled_for", lambda: "a card")
    monkeypatch.delattr(ahead, "compile_beside")  # XLA compiles no program of it
    for target in FAMILIES:
        found = outline_of(replace(SPEC, head_dim=64, head_dim_v=64), target, "flash_fwd")
        (kernel,) = (step for step in found.steps if hasattr(step, "call"))
        module = lower_ahead(kernel.call)
        assert module.startswith(b"ML\xefR")  # MLIR's bytecode
        assert b"flash_fwd_mosaic_gpu" in module
