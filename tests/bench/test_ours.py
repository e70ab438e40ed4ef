"""The twins' calls in the interpreters, for the target that was asked for."""

from contextlib import suppress
from dataclasses import replace

import pytest

import torch_attn
from bench import calls, ours
from bench.job import Absent, Subject
from bench.problems import attention_jobs, decode_tensors
from interop.parity.cases import DecodeCase, FlashCase
from interop.parity.check import sample_check
from interop.parity.inputs import make_inputs
from twin_attention.targets import family
from twin_attention.targets.target import requested_target

CASE = FlashCase(
    "ours", batch=1, seq_q=32, seq_kv=48, heads_q=2, heads_kv=1, head_dim=16, causal=True
)
PAGED = DecodeCase("ours", lengths=(5, 33), tokens=2, heads_kv=2, head_dim=16, page_size=8)


def tensors_of(case):
    inputs = make_inputs(case, "cpu")
    return [inputs[name] for name in ("q", "k", "v", "dout")]


def test_every_implementation_for_every_target():
    factories = ours.flash_factories(["sm90", "sm80"])
    names = ("torch gluon", "jax mosaic", "torch triton", "jax triton")
    variants = ("torch gluon deterministic", "jax mosaic deterministic", "torch triton compiled")
    assert list(factories) == [
        Subject(name, t) for name in (*names, *variants) for t in ("sm90", "sm80")
    ]
    native = ours.flash_factories(["sm90"], variants=False)
    assert list(native) == [Subject(name, "sm90") for name in names]
    assert list(ours.decode_factories(["sm80"])) == [
        Subject(name, "sm80") for name in ("jax mosaic", "torch triton", "jax triton")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("implementation", "operation"),
    [
        ("torch triton", "forward"),
        ("torch triton", "backward"),
        ("torch triton", "both"),
        ("torch triton compiled", "both"),
        ("jax triton", "both"),
    ],
)
def test_a_call_of_flash_attention_is_right_every_time(monkeypatch, implementation, operation):
    monkeypatch.setattr(ours, "compiled", lambda f, **kw: calls.compiled(f, backend="eager", **kw))
    tensors = tensors_of(CASE)
    check = attention_jobs([CASE], [operation], lambda case: {})[0].check(tensors)
    call = ours.flash_factories(["sm80"])[implementation, "sm80"](CASE, operation, tensors)
    for _ in range(2):
        assert check(call.result(call.run())) <= 1


def test_a_deterministic_call_asks_for_it_in_the_backward_alone(monkeypatch):
    asked = []

    def attend(*_, deterministic, implementation, **options):
        asked.append((deterministic, implementation))
        raise NotImplementedError

    monkeypatch.setattr(torch_attn, "flash_attention", attend)
    for name in ("torch gluon", "torch gluon deterministic"):
        make = ours.flash_factories(["sm90"])[name, "sm90"]
        with suppress(NotImplementedError):
            make(CASE, "backward", tensors_of(CASE))
    assert asked == [(False, "gluon"), (True, "gluon")]
    with pytest.raises(Absent, match="every forward is deterministic"):
        make(CASE, "forward", tensors_of(CASE))


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        ("torch triton", {}),
        ("torch triton", {"tokens": None}),
        ("jax triton", {"kv_dtype": "int8"}),
    ],
)
def test_a_call_of_paged_decode_is_right_every_time(implementation, options):
    case = replace(PAGED, **options)
    tensors = decode_tensors(case, "cpu")
    call = ours.decode_factories(["sm80"])[implementation, "sm80"](case, tensors)
    for _ in range(2):
        arrays = call.result(call.run())
        assert arrays[0].shape == tensors.q.shape
        assert sample_check(tensors.arguments, case.spec, ("out",))(arrays) <= 1


@pytest.mark.parametrize("operation", ["forward", "backward", "both"])
def test_kernels_are_launched_for_the_target(monkeypatch, operation):
    from torch_attn.kernels.portable import flash_bwd, flash_fwd

    monkeypatch.setattr(family, "_function", family._function.__wrapped__)  # without its cache
    monkeypatch.setattr("twin_attention.targets.target._environment", None)
    seen = []

    def spy(module, name):
        original = getattr(module, name)

        def function(*args):
            seen.append((name, requested_target()))
            return original(*args)

        monkeypatch.setattr(module, name, function)

    spy(flash_fwd, "flash_fwd")
    spy(flash_bwd, "flash_bwd")
    call = ours.flash_factories(["sm80"])["torch triton", "sm80"](CASE, operation, tensors_of(CASE))
    seen.clear()
    call.run()
    expected = {
        "forward": ["flash_fwd"], "backward": ["flash_bwd"], "both": ["flash_fwd", "flash_bwd"],
    }  # fmt: skip
    assert seen == [(name, "sm80") for name in expected[operation]]
    assert requested_target() is None


def test_pallas_is_traced_for_the_target(monkeypatch):
    import pallas_attn

    seen = []
    original = pallas_attn.flash_attention

    def spy(*args, **options):
        seen.append(requested_target())
        return original(*args, **options)

    monkeypatch.setattr(pallas_attn, "flash_attention", spy)
    call = ours.flash_factories(["sm90"])["jax triton", "sm90"](CASE, "forward", tensors_of(CASE))
    call.run()
    assert seen == ["sm90"]
