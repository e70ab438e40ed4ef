"""The same mistake in a decoding call raises the same error on both sides, before anything runs."""

from functools import partial

import pytest
import torch

DECODE = {
    "q": ((2, 3, 4, 32), "bfloat16"),
    "k_pages": ((9, 8, 2, 32), "bfloat16"),
    "v_pages": ((9, 8, 2, 48), "bfloat16"),
    "block_tables": ((2, 4), "int32"),
    "seq_lens": ((2,), "int32"),
}
PAGED = DECODE | {"q": ((7, 4, 32), "bfloat16"), "cu_seqlens_q": ((3,), "int32")}
INT8 = {
    "k_pages": ((9, 8, 2, 32), "int8"),
    "v_pages": ((9, 8, 2, 48), "int8"),
    "k_scale": ((), "float32"),
    "v_scale": ((2,), "float32"),
}
APPEND = {
    "k_new": ((2, 3, 2, 32), "bfloat16"),
    "v_new": ((2, 3, 2, 48), "bfloat16"),
} | {name: DECODE[name] for name in ("k_pages", "v_pages", "block_tables", "seq_lens")}
# Packed new tokens, and rotation of their keys and queries.
APPEND_PACKED = APPEND | {
    "k_new": ((17, 2, 32), "bfloat16"),
    "v_new": ((17, 2, 48), "bfloat16"),
    "cu_seqlens_q": ((3,), "int32"),
    "q": ((17, 4, 32), "bfloat16"),
    "rotary_cos": ((50, 12), "float32"),
    "rotary_sin": ((50, 12), "float32"),
}
MERGE = {"outs": ((5, 2, 3, 4, 48), "bfloat16"), "lses": ((5, 2, 4, 3), "float32")}

SIZE = "expected a head dimension from 16 to 256 in steps of 8, got "
WINDOW = "window_size: expected None or a pair (left, right) of non-negative integers or None, got "
CASCADE = "cascade: expected False with num_splits, whose results do not depend on the batch"
SPLITS = "num_splits: expected None or an integer from 1 to 256, got "
PAGES = "expected one of the pool's 9 pages, got "
SCALE = "expected shape () or (2,), one of all heads or of each kv head, got "

