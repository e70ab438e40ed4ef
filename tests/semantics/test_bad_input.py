"""The same mistake raises the same error on both sides, before anything runs."""

from functools import partial

import numpy as np
import pytest
import torch

Q, K, V = (2, 5, 4, 32), (2, 7, 2, 32), (2, 7, 2, 48)
SIZE = "expected a head dimension from 16 to 256 in steps of 8, got "
WINDOW = "window_size: expected None or a pair (left, right) of non-negative integers or None, got "
INT_DEPTHS = {"kv_ends": "int32", "q_depths": "int32", "kv_depths": "int32"}
INT_IDS = {"q_segment_ids": "int32", "kv_segment_ids": "int32"}

# name: (exception, message, changed shapes, changed dtypes, options)
MISTAKES = {
    "rank of q": (
        ValueError, "q: expected 4 dimensions [B, Sq, Hq, D], got shape (5, 4, 32)",
        {"q": (5, 4, 32)}, {}, {},
    ),
    "rank of k": (
        ValueError, "k: expected 4 dimensions [B, Skv, Hkv, D], got shape (7, 2, 32)",
        {"k": (7, 2, 32)}, {}, {},
    ),
    "rank of v": (
        ValueError, "v: expected 4 dimensions [B, Skv, Hkv, Dv], got shape (1, 2, 7, 2, 48)",
        {"v": (1, 2, 7, 2, 48)}, {}, {},
    ),
    "batch of k": (ValueError, "k: expected q's batch size 2, got 1", {"k": (1, 7, 2, 32)}, {}, {}),
    "batch of v": (ValueError, "v: expected q's batch size 2, got 3", {"v": (3, 7, 2, 48)}, {}, {}),
    "length of v": (ValueError, "v: expected k's length 7, got 8", {"v": (2, 8, 2, 48)}, {}, {}),
    "heads of v": (ValueError, "v: expected k's 2 heads, got 1", {"v": (2, 7, 1, 48)}, {}, {}),
    "head dimension of k": (
        ValueError, "k: expected q's head dimension 32, got 64", {"k": (2, 7, 2, 64)}, {}, {},
    ),
    "heads of q": (
        ValueError, "q: expected a number of heads divisible by k's 2, got 3",
        {"q": (2, 5, 3, 32)}, {}, {},
    ),
    "no kv heads": (
        ValueError, "q: expected a number of heads divisible by k's 0, got 4",
        {"k": (2, 7, 0, 32), "v": (2, 7, 0, 48)}, {}, {},
    ),
    "head dimension too small": (
        NotImplementedError, f"q: {SIZE}8", {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8)}, {}, {},
    ),
    "head dimension too large": (
        NotImplementedError, f"q: {SIZE}264", {"q": (2, 5, 4, 264), "k": (2, 7, 2, 264)}, {}, {},
    ),
    "head dimension between steps": (
        NotImplementedError, f"v: {SIZE}20", {"v": (2, 7, 2, 20)}, {}, {},
    ),
    "dtype of k": (
        TypeError, "k: expected q's dtype bfloat16, got float16", {}, {"k": "float16"}, {},
    ),
    "dtype of v": (
        TypeError, "v: expected q's dtype bfloat16, got float32", {}, {"v": "float32"}, {},
    ),
    "integers": (
        TypeError, "q: expected a floating-point dtype, got int32",
        {}, {"q": "int32", "k": "int32", "v": "int32"}, {},
    ),
    "float64": (
        NotImplementedError, "q: expected dtype float16, bfloat16, float32, got float64",
        {}, {"q": "float64", "k": "float64", "v": "float64"}, {},
    ),
    "float8": (
        NotImplementedError, "k: expected dtype float16, bfloat16, float32, got float8_e4m3fn",
        {}, {"k": "float8_e4m3fn"}, {},
    ),
    "a table of an even number of distances": (
        ValueError,
        "relative_bias: expected shape (4, 2R + 1), of each head a value for each distance -R to "
        "R, got (4, 6)",
        {"relative_bias": (4, 6)}, {"relative_bias": "float32"}, {},
    ),
    "a table of other heads": (
        ValueError,
        "relative_bias: expected shape (4, 2R + 1), of each head a value for each distance -R to "
        "R, got (2, 5)",
        {"relative_bias": (2, 5)}, {"relative_bias": "float32"}, {},
    ),
    "dtype of a table": (
        TypeError, "relative_bias: expected dtype float32 or q's bfloat16, got float16",
        {"relative_bias": (4, 5)}, {"relative_bias": "float16"}, {},
    ),
    "slopes of other sequences": (
        ValueError, "alibi_slopes: expected shape (4,) or (2, 4), one of each head, got (1, 4)",
        {"alibi_slopes": (1, 4)}, {"alibi_slopes": "float32"}, {},
    ),
    "dtype of slopes": (
        TypeError, "alibi_slopes: expected dtype float32, got bfloat16",
        {"alibi_slopes": (4,)}, {"alibi_slopes": "bfloat16"}, {},
    ),
    "a bias that does not broadcast": (
        ValueError, "bias: expected shape (2, 4, 5, 7), or 1 in place of any of these, got (2, 4, "
        "7, 5)",
        {"bias": (2, 4, 7, 5)}, {"bias": "float32"}, {},
    ),
    "a bias of other axes": (
        ValueError, "bias: expected shape (2, 4, 5, 7), or 1 in place of any of these, got (5, 7)",
        {"bias": (5, 7)}, {"bias": "float32"}, {},
    ),
    "dtype of a bias": (
        TypeError, "bias: expected dtype float32 or q's bfloat16, got float16",
        {"bias": (1, 1, 5, 7)}, {"bias": "float16"}, {},
    ),
    "a rate of 1": (
        ValueError, "dropout_rate: expected a number from 0 on that is less than 1, got 1.0",
        {"dropout_seed": (2,)}, {"dropout_seed": "int32"}, {"dropout_rate": 1.0},
    ),
    "a rate that is no number": (
        TypeError, "dropout_rate: expected a number from 0 on that is less than 1, got str",
        {}, {}, {"dropout_rate": "0.1"},
    ),
    "dropout without a seed": (
        ValueError, "dropout_seed: expected a seed with dropout_rate, got None",
        {}, {}, {"dropout_rate": 0.1},
    ),
    "dtype of a seed": (
        TypeError, "dropout_seed: expected dtype int32 or uint32, got float32",
        {"dropout_seed": (2,)}, {"dropout_seed": "float32"}, {"dropout_rate": 0.1},
    ),
    "a seed of one number": (
        ValueError, "dropout_seed: expected shape (2,), got (1,)",
        {"dropout_seed": (1,)}, {"dropout_seed": "int32"}, {"dropout_rate": 0.1},
    ),
    "row maxima by a number": (
        TypeError, "return_row_max: expected a bool, got int", {}, {}, {"return_row_max": 1},
    ),
    "softcap of zero": (
        ValueError, "softcap: expected a positive number up to 2**100 or None, got 0.0",
        {}, {}, {"softcap": 0.0},
    ),
    "negative softcap": (
        ValueError, "softcap: expected a positive number up to 2**100 or None, got -5.0",
        {}, {}, {"softcap": -5.0},
    ),
    "infinite softcap": (
        ValueError, "softcap: expected a positive number up to 2**100 or None, got inf",
        {}, {}, {"softcap": float("inf")},
    ),
    "softcap of NaN": (
        ValueError, "softcap: expected a positive number up to 2**100 or None, got nan",
        {}, {}, {"softcap": float("nan")},
    ),
    "softcap of text": (
        TypeError, "softcap: expected a positive number up to 2**100 or None, got str",
        {}, {}, {"softcap": "30"},
    ),
    "infinite scale": (
        ValueError, "scale: expected a finite number or None, got -inf",
        {}, {}, {"scale": float("-inf")},
    ),
    "scale of NaN": (
        ValueError, "scale: expected a finite number or None, got nan",
        {}, {}, {"scale": float("nan")},
    ),
    "negative window": (ValueError, f"{WINDOW}(-1, 0)", {}, {}, {"window_size": (-1, 0)}),
    "window of one number": (TypeError, f"{WINDOW}4", {}, {}, {"window_size": 4}),
    "window of fractions": (TypeError, f"{WINDOW}(1.5, 0)", {}, {}, {"window_size": (1.5, 0)}),
    "scale out of float32": (
        ValueError, "scale: expected a finite number or None, got 1e+300", {}, {}, {"scale": 1e300},
    ),
    "softcap out of float32": (
        ValueError, "softcap: expected a positive number up to 2**100 or None, got 1e+60",
        {}, {}, {"softcap": 1e60},
    ),
    "softcap that flushes scores": (
        ValueError, "softcap: expected a positive number up to 2**100 or None, got 1e+35",
        {}, {}, {"softcap": 1e35},
    ),
    "lse of text": (TypeError, "return_lse: expected a bool, got str", {}, {}, {"return_lse": ""}),
    "causal of numpy": (
        TypeError, "causal: expected a bool, got numpy.bool", {}, {}, {"causal": np.True_},
    ),
    "deterministic of a number": (
        TypeError, "deterministic: expected None or a bool, got int", {}, {}, {"deterministic": 1},
    ),
    "unknown precision": (
        ValueError, "precision: expected one of 'ieee', 'tf32', got 'bf16'",
        {}, {}, {"precision": "bf16"},
    ),
    "no precision": (
        ValueError, "precision: expected one of 'ieee', 'tf32', got None",
        {}, {}, {"precision": None},
    ),
    "sinks of the kv heads": (
        ValueError, "sinks: expected shape (4,), one of each head, got (2,)",
        {"sinks": (2,)}, {"sinks": "float32"}, {},
    ),
    "sinks of sequences": (
        ValueError, "sinks: expected shape (4,), one of each head, got (2, 4)",
        {"sinks": (2, 4)}, {"sinks": "float32"}, {},
    ),
    "dtype of sinks": (
        TypeError, "sinks: expected dtype float32, got bfloat16", {"sinks": (4,)}, {}, {},
    ),
    "ids of queries alone": (
        ValueError, "kv_segment_ids: expected ids of queries and of keys, or of neither, got None",
        {"q_segment_ids": (2, 5)}, {"q_segment_ids": "int32"}, {},
    ),
    "ids of keys alone": (
        ValueError, "q_segment_ids: expected ids of queries and of keys, or of neither, got None",
        {"kv_segment_ids": (2, 7)}, {"kv_segment_ids": "int32"}, {},
    ),
    "ids of one sequence": (
        ValueError, "q_segment_ids: expected shape (2, 5), one of each token, got (5,)",
        {"q_segment_ids": (5,), "kv_segment_ids": (2, 7)}, INT_IDS, {},
    ),
    "ids of another length": (
        ValueError, "kv_segment_ids: expected shape (2, 7), one of each token, got (2, 5)",
        {"q_segment_ids": (2, 5), "kv_segment_ids": (2, 5)}, INT_IDS, {},
    ),
    "dtype of ids": (
        TypeError, "kv_segment_ids: expected dtype int32, got int64",
        {"q_segment_ids": (2, 5), "kv_segment_ids": (2, 7)}, INT_IDS | {"kv_segment_ids": "int64"},
        {},
    ),
    "depths without ends": (
        ValueError, "q_depths: expected None without kv_ends, got shape (2, 5)",
        {"q_depths": (2, 5), "kv_depths": (2, 7)}, INT_DEPTHS, {"causal": True},
    ),
    "ends of queries": (
        ValueError, "kv_ends: expected shape (2, 7), one of each token, got (2, 5)",
        {"kv_ends": (2, 5)}, {"kv_ends": "int32"}, {"causal": True},
    ),
    "dtype of ends": (
        TypeError, "kv_ends: expected dtype int32, got int64",
        {"kv_ends": (2, 7)}, {"kv_ends": "int64"}, {"causal": True},
    ),
    "ends without causal": (
        ValueError, "causal: expected True with kv_ends, got False",
        {"kv_ends": (2, 7)}, {"kv_ends": "int32"}, {},
    ),
    "ends with keys to the right": (
        ValueError, "causal: expected True with kv_ends, got False",
        {"kv_ends": (2, 7)}, {"kv_ends": "int32"}, {"window_size": (None, 3)},
    ),
    "depths of queries alone": (
        ValueError, "kv_depths: expected depths of queries and of keys, or of neither, got None",
        {"kv_ends": (2, 7), "q_depths": (2, 5)}, INT_DEPTHS, {"causal": True},
    ),
    "depths of another length": (
        ValueError, "q_depths: expected shape (2, 5), one of each token, got (2, 7)",
        {"kv_ends": (2, 7), "q_depths": (2, 7), "kv_depths": (2, 7)}, INT_DEPTHS, {"causal": True},
    ),
    "causal of a number": (TypeError, "causal: expected a bool, got int", {}, {}, {"causal": 1}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_one_message(side, implementation, mistake):
    error, message, shapes, dtypes, options = MISTAKES[mistake]
    operands = {
        name: side.zeros(shape, dtypes.get(name, "bfloat16"))
        for name, shape in ({"q": Q, "k": K, "v": V} | shapes).items()
    }
    for call in (side.api.flash_attention, partial(side.trace, side.api.flash_attention)):
        with pytest.raises(error) as raised:
            call(**operands, implementation=implementation, **options)
        assert (raised.type, str(raised.value)) == (error, message)


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_what_is_no_tensor(side, name):
    """A list, and an array of another library, numpy's among them."""
    shapes = {"q": Q, "k": K, "v": V, "sinks": (4,)}
    operands = {name: side.zeros(shape, "float32") for name, shape in shapes.items()}
    array = np.zeros(operands[name].shape, np.float32)
    for wrong, got in (([1.0], "list"), (array, "numpy.ndarray")):
        message = f"{name}: expected {side.tensor}, got {got}"
        with pytest.raises(TypeError) as raised:
            side.api.flash_attention(**operands | {name: wrong})
        assert str(raised.value) == message


def test_an_unknown_implementation(side):
    q, k, v = (side.zeros(shape, "float32") for shape in (Q, K, V))
    message = r"^implementation: expected None or one of '.*', got 'cudnn'"
    with pytest.raises(ValueError, match=message):
        side.api.flash_attention(q, k, v, implementation="cudnn")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_last_dimension_that_is_not_contiguous(implementation, torch_device, name):
    """torch alone: JAX arrays have no strides."""
    import torch_attn

    operands = {
        n: torch.zeros(shape, device=torch_device)
        for n, shape in zip("qkv", (Q, K, V), strict=True)
    }
    operands[name] = operands[name].mT.contiguous().mT
    message = f"{name}: expected a contiguous last dimension, got a stride other than 1"
    with pytest.raises(ValueError, match=f"^{message}$"):
        torch_attn.flash_attention(**operands, implementation=implementation)


@pytest.mark.parametrize("name", ["k", "v", "sinks"])
def test_a_cpu_tensor_with_a_gpu_one(side, implementation, torch_device, name):
    if torch_device == "cpu":
        pytest.skip("needs two devices: run on a machine with a GPU")
    operands = {n: side.zeros(s, "float16") for n, s in zip("qkv", (Q, K, V), strict=True)}
    operands["sinks"] = side.zeros((4,), "float32")
    operands[name] = side.on_cpu(operands[name])
    with pytest.raises(ValueError, match=f"^{name}: expected q's device cuda:0, got cpu"):
        side.api.flash_attention(**operands, implementation=implementation)


def test_arguments_after_the_tensors_are_named(side):
    q, k, v = (side.zeros(shape, "float32") for shape in (Q, K, V))
    with pytest.raises(TypeError, match="positional"):
        side.api.flash_attention(q, k, v, True)


@pytest.mark.parametrize("asked", [None, "reference", "triton"])
def test_explain_refuses_a_wrong_target(side, monkeypatch, asked):
    monkeypatch.setattr("twin_attention.targets.target._environment", "banana")
    message = "^TWIN_ATTENTION_TARGET: expected None or one of 'sm80', 'sm90', got 'banana'$"
    q, k, v = (side.zeros(shape, "float16") for shape in (Q, K, V))
    with pytest.raises(ValueError, match=message):
        side.api.explain(side.api.flash_attention, q, k, v, implementation=asked)
