"""Jobs of flash attention: its cost, and its calls through its gate."""

import pytest

from bench.job import Subject
from bench.peers import FLASH
from bench.suites.flash_jobs import flash_jobs, flash_tensors
from interop.parity.cases import FlashCase

CASE = FlashCase("case", batch=1, seq_q=40, seq_kv=72, head_dim=16, causal=True)
EAGER = Subject("eager")


def job(operation):
    (made,) = flash_jobs([CASE], (operation,), lambda case: {EAGER: FLASH["eager"]})
    return made


def test_the_cost_is_of_the_operation():
    forward, backward, both = map(job, ("forward", "backward", "both"))
    pairs = 2 * (40 * 32 + 40 * 41 // 2)  # query i sees i + 33 keys
    assert (forward.flops, backward.flops) == (4 * 16 * pairs, 10 * 16 * pairs)
    q, k, lse = 40 * 2 * 16 * 2, 72 * 2 * 16 * 2, 4 * 2 * 40
    assert (forward.bytes, backward.bytes) == (2 * q + 2 * k + lse, 4 * q + 4 * k + lse)
    assert both.flops == forward.flops + backward.flops
    assert both.bytes == forward.bytes + backward.bytes


@pytest.mark.parametrize("operation", ["forward", "backward", "both"])
def test_the_gate_takes_what_the_call_gives(operation):
    made, tensors = job(operation), flash_tensors(CASE, "cpu")
    call, check = made.factories[EAGER](tensors), made.check(tensors)
    arrays = call.result(call.run())
    assert check(arrays) < 1
    assert check([x + 1 for x in arrays]) > 1