# (exception, message, changed operands, options); an operand that is None is left out
DECODE_MISTAKES = [
    (
        ValueError, "q: expected 3 or 4 dimensions [B, Hq, D] or [B, T, Hq, D], got shape (4, 32)",
        {"q": ((4, 32), "bfloat16")}, {},
    ),
    (
        ValueError,
        "k_pages: expected 4 dimensions [P, page_size, Hkv, D], got shape (72, 2, 32)",
        {"k_pages": ((72, 2, 32), "bfloat16")}, {},
    ),
    (
        ValueError,
        "v_pages: expected 4 dimensions [P, page_size, Hkv, Dv], got shape (1, 9, 8, 2, 48)",
        {"v_pages": ((1, 9, 8, 2, 48), "bfloat16")}, {},
    ),
    (
        TypeError, "q: expected a floating-point dtype, got int8",
        {"q": ((2, 3, 4, 32), "int8")}, {},
    ),
    (
        NotImplementedError, "q: expected dtype float16, bfloat16, got float32",
        {"q": ((2, 3, 4, 32), "float32")}, {},
    ),
    (
        TypeError, "k_pages: expected q's bfloat16, int8, float8_e4m3fn, got float16",
        {"k_pages": ((9, 8, 2, 32), "float16")}, {},
    ),
    (
        TypeError, "k_pages: expected q's bfloat16, int8, float8_e4m3fn, got float8_e5m2",
        {"k_pages": ((9, 8, 2, 32), "float8_e5m2")}, {},
    ),
    (
        TypeError, "v_pages: expected k_pages' dtype bfloat16, got int8",
        {"v_pages": ((9, 8, 2, 48), "int8")}, {},
    ),
    (
        ValueError,
        "v_pages: expected k_pages' pages, page size and heads (9, 8, 2), got (9, 4, 2)",
        {"v_pages": ((9, 4, 2, 48), "bfloat16")}, {},
    ),
    (
        ValueError,
        "v_pages: expected k_pages' pages, page size and heads (9, 8, 2), got (8, 8, 2)",
        {"v_pages": ((8, 8, 2, 48), "bfloat16")}, {},
    ),
    (
        NotImplementedError, "k_pages: expected a page size from 1 to 256, got 257",
        {"k_pages": ((9, 257, 2, 32), "bfloat16"), "v_pages": ((9, 257, 2, 48), "bfloat16")}, {},
    ),
    (
        NotImplementedError, "k_pages: expected a page size from 1 to 256, got 0",
        {"k_pages": ((9, 0, 2, 32), "bfloat16"), "v_pages": ((9, 0, 2, 48), "bfloat16")}, {},
    ),
    (
        NotImplementedError, f"v_pages: {SIZE}20", {"v_pages": ((9, 8, 2, 20), "bfloat16")}, {},
    ),
    (
        NotImplementedError, "q: expected at most 64 new tokens, got 65",
        {"q": ((2, 65, 4, 32), "bfloat16")}, {},
    ),
    (
        TypeError, "tree_ends: expected dtype int32, got int64",
        {"tree_ends": ((2, 3), "int64")}, {},
    ),
    (
        ValueError, "tree_ends: expected shape (2, 3), one of each new token, got (3,)",
        {"tree_ends": ((3,), "int32")}, {},
    ),
    (
        ValueError, "tree_ends: expected shape (2, 1), one of each new token, got (2,)",
        {"q": ((2, 4, 32), "bfloat16"), "tree_ends": ((2,), "int32")}, {},
    ),
    (
        NotImplementedError, "window_size: expected no window to the left with tree_ends, got 5",
        {"tree_ends": ((2, 3), "int32")}, {"window_size": (5, 0)},
    ),
    (
        TypeError, "block_tables: expected dtype int32, got int64",
        {"block_tables": ((2, 4), "int64")}, {},
    ),
    (
        TypeError, "seq_lens: expected dtype int32, got float32",
        {"seq_lens": ((2,), "float32")}, {},
    ),
    (
        ValueError, "block_tables: expected shape (2, max_pages), got (3, 4)",
        {"block_tables": ((3, 4), "int32")}, {},
    ),
    (
        ValueError, "block_tables: expected shape (2, max_pages), got (8,)",
        {"block_tables": ((8,), "int32")}, {},
    ),
    (ValueError, "seq_lens: expected shape (2,), got (3,)", {"seq_lens": ((3,), "int32")}, {}),
    (ValueError, "seq_lens: expected shape (2,), got (2, 1)", {"seq_lens": ((2, 1), "int32")}, {}),
    (
        ValueError, "q: expected k_pages' head dimension 32, got 40",
        {"q": ((2, 3, 4, 40), "bfloat16")}, {},
    ),
    (
        ValueError, "q: expected a number of heads divisible by k_pages' 2, got 3",
        {"q": ((2, 3, 3, 32), "bfloat16")}, {},
    ),
    (
        ValueError, "k_scale: expected None for a cache in bfloat16, got shape (2,)",
        {"k_scale": ((2,), "float32")}, {},
    ),
    (
        ValueError, "v_scale: expected None for a cache in bfloat16, got shape ()",
        {"v_scale": ((), "float32")}, {},
    ),
    (
        ValueError, "k_scale: expected a scale for a cache in int8, got None",
        INT8 | {"k_scale": None}, {},
    ),
    (
        ValueError, "v_scale: expected a scale for a cache in int8, got None",
        INT8 | {"v_scale": None}, {},
    ),
    (
        TypeError, "k_scale: expected dtype float32, got bfloat16",
        INT8 | {"k_scale": ((2,), "bfloat16")}, {},
    ),
    (ValueError, f"k_scale: {SCALE}(4,)", INT8 | {"k_scale": ((4,), "float32")}, {}),
    (ValueError, f"v_scale: {SCALE}(1, 2)", INT8 | {"v_scale": ((1, 2), "float32")}, {}),
    (
        TypeError, "sinks: expected dtype float32, got bfloat16",
        {"sinks": ((4,), "bfloat16")}, {},
    ),
    (
        ValueError, "sinks: expected shape (4,), one of each head, got (2,)",
        {"sinks": ((2,), "float32")}, {},
    ),
    (ValueError, f"{SPLITS}0", {}, {"num_splits": 0}),
    (TypeError, "return_lse: expected a bool, got int", {}, {"return_lse": 1}),
    (ValueError, f"{WINDOW}(3, -7)", {}, {"window_size": (3, -7)}),
    (TypeError, f"{WINDOW}{{1: 2, 3: 4}}", {}, {"window_size": {1: 2, 3: 4}}),
    (ValueError, f"{SPLITS}257", {}, {"num_splits": 257}),
    (TypeError, f"{SPLITS}2.0", {}, {"num_splits": 2.0}),
    (TypeError, f"{SPLITS}True", {}, {"num_splits": True}),
    (TypeError, "cascade: expected a bool, got int", {}, {"cascade": 1}),
    (ValueError, f"{CASCADE}, got True", {}, {"cascade": True, "num_splits": 2}),
    (ValueError, f"{WINDOW}(-1, 0)", {}, {"window_size": (-1, 0)}),
    (TypeError, f"{WINDOW}4", {}, {"window_size": 4}),
    (
        ValueError, "softcap: expected a positive number up to 2**100 or None, got 0.0",
        {}, {"softcap": 0.0},
    ),
    (
        ValueError, "scale: expected a finite number or None, got nan",
        {}, {"scale": float("nan")},
    ),
]  # fmt: skip
APPEND_MISTAKES = [
    (
        ValueError,
        "k_new: expected 3 or 4 dimensions [B, Hkv, D] or [B, T, Hkv, D], got shape (2, 32)",
        {"k_new": ((2, 32), "bfloat16")}, {},
    ),
    (
        ValueError, "k_new: expected shape (2, 3, 2, 32), got (2, 3, 4, 32)",
        {"k_new": ((2, 3, 4, 32), "bfloat16")}, {},
    ),
    (
        ValueError, "v_new: expected shape (2, 3, 2, 48), got (2, 4, 2, 48)",
        {"v_new": ((2, 4, 2, 48), "bfloat16")}, {},
    ),
    (
        TypeError, "v_new: expected k_new's dtype bfloat16, got float16",
        {"v_new": ((2, 3, 2, 48), "float16")}, {},
    ),
    (
        TypeError, "k_pages: expected k_new's bfloat16, int8, float8_e4m3fn, got float16",
        {"k_pages": ((9, 8, 2, 32), "float16")}, {},
    ),
    (
        NotImplementedError, "k_new: expected at most 64 new tokens, got 65",
        {"k_new": ((2, 65, 2, 32), "bfloat16"), "v_new": ((2, 65, 2, 48), "bfloat16")}, {},
    ),
    (
        TypeError, "seq_lens: expected dtype int32, got int64", {"seq_lens": ((2,), "int64")}, {},
    ),
    (
        ValueError, "block_tables: expected shape (2, max_pages), got (1, 4)",
        {"block_tables": ((1, 4), "int32")}, {},
    ),
    (
        ValueError, "v_scale: expected a scale for a cache in int8, got None",
        INT8 | {"v_scale": None}, {},
    ),
    (
        ValueError, "k_scale: expected None for a cache in bfloat16, got shape ()",
        {"k_scale": ((), "float32")}, {},
    ),
]  # fmt: skip
MERGE_MISTAKES = [
    (
        ValueError,
        "outs: expected 4 or 5 dimensions [N, B, H, Dv] or [N, B, S, H, Dv], got shape (2, 4, 48)",
        {"outs": ((2, 4, 48), "bfloat16")}, {},
    ),
    (
        TypeError, "outs: expected a floating-point dtype, got int32",
        {"outs": ((5, 2, 3, 4, 48), "int32")}, {},
    ),
    (NotImplementedError, f"outs: {SIZE}12", {"outs": ((5, 2, 3, 4, 12), "bfloat16")}, {}),
    (
        TypeError, "lses: expected dtype float32, got bfloat16",
        {"lses": ((5, 2, 4, 3), "bfloat16")}, {},
    ),
    (
        ValueError, "lses: expected shape (5, 2, 4, 3), got (5, 2, 3, 4)",
        {"lses": ((5, 2, 3, 4), "float32")}, {},
    ),
    (
        ValueError, "lses: expected shape (5, 2, 4, 3), got (5, 2, 4)",
        {"lses": ((5, 2, 4), "float32")}, {},
    ),
]  # fmt: skip
ROTARY = "expected shape (positions, R / 2) with R from 2 to k_pages' head dimension 32, got "
PACKED_MISTAKES = [
    (
        ValueError,
        "k_new: expected 3 dimensions [Tq, Hkv, D] with cu_seqlens_q, got shape (2, 3, 2, 32)",
        {"k_new": ((2, 3, 2, 32), "bfloat16")}, {},
    ),
    (
        ValueError, "v_new: expected shape (17, 2, 48), got (16, 2, 48)",
        {"v_new": ((16, 2, 48), "bfloat16")}, {},
    ),
    (
        ValueError, "cu_seqlens_q: expected shape (N + 1,) for N sequences, got (0,)",
        {"cu_seqlens_q": ((0,), "int32")}, {},
    ),
    (
        TypeError, "cu_seqlens_q: expected dtype int32, got int64",
        {"cu_seqlens_q": ((3,), "int64")}, {},
    ),
    (
        ValueError, "block_tables: expected shape (3, max_pages), got (2, 4)",
        {"cu_seqlens_q": ((4,), "int32")}, {},
    ),
    (
        ValueError, "q: expected None without rotary_cos and rotary_sin, got shape (17, 4, 32)",
        {"rotary_cos": None, "rotary_sin": None}, {},
    ),
    (
        ValueError, "rotary_sin: expected both rotary_cos and rotary_sin, or neither, got None",
        {"rotary_sin": None}, {},
    ),
    (
        ValueError, "rotary_cos: expected both rotary_cos and rotary_sin, or neither, got None",
        {"rotary_cos": None, "q": None}, {},
    ),
    (
        TypeError, "rotary_cos: expected dtype float32 or k_new's bfloat16, got float16",
        {"rotary_cos": ((50, 12), "float16")}, {},
    ),
    (
        TypeError, "rotary_sin: expected rotary_cos' dtype float32, got bfloat16",
        {"rotary_sin": ((50, 12), "bfloat16")}, {},
    ),
    (ValueError, f"rotary_cos: {ROTARY}(50, 17)", {"rotary_cos": ((50, 17), "float32")}, {}),
    (ValueError, f"rotary_cos: {ROTARY}(50, 0)", {"rotary_cos": ((50, 0), "float32")}, {}),
    (ValueError, f"rotary_cos: {ROTARY}(0, 12)", {"rotary_cos": ((0, 12), "float32")}, {}),
    (ValueError, f"rotary_cos: {ROTARY}(50,)", {"rotary_cos": ((50,), "float32")}, {}),
    (
        ValueError, "rotary_sin: expected rotary_cos' shape (50, 12), got (49, 12)",
        {"rotary_sin": ((49, 12), "float32")}, {},
    ),
    (
        ValueError, "q: expected shape (17, Hq, 32), got (16, 4, 32)",
        {"q": ((16, 4, 32), "bfloat16")}, {},
    ),
    (
        ValueError, "q: expected shape (17, Hq, 32), got (17, 4, 40)",
        {"q": ((17, 4, 40), "bfloat16")}, {},
    ),
    (
        ValueError, "q: expected shape (17, Hq, 32), got (1, 17, 4, 32)",
        {"q": ((1, 17, 4, 32), "bfloat16")}, {},
    ),
    (
        ValueError, "q: expected a number of heads divisible by k_pages' 2, got 3",
        {"q": ((17, 3, 32), "bfloat16")}, {},
    ),
    (
        TypeError, "q: expected k_new's dtype bfloat16, got float16",
        {"q": ((17, 4, 32), "float16")}, {},
    ),
    (TypeError, "rotary_interleaved: expected a bool, got int", {}, {"rotary_interleaved": 1}),
]  # fmt: skip
PAGED_MISTAKES = [
    (
        ValueError, "tree_ends: expected shape (7,), one of each new token, got (2, 3)",
        {"tree_ends": ((2, 3), "int32")}, {},
    ),
    (
        NotImplementedError, "window_size: expected no window to the left with tree_ends, got 0",
        {"tree_ends": ((7,), "int32")}, {"window_size": (0, None)},
    ),
    (
        ValueError, "q: expected 3 dimensions [Tq, Hq, D], got shape (1, 7, 4, 32)",
        {"q": ((1, 7, 4, 32), "bfloat16")}, {},
    ),
    (
        ValueError, "cu_seqlens_q: expected shape (N + 1,) for N sequences, got (1, 3)",
        {"cu_seqlens_q": ((1, 3), "int32")}, {},
    ),
    (
        ValueError, "cu_seqlens_q: expected shape (N + 1,) for N sequences, got (0,)",
        {"cu_seqlens_q": ((0,), "int32")}, {},
    ),
    (
        TypeError, "cu_seqlens_q: expected dtype int32, got int64",
        {"cu_seqlens_q": ((3,), "int64")}, {},
    ),
    (
        ValueError, "block_tables: expected shape (3, max_pages), got (2, 4)",
        {"cu_seqlens_q": ((4,), "int32")}, {},
    ),
    (ValueError, "seq_lens: expected shape (2,), got (3,)", {"seq_lens": ((3,), "int32")}, {}),
    (
        NotImplementedError, "q: expected dtype float16, bfloat16, got float32",
        {"q": ((7, 4, 32), "float32")}, {},
    ),
    (
        TypeError, "k_pages: expected q's bfloat16, int8, float8_e4m3fn, got float16",
        {"k_pages": ((9, 8, 2, 32), "float16")}, {},
    ),
    (
        ValueError, "q: expected k_pages' head dimension 32, got 40",
        {"q": ((7, 4, 40), "bfloat16")}, {},
    ),
    (
        ValueError, "q: expected a number of heads divisible by k_pages' 2, got 3",
        {"q": ((7, 3, 32), "bfloat16")}, {},
    ),
    (
        ValueError, "k_scale: expected a scale for a cache in int8, got None",
        INT8 | {"k_scale": None}, {},
    ),
    (
        ValueError, "sinks: expected shape (4,), one of each head, got (2,)",
        {"sinks": ((2,), "float32")}, {},
    ),
    (ValueError, f"{SPLITS}0", {}, {"num_splits": 0}),
    (TypeError, f"{WINDOW}4", {}, {"window_size": 4}),
]  # fmt: skip
FUNCTIONS = {
    "paged_decode": DECODE,
    "paged_attention": PAGED,
    "append_kv": APPEND,
    "merge_states": MERGE,
}
MISTAKES = [
    (name, FUNCTIONS[name], *mistake)
    for name, mistakes in zip(
        FUNCTIONS,
        (DECODE_MISTAKES, PAGED_MISTAKES, APPEND_MISTAKES, MERGE_MISTAKES),
        strict=True,
    )
    for mistake in mistakes
] + [("append_kv", APPEND_PACKED, *mistake) for mistake in PACKED_MISTAKES]


