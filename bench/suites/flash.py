"""Flash attention over lengths and head dimensions, 16384 tokens of 2048 channels each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from bench import ours
from bench.job import Job, Subject
from bench.peers import FLASH
from bench.problems import Factories, absent, attention_jobs
from bench.suites.columns import HOST, OPERATION, TFLOPS, yes_no
from interop.parity.cases import FlashCase

TITLE = "Flash attention"
NOTE = (
    "bfloat16; batch and heads follow from 16384 tokens and 2048 channels. FLOPs are those of the "
    "pairs that the mask keeps, 2.5 times as many backward. A backward is timed by itself, on a "
    "graph that is made beforehand; torch gets tensors in its own layout, without a copy. "
    "FA2 and cuDNN run through torch's scaled_dot_product_attention. FA2 is SM80 code, and the bar "
    "for our SM80 code; FA3, FA4 and cuDNN are the bar for Hopper code. Peers run as they come, "
    "not tuned for the shape. Those that take long to compile are timed where the message beside "
    "them says."
)

TOKENS, CHANNELS = 16384, 2048
LENGTHS, HEAD_DIMS = (512, 4096, 16384), (64, 128, 256)
COLUMNS = {
    "B": "batch", "S": "seq_q", "H": "heads_q", "D": "head_dim", "causal": yes_no("causal"),
    "pass": OPERATION, "TFLOP/s": TFLOPS, "host, us": HOST,
}  # fmt: skip
# Every shape is compiled anew, in seconds: the whole suite is to take minutes.
AT_LENGTH, AT_HEAD_DIM = 4096, 128
ONE_LENGTH = ("eager", "jax.nn cuDNN")
ONE_SHAPE = (
    "torch triton compiled", "FlexAttention", "jax.nn XLA", "jax Pallas mha", "tokamax Triton",
)  # fmt: skip


def jobs(targets: Sequence[str]) -> list[Job]:
    """Return forward and backward of every case."""
    return attention_jobs(cases(), ("forward", "backward"), partial(_factories, targets))


def cases() -> list[FlashCase]:
    """Return every length and head dimension, without and with a causal mask."""
    found = []
    for head_dim, length, causal in product(HEAD_DIMS, LENGTHS, (False, True)):
        batch, heads = TOKENS // length, CHANNELS // head_dim
        name = f"{batch}x{length}x{heads}x{head_dim}" + ("-causal" if causal else "")
        found.append(FlashCase(name, batch, length, length, heads, heads, head_dim, causal=causal))
    return found


def _factories(targets: Sequence[str], case: FlashCase) -> Factories:
    peers = {Subject(name): factory for name, factory in FLASH.items()}
    factories = ours.flash_factories(targets) | peers
    for name, target in factories:
        if reason := _left_out(name, target not in (None, targets[0]), case):
            factories[Subject(name, target)] = partial(absent, reason)
    return factories


def _left_out(name: str, is_second_target: bool, case: FlashCase) -> str | None:
    """Return why an implementation is not timed on a case, None if it is."""
    if name in ONE_SHAPE and (case.seq_kv, case.head_dim) != (AT_LENGTH, AT_HEAD_DIM):
        return f"timed at {AT_LENGTH} keys and head dimension {AT_HEAD_DIM} only"
    one_length = name in ONE_LENGTH or (name == "jax triton" and is_second_target)
    if one_length and case.seq_kv != AT_LENGTH:
        return f"timed at {AT_LENGTH} keys only"
    return None
