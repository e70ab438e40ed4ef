from dataclasses import replace

import pytest

from models.config import SIZES, make_config

TINY = make_config("tiny")


@pytest.mark.parametrize("form", ["modern", "gpt"])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_a_head_dimension_of_the_kernels(size, form):
    config = make_config(size, form)
    assert config.head_dim % 8 == 0
    assert 16 <= config.head_dim <= 256


def test_both_forms_have_about_as_many_mlp_parameters():
    for size in list(SIZES)[1:]:
        modern, gpt = make_config(size), make_config(size, "gpt")
        assert 1 <= 3 * modern.d_ff / (2 * gpt.d_ff) < 1.02
        assert modern.d_ff % 64 == 0


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "d_ff: expected an int, got float", {"d_ff": 96.0}),
        (ValueError, "num_layers: expected 1 or more, got 0", {"num_layers": 0}),
        (
            ValueError,
            r"d_model: expected an even multiple of num_heads \(3\), got 32",
            {"num_heads": 3, "num_heads_kv": 3},
        ),
        (
            ValueError,
            r"num_heads_kv: expected a divisor of num_heads \(2\), got 4",
            {"num_heads_kv": 4},
        ),
        (ValueError, "norm: expected .* got 'batchnorm'", {"norm": "batchnorm"}),
        (ValueError, "mlp: expected .* got 'relu'", {"mlp": "relu"}),
    ],
)
def test_wrong_fields_are_refused(error, message, changes):
    with pytest.raises(error, match=message):
        replace(TINY, **changes)


def test_unknown_sizes_and_forms_are_refused():
    with pytest.raises(ValueError, match=r"size: expected one of tiny, S, .* got 'XXL'"):
        make_config("XXL")
    with pytest.raises(ValueError, match=r"form: expected .* got 'old'"):
        make_config("S", "old")  # type: ignore[arg-type]
