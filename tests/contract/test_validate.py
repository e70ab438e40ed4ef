"""Check what `validate` describes and refuses, where both sides cannot show it on a CPU."""

import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from twin_attention.contract.operands import (
    AppendOperands,
    DecodeOperands,
    FlashOperands,
    PagedOperands,
)
from twin_attention.contract.paged_spec import AppendSpec, PagedCache
from twin_attention.contract.spec import MergeSpec, Window
from twin_attention.contract.validate.attention import check_flash_attention
from twin_attention.contract.validate.errors import no_gradient, not_a_tensor, not_differentiable
from twin_attention.contract.validate.merge import check_merge_states
from twin_attention.contract.validate.operands import Operand
from twin_attention.contract.validate.options import (
    check_choice,
    check_decode_options,
    check_flash_options,
)
from twin_attention.contract.validate.paged import (
    check_append_kv,
    check_paged_attention,
    check_paged_decode,
)

GOOD = {
    "q": Operand("q", (2, 5, 4, 32), "bfloat16", "cpu"),
    "k": Operand("k", (2, 7, 2, 32), "bfloat16", "cpu"),
    "v": Operand("v", (2, 7, 2, 48), "bfloat16", "cpu"),
    "sinks": Operand("sinks", (4,), "float32", "cpu"),
}
NO_OPTIONS = {
    "causal": False, "scale": None, "window_size": None, "softcap": None, "deterministic": None,
    "precision": "ieee", "return_lse": False,
}  # fmt: skip

WINDOW = (
    "window_size: expected None or a tuple (left, right) of non-negative integers or None, got "
)
SOFTCAP = "softcap: expected a positive number up to 2**100 or None, got "
SCALE = "scale: expected a finite number or None, got "
SIZE = "expected a head dimension from 16 to 512 in steps of 8, got "


def check(changes=None, **options):
    operands = {name: GOOD[name]._replace(**(changes or {}).get(name, {})) for name in GOOD}
    return check_flash_attention(
        FlashOperands(**operands), check_flash_options(**NO_OPTIONS | options)
    )


# Both sides cannot show these on a CPU; tests/semantics/test_bad_input.py has the others.
@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "v: expected 4 dimensions [B, Skv, Hkv, Dv], got shape ()",
         {"v": {"shape": ()}}),
        (TypeError, "v: expected a floating-point dtype, got bool", {"v": {"dtype": "bool"}}),
        (ValueError, "k: expected q's device cpu, got cuda:0", {"k": {"device": "cuda:0"}}),
        (ValueError, "v: expected q's device cpu, got cuda:1", {"v": {"device": "cuda:1"}}),
        (ValueError, "sinks: expected q's device cpu, got cuda:1", {"sinks": {"device": "cuda:1"}}),
        (NotImplementedError, f"q: {SIZE}0",
         {"q": {"shape": (2, 5, 4, 0)}, "k": {"shape": (2, 7, 2, 0)}}),
    ],
)  # fmt: skip
def test_wrong_tensors(error, message, changes):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check(changes)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, SCALE + str(-(10**400)), {"scale": -(10**400)}),
        (TypeError, SCALE + "str", {"scale": "0.1"}),
        (TypeError, SCALE + "bool", {"scale": True}),
        (ValueError, SOFTCAP + "1e-60", {"softcap": 1e-60}),
        (ValueError, SOFTCAP + str(2.0**101), {"softcap": 2.0**101}),
        (TypeError, SOFTCAP + "complex", {"softcap": 1j}),
        (TypeError, WINDOW + "(1, 2, 3)", {"window_size": (1, 2, 3)}),
        (TypeError, WINDOW + "(True, 2)", {"window_size": (True, 2)}),
        (ValueError, WINDOW + "(None, -1)", {"window_size": (None, -1)}),
    ],
)
def test_wrong_options(error, message, options):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check(**options)


def test_a_right_call_is_described_with_its_defaults_resolved():
    spec = check()
    assert (spec.batch, spec.seq_q, spec.seq_kv) == (2, 5, 7)
    assert (spec.heads_q, spec.heads_kv) == (4, 2)
    assert (spec.head_dim, spec.head_dim_v) == (32, 48)
    assert spec.dtype == "bfloat16"
    assert spec.scale == 32**-0.5
    assert spec.window == Window(None, None)
    assert spec.softcap is None


def test_a_scale_that_the_softcap_would_flush_counts_as_0():
    def scale(value, softcap):
        return check(scale=value, softcap=softcap).scale

    assert scale(-(2.0**-120), 2.0**6) == -(2.0**-120)
    assert scale(-(2.0**-120), 2.0**7) == 0
    assert scale(2.0**-120, None) == 2.0**-120


