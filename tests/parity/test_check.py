from dataclasses import replace

import pytest
import torch

from twin_attention.interop.exchange import to_jax
from twin_attention.interop.parity import harness, oracle
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, PagedCase
from twin_attention.interop.parity.check import agreements, check_layout, compare, sample_check
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import evaluate, expectations, parts_of
from twin_attention.interop.parity.sides import Ours

CASE = FlashCase(
    "samples", batch=1, seq_q=128, seq_kv=128, head_dim=16, dtype="float32", window_size=(4, 0)
)
TORCH, PALLAS = Ours("torch_attn", "triton"), Ours("pallas_attn", "triton")


def ratios(token: int, value: float, device: str) -> dict[tuple[str, str], float]:
    inputs = make_inputs(CASE, device)
    right = evaluate(inputs, CASE.spec, torch.float64)
    results = {subject: {n: x.float() for n, x in right.items()} for subject in (TORCH, PALLAS)}
    results[TORCH]["out"][0, token] += value
    found = compare(results, expectations(inputs, parts_of(CASE.spec)), CASE, inputs)
    assert len(found) == 15
    return {(c.title, c.output): c.agreement.ratio for c in found}


@pytest.fixture
def samples(monkeypatch):
    monkeypatch.setattr(oracle, "SAMPLE_ABOVE", 0)
    monkeypatch.setattr(oracle, "STRETCH", 32)


@pytest.mark.usefixtures("samples")
@pytest.mark.parametrize("token", [0, 127])
def test_the_worst_sample_counts(token, torch_device):
    got = ratios(token, 1.0, torch_device)
    wrong = {("torch_attn triton", "out"), ("twins triton", "out")}
    assert {lane for lane, ratio in got.items() if ratio > 1} == wrong


@pytest.mark.usefixtures("samples")
def test_a_nan_between_the_samples_fails(torch_device):
    got = ratios(64, float("nan"), torch_device)
    assert {lane for lane, ratio in got.items() if ratio > 1} == {("torch_attn triton", "out")}


FLASH = {
    "causal": FlashCase("a", 3, 40, 40, 4, 2, 16, causal=True),
    "window": FlashCase("b", 1, 24, 50, 2, 2, 16, window_size=(7, 3)),
    "left": FlashCase("c", 2, 50, 24, 3, 1, 16, head_dim_v=24, window_size=(9, None)),
    "full": FlashCase("d", 1, 33, 33, 6, 6, 16, dtype="float32", softcap=5.0),
}
DECODE = [
    DecodeCase("e", lengths=(5, 0, 100, 128, 17, 3), max_pages=8),
    DecodeCase("f", lengths=(50,) * 3, tokens=4, window_size=(20, 0), sinks=True),
    DecodeCase("g", lengths=(90,), kv_dtype="int8", scale_shape=(2,), max_pages=50),
]
GRADIENTS = ("dq", "dk", "dv")


def plain(case, inputs, names):
    found = evaluate(inputs, case.spec, torch.float32)
    return [found[name].to(inputs["q"].dtype) for name in names]


@pytest.mark.parametrize("names", [("out",), ("out", *GRADIENTS)])
@pytest.mark.parametrize("name", FLASH)
def test_a_wrong_element_of_a_sampled_head_is_found(monkeypatch, name, names, torch_device):
    monkeypatch.setattr(oracle, "SCORES", 500)
    case = FLASH[name]
    inputs = make_inputs(case, torch_device)
    del inputs["dlse"]
    check = sample_check(inputs, case.spec, names)
    results = plain(case, inputs, names)
    assert 0 < check(results) <= 1
    for x in results:
        for spoil in (1.0, float("nan")):
            right = x[-1, -1, -1, -1].clone()
            x[-1, -1, -1, -1] += spoil
            assert not check(results) <= 1
            x[-1, -1, -1, -1] = right


def test_results_of_jax_are_checked_as_well(torch_device):
    case = FLASH["causal"]
    inputs = make_inputs(case, torch_device)
    (out,) = plain(case, inputs, ("out",))
    check = sample_check(inputs, case.spec, ("out",))
    assert check([to_jax(out, copy=True)]) == check([out])


PAGED = PagedCase(
    "paged", (5, 40, 33), new_tokens=(5, 20, 0), heads_q=12, heads_kv=6, kv_dtype="int8",
    padding=2, sinks=True,
)  # fmt: skip


@pytest.mark.parametrize("scale_shape", [(), (6,)])
def test_a_wrong_element_of_a_sampled_head_of_pages_is_found(scale_shape, torch_device):
    case = replace(PAGED, scale_shape=scale_shape)
    inputs = make_inputs(case, torch_device)
    check = sample_check(inputs, case.spec, ("out", "lse"))
    out, lse = plain(case, inputs, ("out", "lse"))
    lse = evaluate(inputs, case.spec, torch.float32)["lse"]
    assert 0 < check([out, lse]) <= 1
    for x, last in ((out, (-1, -1, -1)), (lse, (-1, -1))):  # of the last head
        x[last] += 1
        assert check([out, lse]) > 1
        x[last] -= 1


