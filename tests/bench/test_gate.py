"""The gate: what is right passes, what is wrong does not, in however small pieces it is checked."""

from types import SimpleNamespace

import pytest
import torch

from bench import gate
from bench.gate import check_backward, check_both, check_decode, check_forward, chunks, sample
from interop.exchange import to_jax
from interop.parity.cases import DecodeCase, FlashCase
from interop.parity.inputs import make_inputs
from twin_attention.contract.reference import attention_backward, attention_forward, paged_forward

FLASH = {
    "causal": FlashCase("a", 3, 40, 40, 4, 2, 16, causal=True),
    "window": FlashCase("b", 1, 24, 50, 2, 2, 16, window_size=(7, 3)),
    "left": FlashCase("c", 2, 50, 24, 3, 1, 16, head_dim_v=24, window_size=(9, None)),
    "full": FlashCase("d", 1, 33, 33, 6, 6, 16, dtype="float32", softcap=5.0),
}
CHECKS = {"forward": check_forward, "backward": check_backward, "both": check_both}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(gate, "_SCORES", 500)


def flash(case: FlashCase) -> list[torch.Tensor]:
    inputs = make_inputs(case, "cpu")
    return [inputs[name] for name in ("q", "k", "v", "dout")]


def plain(case: FlashCase, tensors: list[torch.Tensor], operation: str) -> list[torch.Tensor]:
    """The results of a run in float32, rounded to the case's dtype."""
    *qkv, dout = tensors
    out, _ = attention_forward(*qkv, case.spec, torch.float32)
    gradients = attention_backward(dout, None, *qkv, case.spec, torch.float32)
    results = {"forward": [out], "backward": [*gradients], "both": [out, *gradients]}[operation]
    return [x.to(tensors[0].dtype) for x in results]


@pytest.mark.parametrize("name", FLASH)
def test_chunks_are_the_whole(name):
    spec = FLASH[name].spec
    found = list(chunks(spec))
    assert len(found) > 2
    rows = [list(part.visible_keys(i)) for _, part in found for i in range(part.seq_q)]
    assert rows == [list(spec.visible_keys(i)) for i in range(spec.seq_q)]
    stretches = [range(spec.seq_q)[stretch] for stretch, _ in found]
    assert [i for stretch in stretches for i in stretch] == list(range(spec.seq_q))


@pytest.mark.parametrize("name", FLASH)
def test_float64_in_chunks_is_float64_at_once(name):
    case = FLASH[name]
    q, k, v, dout = flash(case)
    group = slice(0, case.spec.group_size)
    head = {"q": q[:1, :, group], "k": k[:1, :, :1], "v": v[:1, :, :1], "dout": dout[:1, :, group]}
    names = ("out", "dq", "dk", "dv")
    found = gate.evaluate(head, case.spec, names, torch.float64)
    out, _ = attention_forward(q, k, v, case.spec, torch.float64)
    dq, dk, dv = attention_backward(dout, None, q, k, v, case.spec, torch.float64)
    whole = (out[:1, :, group], dq[:1, :, group], dk[:1, :, :1], dv[:1, :, :1])
    for name, want in zip(names, whole, strict=True):
        torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operation", CHECKS)
@pytest.mark.parametrize("name", FLASH)
def test_flash_attention_passes_and_a_wrong_element_does_not(name, operation):
    case = FLASH[name]
    tensors = flash(case)
    check = CHECKS[operation](case, tensors)
    results = plain(case, tensors, operation)
    assert 0 < check(results) <= 1
    for x in results:
        for spoil in (1.0, float("nan")):
            right = x[-1, -1, -1, -1].clone()
            x[-1, -1, -1, -1] += spoil
            assert not check(results) <= 1
            x[-1, -1, -1, -1] = right


def test_results_of_jax_are_checked_as_well():
    case = FLASH["causal"]
    tensors = flash(case)
    (out,) = plain(case, tensors, "forward")
    check = check_forward(case, tensors)
    assert check([to_jax(out, copy=True)]) == check([out])


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase("e", lengths=(5, 0, 100, 128, 17, 3), max_pages=8),
        DecodeCase("f", lengths=(50,) * 3, tokens=4, window_size=(20, 0), sinks=True),
        DecodeCase("g", lengths=(90,), kv_dtype="int8", scale_shape=(2,), max_pages=50),
    ],
    ids=lambda case: case.name,
)
def test_a_decode_passes_and_a_wrong_element_does_not(case):
    inputs = make_inputs(case, "cpu")
    spec = case.spec
    operands = dict.fromkeys(("sinks", "k_scale", "v_scale")) | inputs
    operands["q"] = inputs["q"].view(spec.batch, spec.tokens, spec.heads_q, spec.head_dim)
    out = paged_forward(**operands, spec=spec, dtype=torch.float32)[0].to(inputs["q"].dtype)
    check = check_decode(case, SimpleNamespace(**inputs))
    shaped = out.view(*inputs["q"].shape[:-1], spec.head_dim_v)
    assert 0 < check([shaped]) <= 1
    shaped[-1, ..., -1, -1] += 1
    assert check([shaped]) > 1


def test_a_sample_has_both_ends():
    assert sample(range(3)) == [0, 1, 2]
    chosen = sample(range(1000))
    assert (chosen[0], chosen[-1], len(set(chosen))) == (0, 999, 4)
    assert chosen == sample(range(1000)) == sorted(chosen)
