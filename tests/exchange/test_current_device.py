"""JAX's start makes the last GPU current for torch too; `test_streams` has real GPUs."""

from contextlib import contextmanager
from types import SimpleNamespace

import jax
import pytest
import torch

from twin_attention.interop.exchange import dlpack, to_jax


class TwoGPUs:
    current, jax_has_started = 0, False

    @contextmanager
    def device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def set_device(self, index):
        self.current = index

    def start_jax(self):
        if not self.jax_has_started:
            self.current, self.jax_has_started = 1, True

    def from_dlpack(self, tensor, copy):
        self.start_jax()
        assert self.current == tensor.device, "torch exports it on its own device only"

    def release(self, tensor, array):
        self.current = 1 - self.current  # a computation of JAX's may leave any


@pytest.mark.parametrize("gpu", [0, 1])
def test_jax_starts_before_it_takes_the_tensor(gpu, monkeypatch):
    gpus = TwoGPUs()
    for where, name, new in (
        (torch.cuda, "device", gpus.device),
        (torch.cuda, "set_device", gpus.set_device),
        (jax, "local_devices", gpus.start_jax),
        (jax.dlpack, "from_dlpack", gpus.from_dlpack),
        (dlpack, "release_after_jax", gpus.release),
        (dlpack, "_check_tensor", lambda tensor: None),
        (dlpack, "_check_shareable", lambda tensor: None),
    ):
        monkeypatch.setattr(where, name, new)
    for _ in range(2):
        to_jax(SimpleNamespace(is_cuda=True, device=gpu))
        assert gpus.current == 0
