"""Mosaic GPU kernels planned and lowered for `torch_attn`, on any machine.

`interop/kernels/mosaic.py` reads the lowered program. When a test fails after an update of JAX,
compare ``jax/_src/pallas/mosaic_gpu/torch.py``, which does the same.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from tuning.static.operands import flash_operands
from twin_attention.contract.operands import DecodeOperands, PagedOperands
from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window
from twin_attention.interop.parity.cases import DecodeCase, PagedCase
from twin_attention.targets.family import FAMILIES, FOREIGN, Backend

SPEC = AttentionSpec(2, 300, 300, 4, 2, 128, 128, "bfloat16", 0.1, Window(None, 0))
*EXPLICIT, PAGED = FOREIGN["torch_attn"]
OF_TORCH = {family.folder: family for family in EXPLICIT}
OWN = {family.folder: family for family in FAMILIES["pallas_attn"]}
if (reason := OF_TORCH["sm80"].supports("flash_fwd", SPEC, "sm80")) is not None:
    pytest.skip(reason, allow_module_level=True)

from pallas_attn import ahead  # noqa: E402
from twin_attention.interop.kernels import mosaic  # noqa: E402
from twin_attention.interop.kernels.jax_host import plan_of  # noqa: E402
from twin_attention.interop.kernels.plan import Kernel, Value  # noqa: E402


class Card(NamedTuple):
    capability: int
    num_sms: int = 132
    shared_memory: int = 232448


def packed(spec, lengths=3):
    fields = vars(spec) | {"batch": 1}
    return VarlenSpec(**fields, num_sequences=lengths)


def plan_for(spec, target, operation, sinks=False, dlse=True):
    operands = flash_operands(spec, lambda dtype, *shape: of(shape, dtype), sinks)
    if operation == "flash_bwd":
        batch = () if spec.is_packed else (spec.batch,)
        out = of((*batch, spec.seq_q, spec.heads_q, spec.head_dim_v), spec.dtype)
        lse = of((*batch, spec.heads_q, spec.seq_q), "float32")
        given = (out, lse if dlse else None, operands, out, lse, None)
    else:
        given = (operands,)
    function, backend = OWN[target].function(operation), Backend(OWN[target], target)
    card = Card(int(target.removeprefix("sm")))
    return plan_of(lambda *x: function(*x, spec, backend), given, card)


def aliased(kernel):
    operands = kernel.operands
    read = [operands[i] for i in kernel.read if isinstance(operands[i], Value)]
    return [operands[i] for i in kernel.written if operands[i] in read]


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
    function, backend = OWN["paged"].function("paged_decode"), Backend(OWN["paged"], "sm90")
    found = plan_of(lambda x: function(x, spec, backend), (operands,), Card(90))
    views = ["reshape", "bitcast"] * 2
    assert names(found) == [*(views if kv_dtype else ()), "kernel", "kernel"]
    decode, merge = found.steps[-2:]
    assert (aliased(decode), aliased(merge)) == ([], [*found.results])
    assert found.results == tuple(decode.operands[i] for i in decode.written[:2])


def test_the_steps_of_paged_attention():
    case = PagedCase(
        "", (3000, 4000), heads_q=8, heads_kv=8, head_dim=128, max_pages=300,
        new_tokens=(2048, 3000), num_splits=1,
    )  # fmt: skip
    spec, cache, family = case.spec, case.spec.cache, OF_TORCH["sm90"]
    assert family.supports("paged_attention", spec, "sm90") is None
    pool = of((cache.num_pages, cache.page_size, 8, 128), cache.dtype)
    q, tables = of((spec.tokens, 8, 128), spec.dtype), of((2, cache.max_pages), "int32")
    operands = PagedOperands(q, pool, pool, tables, of((2,), "int32"), of((3,), "int32"))
    function, backend = OWN["sm90"].function("paged_attention"), Backend(OWN["sm90"], "sm90")
    assert names(plan_of(lambda x: function(x, spec, backend), (operands,), Card(90))) == ["kernel"]


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
    spec = replace(SPEC, batch=1, seq_q=2100, seq_kv=2100, heads_kv=1, deterministic=deterministic)
    found = plan_for(spec, target, "flash_bwd", sinks=True)
    assert names(found) == expected
    kernels = [step for step in found.steps if isinstance(step, Kernel)]
    of_sums = [0, 3, 0, 0, 0] if target == "sm90" else [0, 1, 0]
    counts = [len(aliased(x)) for x in kernels]
    assert counts == ([0] * len(kernels) if deterministic else of_sums)


@pytest.mark.parametrize("target", OF_TORCH)
def test_nothing_else_is_between_kernels(target):
    heads = ((64, 64), (96, 40), (256, 256)) if target == "sm90" else ((64, 72),)
    for head_dims, is_packed, dlse in product(heads, (False, True), (False, True)):
        spec = replace(SPEC, head_dim=head_dims[0], head_dim_v=head_dims[1])
        spec = packed(spec) if is_packed else spec
        for operation in ("flash_fwd", "flash_bwd"):
            if OF_TORCH[target].supports(operation, spec, target) is None:
                found = plan_for(spec, target, operation, sinks=dlse, dlse=dlse)
                assert "kernel" in names(found)


def test_a_kernel_is_lowered_to_its_module(monkeypatch):
    monkeypatch.setattr(ahead, "compiled_for", lambda: "a card")
    monkeypatch.delattr(ahead, "compile_beside")  # XLA compiles no program of it
    for target in OF_TORCH:
        found = plan_for(replace(SPEC, head_dim=64, head_dim_v=64), target, "flash_fwd")
        (kernel,) = (step for step in found.steps if isinstance(step, Kernel))
        module = mosaic.lower(kernel.code)
        assert module.startswith(b"ML\xefR")  # MLIR's bytecode
        assert b"flash_fwd_mosaic_gpu" in module
