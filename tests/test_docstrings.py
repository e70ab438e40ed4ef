"""Public functions of both sides have the same parameters, results and errors."""

import inspect
import re

import pytest

import pallas_attn
import torch_attn

SECTIONS = ("Args", "Returns", "Raises")
ONE_SIDED = [
    r" Any strides with a contiguous last dimension[^.]*\.",
    r" The rows of an 8-bit pool begin at even offsets\.",
    r" Both are contiguous\.",
    r", the tensors that were given",
    r" with the new tokens, shaped and typed as those given",
    r", or it has no values because it is traced \(`jax\.errors\.TracerArrayConversionError`\)",
    r' "(gluon|mosaic|torch_triton)" \([^)]*\),',
]
SAME = [
    (r"`torch\.Tensor`|`jax\.Array`", "tensor"),
    (r"plain (torch|JAX)", "plain"),
    (r"\((a )?(Triton kernels?; [^)]*'s|Pallas kernels? in [^)]*Pallas) interpreter\)", "(kernel)"),
    (
        r"``torch\.are_deterministic_algorithms_enabled\(\)``|"
        r"``--xla_gpu_deterministic_ops`` in ``XLA_FLAGS``",
        "the framework",
    ),
    (r"devices, strides or values", "devices or values"),
    (r"shapes, devices or strides", "shapes or devices"),
    (r"an operand that requires grad while gradients are recorded", "a derivative"),
]


def sections(function):
    parts = re.split(rf"\n\n({'|'.join(SECTIONS)}|Source|Example)[:\n]", inspect.getdoc(function))
    found = {
        name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=False)
    }
    return {name: found.get(name) for name in SECTIONS}


def without_framework(text):
    for pattern in ONE_SIDED:
        text = re.sub(pattern, "", text)
    for pattern, word in SAME:
        text = re.sub(pattern, word, text)
    return text


@pytest.mark.parametrize("name", torch_attn.__all__)
def test_both_sides_say_the_same(name):
    of_torch, of_jax = (sections(getattr(side, name)) for side in (torch_attn, pallas_attn))
    for section in SECTIONS:
        texts = of_torch[section], of_jax[section]
        if texts == (None, None):
            continue
        assert None not in texts, f"{section} is missing on one side"
        assert without_framework(texts[0]) == without_framework(texts[1])


@pytest.mark.parametrize("name", torch_attn.__all__)
def test_every_parameter_is_described(name):
    for side in (torch_attn, pallas_attn):
        function = getattr(side, name)
        described = sections(function)["Args"]
        for parameter in inspect.signature(function).parameters:
            assert re.search(rf"\b{parameter}\b[^.]*:|\b{parameter}:", described), parameter


def test_both_sides_have_the_same_functions():
    assert torch_attn.__all__ == pallas_attn.__all__
    for side in (torch_attn, pallas_attn):
        assert {*dir(side)} == {*side.__all__, "__version__"}