def operands_of(side, described):
    return {name: side.zeros(*x) for name, x in described.items() if x is not None}


@pytest.mark.parametrize(
    ("name", "good", "error", "message", "changes", "options"),
    MISTAKES,
    ids=[f"{name}-{message}" for name, _, _, message, *_ in MISTAKES],
)
def test_one_mistake_one_message(
    side, implementation, name, good, error, message, changes, options
):
    operands = operands_of(side, good | changes)
    function = getattr(side.api, name)
    for call in (function, partial(side.trace, function)):
        with pytest.raises(error) as raised:
            call(**operands, implementation=implementation, **options)
        assert (raised.type, str(raised.value)) == (error, message)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_tensor(side, name):
    operands = operands_of(side, APPEND_PACKED if name == "append_kv" else FUNCTIONS[name])
    for operand in operands:
        with pytest.raises(TypeError) as raised:
            getattr(side.api, name)(**operands | {operand: [1.0]})
        message = f"{operand}: expected {side.tensor}, got list"
        assert str(raised.value) == message


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unknown_implementation(side, name):
    message = r"^implementation: expected None or one of '.*', got 'cudnn'"
    with pytest.raises(ValueError, match=message):
        getattr(side.api, name)(**operands_of(side, FUNCTIONS[name]), implementation="cudnn")


