from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from models.config import ModelConfig, make_config
from twin_attention.contract.cost import forward_flops
from twin_attention.interop.parity.cases import FlashCase

# Of parameters and of arithmetic.
DTYPES = {
    "float32": ("float32", "float32"),
    "mixed": ("float32", "bfloat16"),
    "bfloat16": ("bfloat16", "bfloat16"),
}
# By framework, as in `models.*_attention`. "xla" keeps all scores; if it runs out of memory, JAX
# has too little for what follows.
ATTENTIONS = {"torch": ("twin", "eager", "sdpa", "cudnn", "flex"), "jax": ("twin", "cudnn", "xla")}
# Of a model whose attention no other has.
FORM_ATTENTIONS = {
    "gpt": ("twin", "eager")  # the form with LayerNorm and GELU is that of older reports
}
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class TrainingCase:
    """A model, a batch and dtypes; "mixed" is bfloat16 arithmetic on float32 parameters."""

    size: str
    batch: int
    context: int
    dtype: str = "mixed"
    form: Literal["modern", "gpt"] = "modern"

    @property
    def name(self) -> str:
        form = "" if self.form == "modern" else f"{self.form}-"
        return f"{form}{self.size}-{self.batch}x{self.context}-{self.dtype}"

    @property
    def fields(self) -> dict[str, Any]:
        return {"name": self.name} | asdict(self)

    @property
    def config(self) -> ModelConfig:
        return make_config(self.size, self.form)

    @property
    def dtypes(self) -> dict[str, str]:
        dtype, compute_dtype = DTYPES[self.dtype]
        return {"dtype": dtype, "compute_dtype": compute_dtype}

    def flops(self, operation: str) -> int:
        """Count the operations of the model's matrix products and visible pairs.

        As for model FLOPs utilisation (Chowdhery et al. 2022), a backward has twice a forward's,
        and recomputation and the optimizer do not count.
        """
        config, tokens = self.config, self.context
        head = config.vocab_size * config.d_model
        looked_up = 0 if config.tied_head else head
        layers = config.num_parameters - looked_up - head
        products = 2 * self.batch * tokens * (layers + head)
        attention = FlashCase(
            self.name, self.batch, tokens, tokens, config.num_heads, config.num_heads_kv,
            config.head_dim, causal=True,
        )  # fmt: skip
        forward = products + config.num_layers * forward_flops(attention.spec)
        return {"backward": 2, "optimizer": 0, "step": 3}.get(operation, 1) * forward
