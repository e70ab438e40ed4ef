import re

import numpy as np
import pytest

from twin_attention.contract.cost import (
    backward_flops,
    forward_flops,
    varlen_backward_flops,
    varlen_forward_flops,
)
from twin_attention.contract.operands import VarlenOperands
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.contract.validate.attention import check_flash_attention_varlen
from twin_attention.contract.validate.offsets import check_offset_values, check_offsets_arguments
from twin_attention.contract.validate.operands import Operand
from twin_attention.contract.validate.options import check_flash_options

GOOD = {
    "q": Operand("q", (12, 4, 32), "bfloat16", "cpu"),
    "k": Operand("k", (13, 2, 32), "bfloat16", "cpu"),
    "v": Operand("v", (13, 2, 48), "bfloat16", "cpu"),
    "cu_seqlens_q": Operand("cu_seqlens_q", (5,), "int32", "cpu"),
    "cu_seqlens_kv": Operand("cu_seqlens_kv", (5,), "int32", "cpu"),
    "sinks": Operand("sinks", (4,), "float32", "cpu"),
}
NO_OPTIONS = {
    "causal": False, "scale": None, "window_size": None, "softcap": None, "deterministic": None,
    "precision": "ieee", "return_lse": False,
}  # fmt: skip


def check(changes=None, **options):
    operands = {name: GOOD[name]._replace(**(changes or {}).get(name, {})) for name in GOOD}
    return check_flash_attention_varlen(
        VarlenOperands(**operands), check_flash_options(**NO_OPTIONS | options)
    )


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "q: expected 3 dimensions [Tq, Hq, D], got shape (1, 12, 4, 32)",
         {"q": {"shape": (1, 12, 4, 32)}}),
        (ValueError, "v: expected 3 dimensions [Tkv, Hkv, Dv], got shape (13, 48)",
         {"v": {"shape": (13, 48)}}),
        (TypeError, "k: expected q's dtype bfloat16, got float32", {"k": {"dtype": "float32"}}),
        *(
            (
                ValueError,
                f"{name}: expected shape (N + 1,) for N sequences, got {shape}",
                {name: {"shape": shape}},
            )
            for name in ("cu_seqlens_q", "cu_seqlens_kv")
            for shape in ((), (0,), (5, 1))
        ),
        (TypeError, "cu_seqlens_q: expected dtype int32, got int64",
         {"cu_seqlens_q": {"dtype": "int64"}}),
        (ValueError, "cu_seqlens_kv: expected cu_seqlens_q's 5 offsets, got 6",
         {"cu_seqlens_kv": {"shape": (6, )}}),
        (ValueError, "cu_seqlens_kv: expected q's device cpu, got cuda:0",
         {"cu_seqlens_kv": {"device": "cuda:0"}}),
        (ValueError,
         "cu_seqlens_q: expected a contiguous last dimension, got a stride other than 1",
         {"cu_seqlens_q": {"contiguous_rows": False}}),
        (ValueError, "sinks: expected shape (4,), one of each head, got (2,)",
         {"sinks": {"shape": (2, )}}),
    ],
)  # fmt: skip
def test_wrong_tensors(error, message, changes):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check(changes)


def test_a_tree_has_an_integer_for_each_token():
    tree = {
        name: Operand(name, (size,), "int32", "cpu")
        for name, size in (("kv_ends", 13), ("q_depths", 12), ("kv_depths", 13))
    }
    operands, options = VarlenOperands(**GOOD, **tree), NO_OPTIONS | {"causal": True}
    for window, depths in ((None, False), ((None, 3), False), ((4, None), True)):
        checked = check_flash_options(**options | {"window_size": window})
        spec = check_flash_attention_varlen(operands, checked)
        assert (spec.tree, spec.depths) == (True, depths)
    assert spec.sequence(5, 7).depth_window == 4
    assert spec.bounded_window == Window(None, 0)
    message = r"^kv_ends: expected shape \(13,\), one of each token, got \(12,\)$"
    wrong = operands._replace(kv_ends=tree["kv_ends"]._replace(shape=(12,)))
    with pytest.raises(ValueError, match=message):
        check_flash_attention_varlen(wrong, checked)
    checked = check_flash_options(**NO_OPTIONS)
    with pytest.raises(ValueError, match=r"^causal: expected True with kv_ends, got False$"):
        check_flash_attention_varlen(operands, checked)


def test_a_right_call_is_described_as_one_sequence():
    spec = check(causal=True)
    assert (spec.batch, spec.seq_q, spec.seq_kv, spec.num_sequences) == (1, 12, 13, 4)
    assert (spec.heads_q, spec.heads_kv, spec.head_dim, spec.head_dim_v) == (4, 2, 32, 48)
    assert (spec.scale, spec.window) == (32**-0.5, Window(None, 0))
    one = spec.sequence(5, 7)
    assert type(one) is AttentionSpec
    assert one == AttentionSpec(1, 5, 7, 4, 2, 32, 48, "bfloat16", 32**-0.5, Window(None, 0))


def test_offsets_alone_are_checked_as_in_a_call():
    offsets = GOOD["cu_seqlens_q"], GOOD["cu_seqlens_kv"]
    check_offsets_arguments(*offsets, 12, 0)
    with pytest.raises(TypeError, match=r"^cu_seqlens_q: expected dtype int32, got int64$"):
        check_offsets_arguments(offsets[0]._replace(dtype="int64"), offsets[1], 12, 13)
    with pytest.raises(ValueError, match=r"^tokens_kv: expected an integer from 0 to"):
        check_offsets_arguments(*offsets, 12, -1)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0], None),
        ([0, 0, 9, 12], None),
        ([1, 5], "cu_seqlens_q[0]: expected 0, got 1"),
        ([-1, 5], "cu_seqlens_q[0]: expected 0, got -1"),
        ([0, 5, 4, 99], "cu_seqlens_q[2]: expected an offset from 5 to 12, got 4"),
        ([0, 5, 13, 2], "cu_seqlens_q[2]: expected an offset from 5 to 12, got 13"),
    ],
)
def test_the_first_offset_that_cannot_be_is_named(offsets, message):
    if message is None:
        check_offset_values("cu_seqlens_q", np.array(offsets, np.int32), 12)
        return
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_offset_values("cu_seqlens_q", np.array(offsets, np.int32), 12)


def test_the_flops_are_those_of_the_sequences():
    spec, lengths = check(causal=True), [(3, 5), (0, 2), (5, 3), (1, 0)]
    assert varlen_forward_flops(spec, lengths) == sum(
        forward_flops(spec.sequence(*pair)) for pair in lengths
    )
    # One query at the end of each of two sequences sees all of its keys.
    assert varlen_forward_flops(spec, [(1, 4), (1, 6)]) == 2 * (32 + 48) * 4 * 10
    assert varlen_backward_flops(spec, [(1, 4)]) == backward_flops(spec.sequence(1, 4))