@pytest.mark.parametrize(
    ("name", "operand"),
    [
        (name, operand)
        for name, good in (FUNCTIONS | {"append_kv": APPEND_PACKED}).items()
        for operand in good
        if operand != "lses"
    ],
)
def test_a_last_dimension_that_is_not_contiguous(implementation, torch_device, name, operand):
    """torch alone: JAX arrays have no strides."""
    import torch_attn

    good = APPEND_PACKED if name == "append_kv" else FUNCTIONS[name]
    operands = {
        n: torch.zeros(shape, dtype=getattr(torch, dtype), device=torch_device)
        for n, (shape, dtype) in good.items()
    }
    operands[operand] = operands[operand].repeat_interleave(2, dim=-1)[..., ::2]
    message = f"{operand}: expected a contiguous last dimension, got a stride other than 1"
    with pytest.raises(ValueError, match=f"^{message}$"):
        getattr(torch_attn, name)(**operands, implementation=implementation)


@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
@pytest.mark.parametrize("odd", ["offset", "stride"])
def test_rows_of_an_8_bit_cache_at_odd_offsets(implementation, torch_device, name, odd):
    """torch alone: JAX arrays have no strides."""
    import torch_attn

    described = (DECODE | INT8).items()
    operands = {
        n: torch.zeros(shape, dtype=getattr(torch, dtype), device=torch_device)
        for n, (shape, dtype) in described
    }
    pool = operands[name]
    if odd == "offset":
        operands[name] = pool.new_zeros(pool.numel() + 1)[1:].view(pool.shape)
    else:
        operands[name] = pool.new_zeros(*pool.shape[:3], pool.shape[3] + 1)[..., :-1]
    message = f"{name}: expected rows at even offsets in an 8-bit cache, got an odd one"
    with pytest.raises(ValueError, match=f"^{message}$"):
        torch_attn.paged_decode(**operands, implementation=implementation)