def test_sinks_may_be_left_out_and_change_no_description():
    without = FlashOperands(*(GOOD[name] for name in "qkv"))
    assert check_flash_attention(without, check_flash_options(**NO_OPTIONS)) == check()


def test_options_become_plain_python_numbers():
    spec = check(
        causal=True, scale=Fraction(1, 4), window_size=(np.int64(3), None), softcap=np.float32(2)
    )
    assert (spec.scale, spec.softcap, spec.window) == (0.25, 2.0, Window(3, 0))
    assert {type(spec.scale), type(spec.softcap), type(spec.window.left)} == {float, int}


@pytest.mark.parametrize("scale", [0, -0.5, 2.0**-126, float(np.finfo(np.float32).max)])
def test_any_finite_scale_is_right(scale):
    assert check(scale=scale).scale == scale


@pytest.mark.parametrize("scale", [1e-46, -1e-39, Fraction(1, 10**400)])
def test_a_scale_below_the_normal_float32_numbers_is_zero(scale):
    assert check(scale=scale).scale == 0.0


def test_finite_means_finite_in_float32():
    infinite = 2.0**128 - 2.0**103
    most = np.nextafter(infinite, 0)
    assert np.isfinite(np.float32(most))
    assert check(scale=most).scale == most
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(infinite))
    with pytest.raises(ValueError, match="scale: expected a finite number"):
        check(scale=infinite)


def test_a_window_as_wide_as_any_length_is_unlimited():
    assert check(window_size=(2**63, 2**31 - 2)).window == Window(None, 2**31 - 2)
    assert check(window_size=(2**31 - 1, 2**70)).window == Window()
    assert check_decode(window_size=(2**63, 0)).window_left is None


MODES = "forward mode is not supported; reverse mode, once, is. Use the reference."


@pytest.mark.parametrize(
    ("error", "message", "function", "arguments"),
    [
        (ValueError, "implementation: expected None or one of 'triton', 'reference', got 'cudnn'",
         check_choice, ("implementation", "cudnn", ("triton", "reference"))),
        (TypeError, "k: expected a torch.Tensor, got numpy.ndarray",
         not_a_tensor, ("k", "a torch.Tensor", np.zeros(3))),
        (NotImplementedError, f"flash_attention: {MODES}",
         not_differentiable, ("forward mode", "Use the reference.")),
        (NotImplementedError, f"merge_states: {MODES}",
         not_differentiable, ("forward mode", "Use the reference.", "merge_states")),
        (NotImplementedError, "append_kv: a gradient is not supported; give it operands that need "
         "none (torch.no_grad, jax.lax.stop_gradient), or use flash_attention",
         no_gradient, ("append_kv",)),
    ],
)  # fmt: skip
def test_other_messages(error, message, function, arguments):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        function(*arguments)


DECODE = {
    "q": Operand("q", (2, 3, 4, 32), "float16", "cpu"),
    "k_pages": Operand("k_pages", (9, 8, 2, 32), "int8", "cpu"),
    "v_pages": Operand("v_pages", (9, 8, 2, 48), "int8", "cpu"),
    "block_tables": Operand("block_tables", (2, 5), "int32", "cpu"),
    "seq_lens": Operand("seq_lens", (2,), "int32", "cpu"),
    "sinks": Operand("sinks", (4,), "float32", "cpu"),
    "k_scale": Operand("k_scale", (), "float32", "cpu"),
    "v_scale": Operand("v_scale", (2,), "float32", "cpu"),
}
PAGED = DECODE | {
    "q": Operand("q", (6, 4, 32), "float16", "cpu"),
    "cu_seqlens_q": Operand("cu_seqlens_q", (3,), "int32", "cpu"),
    "tree_ends": Operand("tree_ends", (6,), "int32", "cpu"),
    "q_ranges": Operand("q_ranges", (6, 1, 2), "int32", "cpu"),
}
APPEND = {
    "k_new": Operand("k_new", (2, 3, 2, 32), "float16", "cpu"),
    "v_new": Operand("v_new", (2, 3, 2, 48), "float16", "cpu"),
} | {name: x for name, x in DECODE.items() if name not in ("q", "sinks")}
APPEND_ALL = APPEND | {
    "cu_seqlens_q": Operand("cu_seqlens_q", (3,), "int32", "cpu"),
    "k_new": Operand("k_new", (17, 2, 32), "float16", "cpu"),
    "v_new": Operand("v_new", (17, 2, 48), "float16", "cpu"),
    "q": Operand("q", (17, 4, 32), "float16", "cpu"),
    "rotary_cos": Operand("rotary_cos", (9, 16), "float16", "cpu"),
    "rotary_sin": Operand("rotary_sin", (9, 16), "float16", "cpu"),
}
MERGE = {
    "outs": Operand("outs", (5, 2, 3, 4, 48), "float32", "cpu"),
    "lses": Operand("lses", (5, 2, 4, 3), "float32", "cpu"),
}
NO_DECODE_OPTIONS = {
    "causal": True, "scale": None, "window_size": None, "softcap": None, "num_splits": None,
    "value_dim": None, "cascade": False, "batch_invariant": False, "return_lse": False,
}  # fmt: skip
CACHE = PagedCache(9, 8, 5, 2, 32, 48, "int8")


