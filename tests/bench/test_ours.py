from contextlib import suppress

import pytest

import pallas_attn
import torch_attn
from bench import ours
from bench.problems import attention_tensors
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.targets import family
from twin_attention.targets.target import requested_target

CASE = FlashCase(
    "ours", batch=1, seq_q=32, seq_kv=48, heads_q=2, heads_kv=1, head_dim=16, causal=True
)


def make(name, target, operation):
    tensors = attention_tensors(CASE, "cpu")
    return ours.flash_factories([target])[name, target](CASE, operation, tensors)


def test_a_deterministic_call_asks_for_it_in_the_backward_alone(monkeypatch):
    asked = []

    def attend(*_, deterministic, implementation, **options):
        asked.append((deterministic, implementation))
        raise NotImplementedError

    monkeypatch.setattr(torch_attn, "flash_attention", attend)
    for name in ("torch gluon", "torch gluon deterministic"):
        with suppress(NotImplementedError):
            make(name, "sm90", "backward")
    assert asked == [(False, "gluon"), (True, "gluon")]
    with pytest.raises(Absent, match="every forward is deterministic"):
        make("torch gluon deterministic", "sm90", "forward")


@pytest.mark.parametrize(
    ("name", "operation", "launched"),
    [
        ("torch triton", "forward", ["flash_fwd"]),
        ("torch triton", "backward", ["flash_bwd"]),
        ("torch triton", "both", ["flash_fwd", "flash_bwd"]),
        ("jax triton", "forward", ["flash_attention"]),
    ],
)
def test_kernels_are_launched_or_traced_for_the_target(monkeypatch, name, operation, launched):
    from torch_attn.kernels.portable import flash_bwd, flash_fwd

    monkeypatch.setattr(family, "_function", family._function.__wrapped__)  # without its cache
    monkeypatch.setattr("twin_attention.targets.target._environment", None)
    seen = []

    def spy(module, name):
        original = getattr(module, name)

        def function(*args, **options):
            seen.append((name, requested_target()))
            return original(*args, **options)

        monkeypatch.setattr(module, name, function)

    spy(flash_fwd, "flash_fwd")
    spy(flash_bwd, "flash_bwd")
    spy(pallas_attn, "flash_attention")
    call = make(name, "sm80", operation)
    seen.clear()
    call.run()
    assert seen == [(name, "sm80") for name in launched]
    assert requested_target() is None
