"""Flash attention over lengths and head dimensions, and on shapes of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from bench import ours
from bench.job import Entry, Job
from bench.peers import FLASH, PACKED, WIDE
from bench.problems import Factories, absent, attention_jobs
from bench.records import Record
from bench.registry import Column
from bench.suites.columns import HOST, OPERATION, TFLOPS, yes_no
from twin_attention.interop.parity.cases import FlashCase, VarlenCase

TOKENS, CHANNELS = 16384, 2048
LENGTHS, HEAD_DIMS = (512, 4096, 16384), (64, 128, 256)
# Batch, length, query heads, kv heads and head dimension.
MORE = (
    (2, 8192, 16, 16, 128), (8, 2048, 32, 8, 128), (4, 3000, 16, 4, 128), (1, 12288, 16, 16, 128),
    (4, 4096, 32, 32, 128), (2, 6144, 8, 8, 256), (16, 1024, 16, 16, 96),
    (4, 4096, 6, 6, 320), (4, 4096, 4, 4, 512), (2, 8192, 4, 4, 512), (1, 16384, 4, 4, 512),
)  # fmt: skip
DOCUMENTS = (1531, 6145, 377, 2567, 8191, 1013, 1797, 647, 4099, 2041, 1291, 3069)
MORE_PEERS = ("FA2", "FA3", "FA4", "jax FA3", "cuDNN", "tokamax Mosaic")
PACKED_PEERS = ("FA2 varlen", "FA3 varlen", "FA4 varlen", "jax FA3 varlen", "cuDNN padded")


def _of_shape(dense: str, packed: Callable[[Sequence[Sequence[int]]], int]) -> Column:
    def cell(record: Record) -> int:
        lengths = record.case.get("lengths")
        return record.case[dense] if lengths is None else packed(lengths)

    return cell


COLUMNS = {
    "B": _of_shape("batch", len), "S": _of_shape("seq_q", lambda x: sum(n for n, _ in x)),
    "H": "heads_q", "Hkv": "heads_kv", "D": "head_dim", "causal": yes_no("causal"),
    "pass": OPERATION, "TFLOP/s": TFLOPS, "host, us": HOST,
}  # fmt: skip
# Each shape compiles anew, and the whole suite should take minutes.
AT_LENGTH, AT_HEAD_DIM = 4096, 128
ONE_LENGTH = ("eager", "jax.nn cuDNN")
ONE_TARGET = ("jax triton", "jax gluon")  # the other one at `AT_LENGTH` alone
ONE_SHAPE = (
    "torch triton compiled", "jax torch_triton", "FlexAttention", "jax.nn XLA", "jax Pallas mha",
    "tokamax Triton",
)  # fmt: skip


def jobs(targets: Sequence[str]) -> list[Job]:
    factories = partial(_factories, targets)
    return attention_jobs([*cases(), *more_cases()], ("forward", "backward"), factories)


def cases() -> list[FlashCase]:
    found = []
    for head_dim, length, causal in product(HEAD_DIMS, LENGTHS, (False, True)):
        batch, heads = TOKENS // length, CHANNELS // head_dim
        name = f"{batch}x{length}x{heads}x{head_dim}" + ("-causal" if causal else "")
        found.append(FlashCase(name, batch, length, length, heads, heads, head_dim, causal=causal))
    return found


def more_cases() -> list[FlashCase | VarlenCase]:
    found: list[FlashCase | VarlenCase] = []
    for batch, length, heads, heads_kv, head_dim in MORE:
        kv = "" if heads_kv == heads else f"-kv{heads_kv}"
        name = f"{batch}x{length}x{heads}{kv}x{head_dim}-causal"
        case = FlashCase(name, batch, length, length, heads, heads_kv, head_dim, causal=True)
        found.append(case)
    found.append(replace(found[-1], name=f"{found[-1].name}-window", window_size=(1023, None)))
    lengths = tuple((n, n) for n in DOCUMENTS)
    name = f"{len(lengths)}-documents-{sum(DOCUMENTS)}x16x128-causal"
    return [*found, VarlenCase(name, lengths, (0, 0), 16, 16, 128)]


def _factories(targets: Sequence[str], case: FlashCase | VarlenCase) -> Factories:
    if isinstance(case, VarlenCase):
        peers = {Entry(name): PACKED[name] for name in PACKED_PEERS}
        return ours.packed_factories(targets[:1]) | peers
    if case in more_cases():
        factories = ours.flash_factories(targets[:1])
        peers = {Entry(name): FLASH[name] for name in MORE_PEERS}
        if case.head_dim > 256:
            peers = {Entry(name): factory for name, factory in WIDE.items()}
        return {x: make for x, make in factories.items() if x[0] not in ONE_SHAPE} | peers
    peers = {Entry(name): factory for name, factory in FLASH.items()}
    factories = ours.flash_factories(targets) | peers
    for name, target in factories:
        if reason := _left_out(name, target not in (None, targets[0]), case):
            factories[Entry(name, target)] = partial(absent, reason)
    return factories


def _left_out(name: str, is_second_target: bool, case: FlashCase) -> str | None:
    if name in ONE_SHAPE and (case.seq_kv, case.head_dim) != (AT_LENGTH, AT_HEAD_DIM):
        return f"timed at {AT_LENGTH} keys and head dimension {AT_HEAD_DIM} only"
    one_length = name in ONE_LENGTH or (name in ONE_TARGET and is_second_target)
    if one_length and case.seq_kv != AT_LENGTH:
        return f"timed at {AT_LENGTH} keys only"
    return None
