"""Training steps of the PyTorch models; `jax_training` is its twin."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from bench.training.case import PHASES, TrainingCase
from bench.training.timeline import Timeline
from bench.training.torch_memory import record_timeline
from models.torch_model import Transformer, next_token_loss

LEARNING_RATE = 3e-4


class TorchTraining:
    """A model with its AdamW optimizer and one batch; `compiled` blocks share their code."""

    def __init__(self, case: TrainingCase, attention: str, device: str, compiled: bool) -> None:
        self.model = make_model(case, attention, device)
        if compiled:
            for layer in self.model.layers:
                layer.compile(dynamic=False)
        self.parameters = list(self.model.parameters())
        self.adamw = torch.optim.AdamW(self.parameters, LEARNING_RATE, fused=True)
        self.tokens = make_tokens(case, device)
        self.loss: torch.Tensor | None = None

    def forward(self) -> None:
        self.loss = next_token_loss(self.model, self.tokens)

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

    def optimizer(self) -> None:
        self.adamw.step()
        self.adamw.zero_grad()

    def time_step(self) -> dict[str, float]:
        """Return the milliseconds of each phase, and of the whole step, on one clock.

        On a GPU the clock is an event after each phase, so nothing waits.
        """
        mark, between = clock(self.tokens.is_cuda)
        marks = [mark()]
        for phase in PHASES:
            getattr(self, phase)()
            marks.append(mark())
        phases = [between(*pair) for pair in pairwise(marks)]
        return dict(zip(PHASES, phases, strict=True)) | {"step": between(marks[0], marks[-1])}

    def memory(self) -> tuple[int | None, dict[str, int]]:
        """Return the bytes that a forward leaves, and each phase's peak; none on a CPU."""
        if not self.tokens.is_cuda:
            return None, {}
        before, saved, peaks = torch.cuda.memory_allocated(), 0, {}
        for phase in PHASES:
            torch.cuda.reset_peak_memory_stats()
            getattr(self, phase)()
            peaks[phase] = torch.cuda.max_memory_allocated()
            if phase == "forward":
                saved = torch.cuda.memory_allocated() - before
        return saved, peaks | {"step": max(peaks.values())}

    def timeline(self) -> Timeline:
        phases = {phase: getattr(self, phase) for phase in PHASES}
        return record_timeline(phases, self.parameters, self.adamw)


def make_model(case: TrainingCase, attention: str, device: str) -> Transformer:
    torch.compiler.reset()  # what another case compiled neither counts nor keeps its memory
    torch.manual_seed(0)
    dtypes = {name: getattr(torch, dtype) for name, dtype in case.dtypes.items()}
    return Transformer(case.config, attention, device=device, **dtypes)


def make_tokens(case: TrainingCase, device: str) -> torch.Tensor:
    shape = (case.batch, case.context + 1)
    return torch.randint(case.config.vocab_size, shape, device=device)


def clock(is_cuda: bool) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    if not is_cuda:
        return time.perf_counter, lambda start, end: (end - start) * 1e3

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)

    torch.cuda.synchronize()
    return mark, between
