"""Every message that `validate` writes, word for word."""

import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from twin_attention.contract.operands import AppendOperands, DecodeOperands, FlashOperands
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
from twin_attention.contract.validate.paged import check_append_kv, check_paged_decode
from twin_attention.contract.validate.pool import check_page_ids

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


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "q: expected 4 dimensions [B, Sq, Hq, D], got shape (5, 4, 32)",
         {"q": {"shape": (5, 4, 32)}}),
        (ValueError, "k: expected 4 dimensions [B, Skv, Hkv, D], got shape (2, 7, 2, 32, 1)",
         {"k": {"shape": (2, 7, 2, 32, 1)}}),
        (ValueError, "v: expected 4 dimensions [B, Skv, Hkv, Dv], got shape ()",
         {"v": {"shape": ()}}),
        (TypeError, "q: expected a floating-point dtype, got int32", {"q": {"dtype": "int32"}}),
        (TypeError, "v: expected a floating-point dtype, got bool", {"v": {"dtype": "bool"}}),
        (NotImplementedError, "k: expected dtype float16, bfloat16, float32, got float64",
         {"k": {"dtype": "float64"}}),
        (NotImplementedError, "q: expected dtype float16, bfloat16, float32, got float8_e4m3fn",
         {"q": {"dtype": "float8_e4m3fn"}}),
        (TypeError, "k: expected q's dtype bfloat16, got float32", {"k": {"dtype": "float32"}}),
        (TypeError, "v: expected q's dtype bfloat16, got float16", {"v": {"dtype": "float16"}}),
        (ValueError, "k: expected q's device cpu, got cuda:0", {"k": {"device": "cuda:0"}}),
        (ValueError, "v: expected q's device cpu, got cuda:1", {"v": {"device": "cuda:1"}}),
        (ValueError, "k: expected q's batch size 2, got 3", {"k": {"shape": (3, 7, 2, 32)}}),
        (ValueError, "v: expected q's batch size 2, got 1", {"v": {"shape": (1, 7, 2, 48)}}),
        (ValueError, "v: expected k's length 7, got 6", {"v": {"shape": (2, 6, 2, 48)}}),
        (ValueError, "v: expected k's 2 heads, got 4", {"v": {"shape": (2, 7, 4, 48)}}),
        (ValueError, "k: expected q's head dimension 32, got 40", {"k": {"shape": (2, 7, 2, 40)}}),
        (
            ValueError,
            "q: expected a number of heads divisible by k's 2, got 5",
            {"q": {"shape": (2, 5, 5, 32)}},
        ),
        (
            ValueError,
            "q: expected a number of heads divisible by k's 0, got 4",
            {"k": {"shape": (2, 7, 0, 32)}, "v": {"shape": (2, 7, 0, 48)}},
        ),
        *(
            (
                NotImplementedError,
                f"q: {SIZE}{size}",
                {"q": {"shape": (2, 5, 4, size)}, "k": {"shape": (2, 7, 2, size)}},
            )
            for size in (0, 8, 20, 520)
        ),
        (NotImplementedError, f"v: {SIZE}12", {"v": {"shape": (2, 7, 2, 12)}}),
        *(
            (
                ValueError,
                f"{name}: expected a contiguous last dimension, got a stride other than 1",
                {name: {"contiguous_rows": False}},
            )
            for name in GOOD
        ),
        (TypeError, "sinks: expected dtype float32, got bfloat16",
         {"sinks": {"dtype": "bfloat16"}}),
        *(
            (
                ValueError,
                f"sinks: expected shape (4,), one of each head, got {shape}",
                {"sinks": {"shape": shape}},
            )
            for shape in ((2,), (), (1, 4))
        ),
        (ValueError, "sinks: expected q's device cpu, got cuda:1", {"sinks": {"device": "cuda:1"}}),
    ],
)  # fmt: skip
def test_wrong_tensors(error, message, changes):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check(changes)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "causal: expected a bool, got int", {"causal": 1}),
        (TypeError, "causal: expected a bool, got NoneType", {"causal": None}),
        (TypeError, "causal: expected a bool, got numpy.bool", {"causal": np.True_}),
        (TypeError, "return_lse: expected a bool, got str", {"return_lse": "no"}),
        (ValueError, SCALE + "1e+300", {"scale": 1e300}),
        (ValueError, SCALE + str(-(10**400)), {"scale": -(10**400)}),
        (ValueError, SOFTCAP + "1e+60", {"softcap": 1e60}),
        (ValueError, SOFTCAP + "1e-60", {"softcap": 1e-60}),
        (ValueError, SOFTCAP + str(2.0**101), {"softcap": 2.0**101}),
        (ValueError, SCALE + "nan", {"scale": float("nan")}),
        (ValueError, SCALE + "-inf", {"scale": float("-inf")}),
        (TypeError, SCALE + "str", {"scale": "0.1"}),
        (TypeError, SCALE + "bool", {"scale": True}),
        (ValueError, SOFTCAP + "0.0", {"softcap": 0.0}),
        (ValueError, SOFTCAP + "-1", {"softcap": -1}),
        (ValueError, SOFTCAP + "inf", {"softcap": float("inf")}),
        (ValueError, SOFTCAP + "nan", {"softcap": float("nan")}),
        (TypeError, SOFTCAP + "complex", {"softcap": 1j}),
        (TypeError, WINDOW + "5", {"window_size": 5}),
        (TypeError, WINDOW + "(1, 2, 3)", {"window_size": (1, 2, 3)}),
        (TypeError, WINDOW + "(1.0, 2)", {"window_size": (1.0, 2)}),
        (TypeError, WINDOW + "(True, 2)", {"window_size": (True, 2)}),
        (ValueError, WINDOW + "(-1, 0)", {"window_size": (-1, 0)}),
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


