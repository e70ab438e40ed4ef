"""One implementation on one case, and which implementations run."""

import pytest
import torch

import torch_attn
from interop.parity.cases import DecodeCase, FlashCase, decode_cases
from interop.parity.inputs import make_inputs
from interop.parity.run import Runner, plan, run, share, twins
from twin_attention.targets.target import requested_target

CASE = FlashCase("run", seq_q=5, seq_kv=7, heads_q=2, heads_kv=1, head_dim=16, causal=True)


def test_each_target_is_a_group_and_the_reference_runs_once():
    groups = plan(("triton", "reference"), ("sm90", "sm80"))
    assert [[runner.label for runner in group] for group in groups] == [
        [
            "torch_attn triton sm90",
            "pallas_attn triton sm90",
            "torch_attn reference",
            "pallas_attn reference",
        ],
        ["torch_attn triton sm80", "pallas_attn triton sm80"],
    ]


def test_twins_are_all_pairs_across_the_packages():
    (group,) = plan(("triton", "reference"), (None,))
    pairs = {(a.label, b.label) for a, b in twins(group)}
    assert pairs == {
        (f"torch_attn {a}", f"pallas_attn {b}")
        for a in ("triton", "reference")
        for b in ("triton", "reference")
    }


@pytest.mark.parametrize("package", ["torch_attn", "pallas_attn"])
def test_results_are_torch_tensors_shaped_as_promised(package, torch_device):
    inputs = make_inputs(CASE, torch_device)
    done = run(Runner(package, "reference"), CASE, inputs)
    like = {"out": "dout", "lse": "dlse", "dq": "q", "dk": "k", "dv": "v"}
    assert list(done.results) == list(like)
    for name, x in done.results.items():
        want = inputs[like[name]]
        assert (x.shape, x.dtype, x.device) == (want.shape, want.dtype, want.device)
    assert done.explanation.implementation == "reference"
    assert done.seconds > 0


@pytest.mark.parametrize("package", ["torch_attn", "pallas_attn"])
@pytest.mark.parametrize(
    ("tokens", "out", "lse"), [(None, (2, 4, 72), (2, 4)), (3, (2, 3, 4, 72), (2, 4, 3))]
)
def test_results_of_a_decode(package, tokens, out, lse, torch_device):
    case = DecodeCase("decode", lengths=(20, 0), tokens=tokens, head_dim_v=72)
    done = run(Runner(package, "reference"), case, make_inputs(case, torch_device))
    got = {name: (tuple(x.shape), x.dtype) for name, x in done.results.items()}
    assert got == {"out": (out, torch.bfloat16), "lse": (lse, torch.float32)}
    assert done.explanation.implementation == "reference"


@pytest.mark.parametrize("name", ["decode-bf16", "decode-int8", "decode-fp8"])
def test_jax_gets_the_memory_of_the_pool(name, torch_device):
    (case,) = decode_cases("quick", name)
    inputs = make_inputs(case, torch_device)
    arrays = share(inputs)
    assert arrays.keys() == inputs.keys()
    for argument, x in inputs.items():
        assert arrays[argument].unsafe_buffer_pointer() == x.data_ptr(), argument


def test_the_runner_sets_the_target(monkeypatch, torch_device):
    seen = []
    real = torch_attn.flash_attention

    def attend(*args, **kwargs):
        seen.append(requested_target())
        return real(*args, **kwargs)

    monkeypatch.setattr(torch_attn, "flash_attention", attend)
    run(Runner("torch_attn", "reference", "sm80"), CASE, make_inputs(CASE, torch_device))
    assert seen == ["sm80"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, lse: (out[:, :1], lse),
        lambda out, lse: (out.float(), lse),
        lambda out, lse: (out, lse.to(torch.bfloat16)),
    ],
)
def test_a_wrong_shape_or_dtype_is_an_error(spoil, monkeypatch, torch_device):
    real = torch_attn.flash_attention
    monkeypatch.setattr(
        torch_attn, "flash_attention", lambda *args, **kwargs: spoil(*real(*args, **kwargs))
    )
    case = FlashCase("run", seq_q=5, seq_kv=7, head_dim=16, gradients=False)
    with pytest.raises(ValueError, match=r"run: (out|lse): expected"):
        run(Runner("torch_attn", "reference"), case, make_inputs(case, torch_device))
