"""Prefill and decode of the Llama in `models/`, without gradients."""

from __future__ import annotations

import time

import torch

from bench.training.case import INFERENCE, TrainingCase
from bench.training.torch_training import make_model, make_tokens
from models.llama import Llama


class Inference:
    """A model with a prompt of random tokens, and the token after it.

    NotImplementedError: the device lacks the attention for this dtype and head dimension.
    """

    def __init__(self, case: TrainingCase, attention: str, device: str) -> None:
        model = make_model(case, attention, device).eval()
        assert isinstance(model, Llama)
        self.model = model
        self.prompt = make_tokens(case, device)[:, :-1]
        self.token = self.cache = None

    @torch.no_grad()
    def prefill(self) -> None:
        self.token, self.cache = self.model.decode(self.prompt)

    @torch.no_grad()
    def decode(self) -> None:
        assert self.token is not None
        self.model.decode(self.token, self.cache)
        self.token = self.cache = None

    def time_step(self) -> dict[str, float]:
        """Return the milliseconds to the first token, and from there to the next."""
        found, start = {}, self._now()
        for phase in INFERENCE:
            getattr(self, phase)()
            end = self._now()
            found[phase], start = (end - start) * 1e3, end
        return found

    def memory(self) -> tuple[None, dict[str, int]]:
        """Return None, as a forward leaves nothing, and on a GPU each phase's peak in bytes."""
        peaks = {}
        for phase in INFERENCE if self.prompt.is_cuda else ():
            torch.cuda.reset_peak_memory_stats()
            getattr(self, phase)()
            peaks[phase] = torch.cuda.max_memory_allocated()
        return None, peaks

    def _now(self) -> float:
        """Return the time in seconds once the device is idle."""
        if self.prompt.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
