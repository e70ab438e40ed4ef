"""Kernels compiled for another framework are the kernels that torch launches.

`interop/kernels/cubin.py` does what `JITFunction.run` of Triton does before it compiles. After an
update of Triton compare that function in ``triton/runtime/jit.py``.
"""

import re
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch

from tuning.static import triton_aot
from tuning.static.operands import flash_operands, operands_of, run_kernels
from twin_attention.contract.spec import AttentionSpec, VarlenSpec
from twin_attention.interop.kernels.cubin import compile_launch, without_ptx
from twin_attention.interop.kernels.machine import Descriptor, Number, Pointer
from twin_attention.interop.kernels.plan import Kernel, Operation, Type
from twin_attention.interop.kernels.torch_host import operand_of, plan_of, plan_operation
from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.targets import family as families
from twin_attention.targets.family import FAMILIES, Backend
from twin_attention.targets.target import SHARED_MEMORY_LIMIT, Card

DENSE = AttentionSpec(1, 300, 2048, 4, 2, 64, 64, "bfloat16", 0.1)
PACKED = VarlenSpec(**vars(replace(DENSE, seq_kv=300)), num_sequences=3)


def planned(family, target, spec, operation, sinks=False):
    operands = flash_operands(spec, lambda dtype, *shape: operand_of(shape, dtype), sinks)
    leading = spec.batch if type(spec) is AttentionSpec else None
    rows = (spec.seq_q, spec.heads_q)
    sizes = [x for x in (leading,) if x is not None]
    arguments = (operands,)
    if operation == "flash_bwd":
        out, dout = (operand_of((*sizes, *rows, spec.head_dim_v), spec.dtype) for _ in range(2))
        lse = operand_of((*sizes, *rows[::-1]), "float32")
        rest = operand_of((*sizes, *rows[::-1]), "float32") if spec.terms else None
        arguments = (dout, lse, operands, out, lse, rest)
    (found,) = (x for x in FAMILIES["torch_attn"] if (x.name, x.folder) == family)
    card = Card(int(target.removeprefix("sm")), 132, SHARED_MEMORY_LIMIT[target])
    tensors = [x for x in (*operands, *arguments) if isinstance(x, torch.Tensor)]
    distinct = tuple({id(x): x for x in tensors}.values())
    function = found.function(operation)
    return card, plan_of(lambda: function(*arguments, spec, Backend(found, target)), distinct, card)


def kernels_of(found):
    return [step for step in found.steps if isinstance(step, Kernel)]


@pytest.mark.parametrize(
    ("family", "target", "spec"),
    [
        (("gluon", "sm80"), "sm80", DENSE),
        (("gluon", "sm90"), "sm90", PACKED),
        (("triton", "portable"), "sm90", DENSE),
    ],
)
def test_the_code_is_what_torch_launches(family, target, spec, monkeypatch):
    monkeypatch.setattr(triton_aot, "run_kernels", partial(run_kernels, deterministic=()))
    card, found = planned(family, target, spec, "flash_fwd")
    (step,) = kernels_of(found)
    expected = {
        name: compiled.asm
        for name, _, compiled in triton_aot.compile_kernels(spec, target, family=family[0])
    }
    compiled = compile_launch(step.code, card)
    assert compiled.ptx == expected["flash_fwd"]["ptx"]
    whole = expected["flash_fwd"]["cubin"]
    assert compiled.cubin == without_ptx(whole)
    differs = [i for i, (x, y) in enumerate(zip(whole, compiled.cubin, strict=True)) if x != y]
    text = compiled.cubin[differs[0] : differs[-1] + 1]
    assert b".entry" in whole[differs[0] : differs[-1]]
    assert not any(text)  # zeros, in one place
    declared = re.findall(r"\.param [^\n]*_param_\d+", compiled.ptx)
    assert len(compiled.parameters) + 2 == len(declared)
    for x, text in zip(compiled.parameters, declared, strict=False):
        kinds = {"i32": ".u32", "i64": ".u64", "fp32": ".f32"}
        if isinstance(x, Number):
            assert kinds[x.kind] in text
        else:
            assert (".b8" if isinstance(x, Descriptor) else ".ptr .global") in text
            assert isinstance(x, Descriptor | Pointer)


def test_latent_caches_are_planned_with_their_merge():
    spec = DecodeCase("", (9,), 2, 128, 1, 576, 512, page_size=64, max_pages=64, latent=True).spec
    card = Card(90, 132, SHARED_MEMORY_LIMIT["sm90"])
    decoded, _ = operands_of(spec, lambda dtype, *shape: Type(shape, dtype), False)
    found = plan_operation("sm90", "paged_decode", spec, "sm90", card, (decoded,))
    assert [x.code[0].name for x in kernels_of(found)] == ["paged_decode", "combine"]


@pytest.mark.parametrize(
    ("module", "place", "name"),
    [
        ("cubin", "triton.runtime.jit", "create_function_from_signature"),
        ("cubin", "triton.runtime.jit", "JITFunction"),
        ("torch_host", "torch_attn.private", "TorchDispatchMode"),
    ],
)
def test_a_private_name_that_is_gone_is_a_reason(module, place, name, monkeypatch):
    monkeypatch.setattr(import_module(place), name, object)
    if name == "create_function_from_signature":
        monkeypatch.delattr(import_module(place), name)
    module = f"twin_attention.interop.kernels.{module}"
    monkeypatch.delitem(sys.modules, module)
    reason = families.import_error.__wrapped__(module)
    assert reason is not None
    assert reason.startswith("its kernels cannot be imported: ")


def test_a_plan_says_what_is_read_written_and_zero():
    spec = replace(DENSE, heads_kv=4)
    _, found = planned(("gluon", "sm90"), "sm90", spec, "flash_bwd", sinks=True)
    (fused,) = kernels_of(found)
    assert fused.code.name == "flash_bwd_fused"
    # q, k, v, and twice dout: in tiles and in rows; and out, lse and its gradient.
    assert len(fused.read) == 8
    (counts,) = (fused.operands[i] for i in fused.zeroed)
    assert counts is not None
    assert (counts.dtype, counts.shape) == ("int32", (2 + 3 * 4,))
    written = [x.shape for x in (fused.operands[i] for i in fused.written) if x is not None]
    assert written.count((1, 4, 384)) == 2  # lse2 and delta
    assert (4, 384, 64) in written  # the sums
    operations = [step.name for step in found.steps if isinstance(step, Operation)]
    assert operations == ["unsqueeze", "mul", "sub", "exp2", "mul", "sum", "neg"]
    q, k, v, sinks, *others = found.results
    assert [x.shape for x in (q, k, v, sinks)] == [
        (1, 300, 4, 64), (1, 2048, 4, 64), (1, 2048, 4, 64), (4,)
    ]  # fmt: skip
    assert {*others} == {None}


def test_the_grid_follows_the_card():
    spec = replace(DENSE, batch=16, seq_q=2048)
    grids = []
    for num_sms in (132, 78):
        card, found = planned(("gluon", "sm90"), "sm90", spec, "flash_fwd")
        grids.append(compile_launch(kernels_of(found)[0].code, card._replace(num_sms=num_sms)).grid)
    assert grids == [(132, 1, 1), (78, 1, 1)]


def test_a_smaller_card_gets_fewer_stages():
    card, found = planned(("gluon", "sm80"), "sm80", replace(DENSE, head_dim=256), "flash_bwd")
    smaller = card._replace(shared_memory=99 * 1024)
    for step in kernels_of(found):
        assert compile_launch(step.code, smaller).shared <= 99 * 1024
