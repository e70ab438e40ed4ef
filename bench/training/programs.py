"""Models of Hugging Face transformers with random weights: a training step, and greedy tokens."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from bench.training.case import TrainingCase
from bench.training.job import Show
from bench.training.steps import fields
from bench.training.torch_training import LEARNING_RATE, clock
from torch_attn.adapters.transformers import register

transformers = import_module("transformers")  # by a name: a type checker would read every model
PROMPT, NEW_TOKENS = 512, {"cuda": 64, "cpu": 3}
_STEPS = {"step": (10, 3), "generate": (3, 1)}  # how many, and how many warm up

# Classes, and what differs from their configs: real heads and layers, fewer of them.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama LlamaForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
        "num_key_value_heads": 4}),
    "Gemma 3": ("Gemma3Text Gemma3ForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024}),
    "gpt-oss": ("GptOss GptOssForCausalLM", {
        "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 8}),
    "T5": ("T5 T5ForConditionalGeneration", {
        "d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 8, "dropout_rate": 0.0,
        "decoder_start_token_id": 0}),
    "BERT": ("Bert BertForMaskedLM", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
        "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}),
}  # fmt: skip
_COMMON = {"num_hidden_layers": 8, "vocab_size": 32000, "eos_token_id": None, "pad_token_id": 0}
_TINY = {
    "num_hidden_layers": 2, "num_layers": 2, "vocab_size": 256, "intermediate_size": 64, "d_ff": 64,
    "hidden_size": 64, "d_model": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_heads": 4,
}  # fmt: skip
ATTENTIONS = {"twin": "torch_attn", "sdpa": "sdpa", "eager": "eager"}


class JudgedModel:
    """A model in a case's dtype, and the same in float32 with eager attention to judge it."""

    def __init__(self, case: TrainingCase, attention: str, device: str) -> None:
        register()
        self.case, self.device = case, device
        self.model = self._make(ATTENTIONS[attention])
        shape = case.batch, case.context
        self.tokens = torch.randint(1, self.model.config.vocab_size, shape, device=device)
        self.prompt = self.tokens[:, :PROMPT]
        self.found: Any = None
        self.losses: list[torch.Tensor] = []
        self.adamw: Any = None

    def _make(self, attention: str) -> Any:
        classes, shape = SHAPES[self.case.size]
        config_class, model_class = classes.split()
        tiny = _TINY if self.device == "cpu" else {}
        config = getattr(transformers, f"{config_class}Config")(**_COMMON | shape | tiny)
        options = {"dtype": getattr(torch, self.case.dtype), "attn_implementation": attention}
        torch.manual_seed(0)
        with torch.device(self.device):
            return getattr(transformers, model_class)._from_config(config, **options)

    @torch.no_grad()
    def generate(self) -> None:
        number = NEW_TOKENS[self.device]
        model = self.model.eval()
        self.found = model.generate(self.prompt, max_new_tokens=number, do_sample=False)

    def step(self) -> None:
        if self.adamw is None:
            self.model.train().config.use_cache = False
            self.adamw = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, fused=True)
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.adamw.step()
        self.adamw.zero_grad()
        self.losses.append(loss.detach())

    @cached_property
    def judging(self) -> Any:
        return self._make("eager").float().eval()

    @torch.no_grad()
    def judge(self, operation: str) -> float:
        """Return how far the first loss is from the float32 model's, as a share of it; or the share
        of generated tokens that the float32 model prefers too, after the same tokens.
        """
        model = self.judging
        if operation == "step":
            loss = model(input_ids=self.tokens, labels=self.tokens).loss
            return abs(self.losses[0].float() / loss - 1).item()
        if self.case.size == "T5":
            logits = model(input_ids=self.prompt, decoder_input_ids=self.found[:, :-1]).logits
        else:
            logits = model(self.found[:, :-1]).logits
        number = NEW_TOKENS[self.device]
        same = logits[:, -number:].argmax(-1) == self.found[:, -number:]
        return same.float().mean().item()

    def observe(self, show: Show) -> dict[str, dict[str, Any]]:
        found = {}
        for operation in ("generate", "step")[not self.model.can_generate() :]:
            repeats, warmup = _STEPS[operation]
            mark, between = clock(self.device == "cuda")
            marks = [mark()]
            for i in range(repeats):
                show(f"{operation} {i + 1}")
                getattr(self, operation)()
                marks.append(mark())
            times = [between(*pair) for pair in pairwise(marks)]
            show("judging")
            found[operation] = fields(times, warmup, 0) | {"judged": self.judge(operation)}
        return found