def test_a_cpu_tensor_with_a_gpu_one(side, implementation, torch_device):
    if torch_device == "cpu":
        pytest.skip("needs two devices: run on a machine with a GPU")
    for operand in DECODE.keys() - {"q"}:
        operands = operands_of(side, DECODE)
        operands[operand] = side.on_cpu(operands[operand])
        with pytest.raises(ValueError, match=f"^{operand}: expected q's device cuda:0, got cpu"):
            side.api.paged_decode(**operands, implementation=implementation)


def test_arguments_after_the_tensors_are_named(side):
    operands = operands_of(side, DECODE).values()
    with pytest.raises(TypeError, match="positional"):
        side.api.paged_decode(*operands, 0.5)


@pytest.mark.parametrize(
    ("lengths", "tables", "message"),
    [
        ([33, 5], [[0, 1, 2, 3]] * 2, "seq_lens[0]: expected a length from 0 to 32, got 33"),
        ([9, -1], [[0, 1, -1, -1]] * 2, "seq_lens[1]: expected a length from 0 to 32, got -1"),
        ([8, 17], [[0, 1, 9, -1]] * 2, f"block_tables[1, 2]: {PAGES}9"),
        ([9, 99], [[0, -1, 9, -1]] * 2, f"block_tables[0, 1]: {PAGES}-1"),
    ],
)
def test_check_pages_finds_data_that_leaves_the_pool(side, lengths, tables, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        check_pages(side, tables, lengths)
    assert str(raised.value) == message


def test_check_pages_takes_what_is_right(side):
    check_pages(side, [[0, 8, 3, 3], [-1, 99, 9, -7]], [32, 0])
    check_pages(side, [[0, 8, 3, -1], [5, 99, 9, -7]], [24, 8])
    check_pages(side, [[0, 1, -1, -1], [0, 2, -1, -1]], [10, 9], num_new_tokens=1)


SHARED = [[0, 1, 2, -1], [0, 3, 2, -1], [4, 1, 5, -1]]


def test_check_pages_finds_a_page_that_two_sequences_write(side):
    """Sequences of 17 and of 20 keys both end in page 2; sharing the pages before is right."""
    message = "block_tables[1, 2]: expected a page that sequence 0 does not write to as well, got 2"
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        check_pages(side, SHARED, [17, 20, 24])
    assert str(raised.value) == message
    check_pages(side, SHARED, [17, 20, 24], num_new_tokens=0)
    check_pages(side, SHARED, [17, 16, 24])
    message = "block_tables[2, 1]: expected a page that sequence 0 does not write to as well, got 1"
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        check_pages(side, SHARED, [17, 16, 17], num_new_tokens=2)
    assert str(raised.value) == message


def test_check_pages_takes_offsets_of_packed_tokens(side):
    """Sequence 0 has one new token, in page 2, and sequence 1 four, in pages 3 and 2."""
    check_pages(side, SHARED, [17, 20, 24], [0, 1, 1, 9])
    message = "block_tables[1, 2]: expected a page that sequence 0 does not write to as well, got 2"
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        check_pages(side, SHARED, [17, 20, 24], [0, 1, 5, 9])
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("offsets", "options", "message"),
    [
        ([0, 2, 1, 4], {}, "cu_seqlens_q[2]: expected an offset from 2 to 2147483647, got 1"),
        ([1, 2, 3, 4], {}, "cu_seqlens_q[0]: expected 0, got 1"),
        ([0, 2, 3], {}, "cu_seqlens_q: expected shape (4,), got (3,)"),
        (
            [0, 1, 2, 3],
            {"num_new_tokens": 1},
            "num_new_tokens: expected None beside cu_seqlens_q, got 1",
        ),
    ],
)
def test_check_pages_refuses_offsets(side, offsets, options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        check_pages(side, SHARED, [17, 16, 24], offsets, **options)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (
            ValueError, "k_pages: expected 4 dimensions [P, page_size, Hkv, D], got shape (9, 8)",
            {"k_pages": ((9, 8), "bfloat16")},
        ),
        (
            NotImplementedError, "k_pages: expected a page size from 1 to 256, got 257",
            {"k_pages": ((9, 257, 2, 32), "bfloat16")},
        ),
        (
            ValueError, "block_tables: expected shape (2, max_pages), got (8,)",
            {"block_tables": ((8,), "int32")},
        ),
        (
            TypeError, "block_tables: expected dtype int32, got int64",
            {"block_tables": ((2, 4), "int64")},
        ),
        (
            TypeError, "seq_lens: expected dtype int32, got float32",
            {"seq_lens": ((2,), "float32")},
        ),
        (
            ValueError, "seq_lens: expected shape (5,), got (2,)",
            {"block_tables": ((5, 4), "int32")},
        ),
        (ValueError, "seq_lens: expected shape (2,), got ()", {"seq_lens": ((), "int32")}),
        (
            ValueError, "block_tables: expected shape (0, max_pages), got ()",
            {"block_tables": ((), "int32"), "seq_lens": ((), "int32")},
        ),
    ],
)  # fmt: skip
def test_check_pages_refuses_what_paged_decode_does(side, error, message, changes):
    described = {name: DECODE[name] for name in ("k_pages", "block_tables", "seq_lens")}
    with pytest.raises(error) as raised:
        side.api.check_pages(**operands_of(side, described | changes))
    assert (raised.type, str(raised.value)) == (error, message)


@pytest.mark.parametrize(
    ("number", "error"), [(65, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError)]
)
def test_check_pages_refuses_a_number_of_new_tokens(side, number, error):
    message = f"num_new_tokens: expected an integer from 0 to 64, got {number}"
    with pytest.raises(error) as raised:
        check_pages(side, [[0]], [1], num_new_tokens=number)
    assert str(raised.value) == message


def check_pages(side, tables, lengths, offsets=None, **options):
    arguments = {
        "k_pages": torch.zeros(9, 8, 2, 32),
        "block_tables": torch.tensor(tables).int(),
        "seq_lens": torch.tensor(lengths).int(),
    }
    if offsets is not None:
        arguments["cu_seqlens_q"] = torch.tensor(offsets).int()
    arguments = {name: x.to(side.device) for name, x in arguments.items()}
    assert side.api.check_pages(**side.share(arguments), **options) is None
