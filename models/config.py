"""The transformer's shape in both frameworks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from twin_attention.contract.validate.errors import fail

NORM_EPS = 1e-5
INIT_STD = 0.02
DTYPES = ("float16", "bfloat16", "float32", "float64")  # of parameters and of arithmetic


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: pre-norm blocks of causal attention and an MLP, no dropout.

    Attributes:
        d_model: width of the residual stream.
        d_ff: width inside the MLP.
        num_heads: query heads, each d_model / num_heads wide.
        num_heads_kv: divides num_heads.
        norm: "rmsnorm", or "layernorm" with a bias.
        mlp: "swiglu" (three matrices), or "gelu" (two; exact).
        tied_head: the output projection is the embedding.
        rope_theta: base of the rotary embedding's wavelengths.

    Raises:
        TypeError, ValueError: wrong or inconsistent sizes, or an unknown norm or MLP.
    """

    vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_heads_kv: int
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    tied_head: bool = False
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_heads_kv")
        for name in sizes:
            size = getattr(self, name)
            if type(size) is not int:
                fail(TypeError, name, "an int", type(size).__name__)
            if size < 1:
                fail(ValueError, name, "1 or more", size)
        if self.d_model % (2 * self.num_heads):
            expected = f"an even multiple of num_heads ({self.num_heads})"
            fail(ValueError, "d_model", expected, self.d_model)
        if self.num_heads % self.num_heads_kv:
            expected = f"a divisor of num_heads ({self.num_heads})"
            fail(ValueError, "num_heads_kv", expected, self.num_heads_kv)
        if self.norm not in ("rmsnorm", "layernorm"):
            fail(ValueError, "norm", '"rmsnorm" or "layernorm"', repr(self.norm))
        if self.mlp not in ("swiglu", "gelu"):
            fail(ValueError, "mlp", '"swiglu" or "gelu"', repr(self.mlp))

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Return the number of trained values; a tied head adds none."""
        attention = 2 * self.d_model * self.head_dim * (self.num_heads + self.num_heads_kv)
        mlp = (3 if self.mlp == "swiglu" else 2) * self.d_model * self.d_ff
        norm = (1 if self.norm == "rmsnorm" else 2) * self.d_model
        embedding = self.vocab_size * self.d_model
        head = 0 if self.tied_head else embedding
        return embedding + self.num_layers * (attention + mlp + 2 * norm) + norm + head

    @property
    def rotary_frequencies(self) -> np.ndarray:
        """Return radians per position of each pair of a head's dimensions: [head_dim / 2] float32.

        The frameworks' powers would differ in the last bit, which positions multiply.
        """
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        return (self.rope_theta**-exponents).astype(np.float32)


class Size(NamedTuple):
    vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_heads_kv: int


# GPT-2's sizes and a larger one. In the modern form 3 to 5 query heads share a kv head.
SIZES = {
    "tiny": Size(256, 32, 128, 2, 2, 1),
    "S": Size(10_000, 768, 3072, 12, 12, 4),
    "M": Size(10_000, 1024, 4096, 24, 16, 4),
    "L": Size(10_000, 1280, 5120, 36, 20, 4),
    "XL": Size(10_000, 1600, 6400, 48, 25, 5),
    "2.7B": Size(10_000, 2560, 10_240, 32, 32, 8),
}


def make_config(
    size: str, form: Literal["modern", "gpt"] = "modern", **changes: Any
) -> ModelConfig:
    """Return the configuration of a size.

    Args:
        size: a name of `SIZES`.
        form: "modern" is RMSNorm, SwiGLU and grouped kv heads, with as many MLP parameters as
            GELU's. "gpt" is LayerNorm, GELU and no grouping.
        changes: fields of `ModelConfig` that differ, such as ``tied_head=True``.

    Raises:
        ValueError: an unknown size or form.

    Example:
        >>> from models.config import make_config
        >>> make_config("S").num_parameters
        90876672
    """
    if size not in SIZES:
        fail(ValueError, "size", f"one of {', '.join(SIZES)}", repr(size))
    config = ModelConfig(**SIZES[size]._asdict())
    if form == "modern":
        config = replace(config, d_ff=-(-8 * config.d_model // (3 * 64)) * 64)
    elif form == "gpt":
        config = replace(config, num_heads_kv=config.num_heads, norm="layernorm", mlp="gelu")
    else:
        fail(ValueError, "form", '"modern" or "gpt"', repr(form))
    return replace(config, **changes)


def check_dtypes(dtype: str, compute_dtype: str) -> None:
    """Refuse names that are not in `DTYPES` (ValueError)."""
    for name, got in (("dtype", dtype), ("compute_dtype", compute_dtype)):
        if got not in DTYPES:
            fail(ValueError, name, f"one of {', '.join(DTYPES)}", got)