@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.name)
def test_a_wrong_element_of_a_sampled_sequence_is_found(case, torch_device):
    inputs = make_inputs(case, torch_device)
    (out,) = plain(case, inputs, ("out",))
    check = sample_check(inputs, case.spec, ("out",))
    assert 0 < check([out]) <= 1
    out[-1, ..., -1, -1] += 1
    assert check([out]) > 1


def _one_row(x):
    x[0, 300] += 0.26 * x.square().mean().sqrt()


# Together, all numbers of a tensor would hide this.
HIDDEN = {
    "a row of out": ("out", _one_row),
    "a row of dq": ("dq", _one_row),
    "a row of dk": ("dk", _one_row),
    "a row of dv": ("dv", _one_row),
    "a table between its ends": ("drelative_bias", lambda x: x[:, 1:-1].mul_(1.3)),
    "a number of a table": ("drelative_bias", lambda x: x[:, 7].mul_(2)),
    "sinks": ("dsinks", lambda x: x.mul_(1.1)),
    "some of a bias": ("dbias", lambda x: x[..., 40:45].mul_(1.3)),
}


@pytest.fixture(scope="module")
def expected_and_right():
    """A problem in bfloat16, and a run in float32, rounded."""
    case = FlashCase("hidden", 1, 400, 400, 1, 1, 32, sinks=True, relative=20, bias="k")
    inputs = make_inputs(case, "cpu")
    (expected,) = expectations(inputs, parts_of(case.spec))
    right = evaluate(inputs, case.spec, torch.float32)
    return expected, right | {x: right[x].bfloat16().float() for x in ("out", "dq", "dk", "dv")}


@pytest.mark.parametrize(("name", "spoil"), HIDDEN.values(), ids=HIDDEN)
def test_a_small_part_that_is_wrong_is_found(expected_and_right, name, spoil):
    expected, right = expected_and_right
    got = right[name].clone()
    assert agreements({name: got}, expected)[name].ratio < 0.5
    spoil(got)
    assert not agreements({name: got}, expected)[name].ok


def test_a_row_of_hidden_keys_does_not_loosen_the_others():
    """Its log-sum-exp is -1e9, and another row's counts to the last digits."""
    case = FlashCase("hidden row", 1, 40, 40, 1, 1, 32, bias="qk", dtype="float32")
    inputs = make_inputs(case, "cpu")
    inputs["bias"][..., 3, :] = -1e9
    (expected,) = expectations(inputs, parts_of(case.spec))
    got = evaluate(inputs, case.spec, torch.float32)["lse"]
    assert got[..., 3] < -9e8
    assert agreements({"lse": got}, expected)["lse"].ok
    got[..., 5] += 1e-3
    assert not agreements({"lse": got}, expected)["lse"].ok


def test_a_window_that_is_a_key_too_narrow_is_found():
    """Each row has more than a thousand keys."""
    case = FlashCase("narrow", 1, 1300, 1300, 1, 1, 16, window_size=(1023, 0))
    inputs = make_inputs(case, "cpu")
    (expected,) = expectations(inputs, parts_of(case.spec))
    for left, is_ok in ((1023, True), (1022, False)):
        got = evaluate(inputs, replace(case, window_size=(left, 0)).spec, torch.float32)
        for name in ("out", "dq", "dk", "dv"):
            found = agreements({name: got[name].bfloat16()}, expected)[name]
            assert found.ok == is_ok, (name, found)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("out", lambda out: out[:, :1]),
        ("out", lambda out: out.float()),
        ("lse", lambda lse: lse.to(torch.bfloat16)),
        ("dk", lambda dk: dk.mT),
    ],
)
def test_a_wrong_shape_or_dtype_is_an_error(name, spoil, torch_device):
    case = replace(FLASH["causal"], dtype="float16")
    inputs = make_inputs(case, torch_device)
    dtypes = {"lse": torch.float32}
    results = evaluate(inputs, case.spec, torch.float64)
    results = {n: x.to(dtypes.get(n, torch.float16)) for n, x in results.items()}
    check_layout(results, inputs, case.spec, case.name)
    with pytest.raises(ValueError, match=rf"^a: {name}: expected \("):
        check_layout(results | {name: spoil(results[name])}, inputs, case.spec, case.name)


def test_a_case_with_a_wrong_shape_is_an_error(fake_twins):
    def spoil(subject, case, results):
        if subject == TORCH:
            results["lse"] = results["lse"].mT

    fake_twins(spoil)
    result = harness.run_case(FLASH["window"], [[TORCH, PALLAS]], "cpu")
    (error,) = result.errors
    assert error.startswith("torch_attn triton: ValueError: b: lse: expected (1, 2, 24) ")
    assert {c.subject for c in result.comparisons} == {PALLAS.label}