def test_a_device_that_is_not_known_agrees_with_any():
    check({"q": {"device": None}})
    check({"k": {"device": None}, "v": {"device": None}})


@pytest.mark.parametrize("name", ["batch", "seq_q", "seq_kv", "heads_q", "all heads"])
def test_zero_sizes_are_right(name):
    q, k, v = (2, 5, 4, 32), (2, 7, 2, 32), (2, 7, 2, 48)
    q, k, v = {
        "batch": ((0, *q[1:]), (0, *k[1:]), (0, *v[1:])),
        "seq_q": ((2, 0, 4, 32), k, v),
        "seq_kv": (q, (2, 0, 2, 32), (2, 0, 2, 48)),
        "heads_q": ((2, 5, 0, 32), k, v),
        "all heads": ((2, 5, 0, 32), (2, 7, 0, 32), (2, 7, 0, 48)),
    }[name]
    shapes = {"q": q, "k": k, "v": v, "sinks": (q[2],)}
    assert check({name: {"shape": shape} for name, shape in shapes.items()}).is_empty


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


@pytest.mark.parametrize("right", [None, "triton"])
def test_a_right_choice(right):
    check_choice("implementation", right, ("triton", "reference"))


# Both sides cannot show these messages on a CPU; tests/semantics/test_bad_input.py has the others.

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
    "value_dim": None, "cascade": False, "return_lse": False,
}  # fmt: skip
CACHE = PagedCache(9, 8, 5, 2, 32, 48, "int8")


def check_decode(operands=DECODE, **options):
    return check_paged_decode(
        DecodeOperands(**operands), check_decode_options(**NO_DECODE_OPTIONS | options)
    )


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


def test_the_right_side_of_a_decodes_window_changes_nothing():
    assert check_decode(window_size=(3, 0)) == check_decode(window_size=(3, None))
    assert check_decode(window_size=(None, 5)) == check_decode()


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


TABLES = np.array([[0, 4, 2], [-1, 5, 99], [3, 1, -1]], np.int32)
LENGTH = "expected a length from 0 to 12, got "
PAGE = "expected one of the pool's 5 pages, got "


def test_what_tables_and_lengths_may_hold():
    check_page_ids(TABLES, np.array([12, 0, 8], np.int32), None, 1, (5, 4))
    check_page_ids(np.empty((2, 0), np.int32), np.zeros(2, np.int32), None, 1, (0, 4))
    check_page_ids(np.empty((0, 3), np.int32), np.empty(0, np.int32), None, 1, (5, 4))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([13, 0, 0], f"seq_lens[0]: {LENGTH}13"),
        ([0, -1, 99], f"seq_lens[1]: {LENGTH}-1"),
        ([0, 0, 2**31 - 1], f"seq_lens[2]: {LENGTH}{2**31 - 1}"),
        ([12, 1, 99], f"block_tables[1, 0]: {PAGE}-1"),
        ([12, 0, 9], f"block_tables[2, 2]: {PAGE}-1"),
    ],
)
def test_the_first_sequence_that_leaves_the_pool_is_named(lengths, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_page_ids(TABLES, np.array(lengths, np.int32), None, 1, (5, 4))


def test_a_pool_without_pages_has_no_key():
    message = "block_tables[0, 0]: expected one of the pool's 0 pages, got 0"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_page_ids(np.zeros((1, 2), np.int32), np.array([1], np.int32), None, 1, (0, 4))
