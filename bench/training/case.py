"""Describe the training of a model: its size, its tokens, its dtypes and what that costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from interop.parity.cases import FlashCase
from models.config import ModelConfig, make_config
from twin_attention.contract.cost import forward_flops
from twin_attention.contract.validate import fail

# Of parameters and of arithmetic.
DTYPES = {
    "float32": ("float32", "float32"),
    "mixed": ("float32", "bfloat16"),
    "bfloat16": ("bfloat16", "bfloat16"),
}
# By framework; what `models.torch_attention` and `models.jax_attention` know.
ATTENTIONS = {
    "torch": ("twin", "eager", "sdpa", "cudnn", "flex"),
    "jax": ("twin", "xla", "cudnn"),
}
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class TrainingCase:
    """A model, a batch and dtypes.

    Attributes:
        size, form: of `models.config.make_config`.
        batch: sequences of a step.
        context: tokens of a sequence that the model predicts from.
        dtype: a name of `DTYPES`; "mixed" is bfloat16 arithmetic on float32 parameters.

    Raises:
        ValueError: an unknown size, form or dtype, or less than one sequence or token.
    """

    size: str
    batch: int
    context: int
    dtype: str = "mixed"
    form: Literal["modern", "gpt"] = "modern"

    def __post_init__(self) -> None:
        make_config(self.size, self.form)
        if self.dtype not in DTYPES:
            fail(ValueError, "dtype", f"one of {', '.join(DTYPES)}", repr(self.dtype))
        for name in ("batch", "context"):
            if getattr(self, name) < 1:
                fail(ValueError, name, "1 or more", getattr(self, name))

    @property
    def name(self) -> str:
        form = "gpt-" if self.form == "gpt" else ""
        return f"{form}{self.size}-{self.batch}x{self.context}-{self.dtype}"

    @property
    def fields(self) -> dict[str, Any]:
        """Return what a record keeps."""
        return {"name": self.name} | asdict(self)

    @property
    def config(self) -> ModelConfig:
        return make_config(self.size, self.form)

    @property
    def dtypes(self) -> dict[str, str]:
        """Return the models' arguments by the dtypes' names."""
        dtype, compute_dtype = DTYPES[self.dtype]
        return {"dtype": dtype, "compute_dtype": compute_dtype}

    def flops(self, operation: str) -> int:
        """Count the model's operations: its matrix products and the pairs that the mask keeps.

        A backward has twice a forward's; what it computes once more does not count, nor does the
        optimizer. So they are those of model FLOPs utilisation. Source: Chowdhery et al. 2022.
        """
        config = self.config
        looked_up = 0 if config.tied_head else config.vocab_size * config.d_model
        products = 2 * (config.num_parameters - looked_up) * self.batch * self.context
        attention = FlashCase(
            self.name, self.batch, self.context, self.context, config.num_heads,
            config.num_heads_kv, config.head_dim, causal=True,
        )  # fmt: skip
        forward = products + config.num_layers * forward_flops(attention.spec)
        return {"forward": 1, "backward": 2, "optimizer": 0, "step": 3}[operation] * forward
