"""What `python -m bench flash` would time, and what it says without a GPU."""

import pytest

from bench import __main__ as command
from bench.flash import jobs
from interop.parity import environment


@pytest.mark.parametrize(
    ("device", "arguments", "message"),
    [
        ("cpu", [], "expected a CUDA GPU that torch and JAX both see, found none"),
        ("cuda", ["--resume"], "--resume: expected --json FILE beside it, got none"),
    ],
)
def test_what_it_cannot_do_it_refuses(monkeypatch, capsys, device, arguments, message):
    monkeypatch.setattr(environment, "choose_device", lambda: device)
    with pytest.raises(SystemExit) as exit:
        command.main(["flash", *arguments])
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith(f"python -m bench flash: error: {message}\n")


def test_forward_and_backward_of_every_case_and_implementation():
    found = jobs(["sm90", "sm80"])
    assert len({job.case["name"] for job in found}) == 6
    assert [job.operation for job in found] == ["forward", "backward"] * 6
    labels = ["Triton sm90", "Triton sm80", "Pallas sm90", "Pallas sm80", "FA2", "cuDNN"]
    for job in found:
        assert [" ".join(filter(None, subject)) for subject in job.makers] == labels


def test_the_cost_is_of_the_operation():
    forward, backward = jobs(["sm80"], "large-d128-causal")
    pairs = 4 * 16 * 4096 * 4097 // 2
    assert (forward.flops, backward.flops) == (4 * 128 * pairs, 10 * 128 * pairs)
    tensor = 4 * 4096 * 16 * 128 * 2
    lse = 4 * 4 * 16 * 4096
    assert (forward.bytes, backward.bytes) == (4 * tensor + lse, 8 * tensor + lse)