def check_decode(operands=DECODE, **options):
    return check_paged_decode(
        DecodeOperands(**operands), check_decode_options(**NO_DECODE_OPTIONS | options)
    )


def check_paged(operands):
    options = check_decode_options(**NO_DECODE_OPTIONS)
    return check_paged_attention(PagedOperands(**operands), options)


def test_a_right_decode_is_described_with_its_defaults_resolved():
    spec = check_decode()
    assert (spec.batch, spec.tokens, spec.heads_q, spec.dtype) == (2, 3, 4, "float16")
    assert spec.cache == CACHE
    assert spec.scale == 32**-0.5
    assert (spec.window_left, spec.softcap, spec.num_splits) == (None, None, None)
    single = DECODE | {"q": Operand("q", (2, 4, 32), "float16")}
    assert check_decode(single) == replace(spec, tokens=1)


def test_options_of_a_decode_become_plain_python_numbers():
    spec = check_decode(
        scale=Fraction(1, 4),
        window_size=(np.int64(3), 7),
        softcap=np.float32(2),
        num_splits=np.int8(5),
    )
    assert (spec.scale, spec.window_left, spec.softcap, spec.num_splits) == (0.25, 3, 2.0, 5)
    types = {type(x) for x in (spec.scale, spec.window_left, spec.softcap, spec.num_splits)}
    assert types == {float, int}


def test_positions_fit_in_32_bits():
    most = Operand("block_tables", (2, 2**28 - 1), "int32")
    assert check_decode(DECODE | {"block_tables": most}).cache.capacity == 2**31 - 8
    more = Operand("block_tables", (2, 2**28), "int32")
    message = r"^block_tables: expected a capacity of less than 2\^31 keys, got 2147483648$"
    with pytest.raises(NotImplementedError, match=message):
        check_decode(DECODE | {"block_tables": more})


def test_right_writes_and_merges_are_described():
    spec = AppendSpec(2, 3, CACHE, "float16")
    assert check_append_kv(AppendOperands(**APPEND), True) == spec
    single = {"k_new": Operand("k_new", (2, 2, 32), "float16")}
    single["v_new"] = Operand("v_new", (2, 2, 48), "float16")
    assert check_append_kv(AppendOperands(**APPEND | single), False) == replace(spec, tokens=1)
    packed = {"cu_seqlens_q": Operand("cu_seqlens_q", (3,), "int32")}
    packed |= {name: x._replace(shape=(17, *x.shape[1:])) for name, x in single.items()}
    packed |= {"q": Operand("q", (17, 4, 32), "float16")}
    packed |= {x: Operand(x, (9, 5), "float32") for x in ("rotary_cos", "rotary_sin")}
    assert check_append_kv(AppendOperands(**APPEND | packed), True) == AppendSpec(
        2, 17, CACHE, "float16", heads_q=4, packed=True, rotary_dim=10, interleaved=True
    )
    assert check_merge_states(**MERGE) == MergeSpec(5, 2, 3, 4, 48, "float32")
    outs, lses = Operand("outs", (5, 2, 4, 48), "float32"), Operand("lses", (5, 2, 4), "float32")
    assert check_merge_states(outs, lses) == MergeSpec(5, 2, 1, 4, 48, "float32")


OF_DECODING = [
    (check, operands, name)
    for check, operands in (
        (check_decode, DECODE),
        (check_paged, PAGED),
        (lambda operands: check_append_kv(AppendOperands(**operands), False), APPEND_ALL),
        (lambda operands: check_merge_states(**operands), MERGE),
    )
    for name in list(operands)[1:]
]


@pytest.mark.parametrize(
    ("check", "operands", "name"), OF_DECODING, ids=[name for _, _, name in OF_DECODING]
)
def test_operands_of_decoding_are_on_one_device(check, operands, name):
    check(operands | {name: operands[name]._replace(device=None)})
    message = f"{name}: expected {next(iter(operands))}'s device cpu, got cuda:1"
    with pytest.raises(ValueError, match=f"^{message}$"):
        check(operands | {name: operands[name]._replace(device="cuda:1")})
