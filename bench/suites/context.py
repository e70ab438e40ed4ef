"""Context parallel attention: a rank's time compared with its share of the whole sequence's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bench.calls import PREPARE
from bench.job import Call, Entry, Job, Operation
from bench.ours import for_target
from bench.problems import attention_job, dense_case, offsets_of
from bench.records import Record
from bench.report.tables import number, ratio
from bench.report.training import status
from bench.suites.columns import MEMORY, PASSES, TFLOPS, of_median, own_times, tables_by_pass
from bench.suites.packed import lognormal
from twin_attention.interop.parity import cases
from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.rendering.tables import Grid
from twin_attention.targets.target import use_target

if TYPE_CHECKING:
    from torch import Tensor

    from bench.timing import Run


CHANNELS, HEADS = 2048, 2  # HEADS are checked
OPERATIONS: tuple[Operation, ...] = ("forward", "both")
SIDES = {"torch": "torch_attn", "jax": "pallas_attn"}
SHARES = "A rank's share of the whole sequence's time over this"


@dataclass(frozen=True)
class ContextCase(cases.ContextCase):
    @property
    def whole(self) -> FlashCase | VarlenCase:
        if not self.documents:
            return dense_case(self)
        return VarlenCase(
            self.name, tuple((n, n) for n in self.documents), (0, 0), self.heads_q, self.heads_kv,
            self.head_dim, dtype=self.dtype, causal=self.causal, window_size=self.window_size,
        )  # fmt: skip


def _case(
    ranks: int,
    local: int,
    head_dim: int = 128,
    sharding: str = "zigzag",
    window: int | None = None,
    packed: bool = False,
) -> ContextCase:
    kind = "lognormal" if packed else "causal" if window is None else f"window-{window}"
    tokens, heads = ranks * local, CHANNELS // head_dim
    return ContextCase(
        f"{kind}-d{head_dim}-{ranks}x{local}-{sharding}", 1, tokens, tokens, heads, heads, head_dim,
        causal=True, window_size=None if window is None else (window, None), ranks=ranks,
        sharding=sharding, documents=tuple(lognormal(tokens)) if packed else (),
    )  # fmt: skip


def context_cases() -> Iterator[ContextCase]:
    """Yield the cases by value, because a run may be cut off."""
    for ranks in (4, 8, 2):
        yield _case(ranks, 8192)
    for ranks in (4, 8, 2):
        yield _case(ranks, 8192, sharding="balanced", packed=True)
        yield _case(ranks, 65536 // ranks, window=4096)
        yield _case(ranks, 8192, head_dim=64)
    yield _case(2, 32768)
    yield _case(2, 32768, head_dim=64)


def jobs(targets: Sequence[str]) -> list[Job]:
    return [
        job(case, operation, targets[0]) for case in context_cases() for operation in OPERATIONS
    ]


def job(case: ContextCase, operation: Operation, target: str) -> Job:
    made = attention_job(case.whole, operation, {}, HEADS)
    factories: dict[Entry, Callable[..., Call]] = {}
    for side in SIDES:
        for name, implementation in (("dense", None), ("triton dense", "triton")):
            factory = partial(_dense, side, implementation, target, case, operation)
            factories[Entry(f"{side} {name}", target)] = factory
    for name, (module, options) in RANKS.items():
        factory = partial(_ranks, module, options, target, case, operation)
        factories[Entry(name, target)] = factory
    return replace(
        made, case=asdict(case), flops=made.flops // case.ranks, bytes=0, factories=factories,
        time=partial(_time, case.ranks),
    )  # fmt: skip


# Modules of `bench.ranks`, which import torch, and options of their `make_call`.
RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch rank": ("in_turn", {}),
    "torch rank gather": ("in_turn", {"exchange": "gather"}),
    "torch rank host keys": ("in_turn", {"from_host": True}),
    "torch ring": ("together", {}),
    "torch gather": ("together", {"exchange": "gather"}),
    "jax ring": ("devices", {}),
    "jax gather": ("devices", {"exchange": "gather"}),
}


def _ranks(module: str, options: dict[str, Any], *arguments: Any) -> Call:
    return import_module(f"bench.ranks.{module}").make_call(*arguments, **options)


def _time(size: int, calls: dict[Entry, Run]) -> Any:
    from bench.ranks.together import time_ranks

    return time_ranks(size, calls)


def _dense(
    side: str,
    implementation: str | None,
    target: str,
    case: ContextCase,
    operation: str,
    tensors: list[Tensor],
) -> Call:
    if side == "jax":
        from bench.ranks.devices import need_devices

        need_devices(case.ranks)
    whole, api = case.whole, import_module(SIDES[side])
    *qkv, dout = tensors
    options = whole.options | {"implementation": implementation}
    attend, offsets = partial(api.flash_attention, **options), []
    if isinstance(whole, VarlenCase):
        attend = partial(api.flash_attention_varlen, **options)
        offsets = [offsets_of(whole, dout.device)] * 2
    with use_target(target):
        call = PREPARE[SIDES[side]](attend, operation, [*qkv, *offsets, dout])
    return for_target(call, target)


COLUMNS = {
    "ranks": "ranks",
    "tokens of a rank": lambda record: record.case["seq_q"] // record.case["ranks"],
    "layout": "sharding", "documents": lambda record: len(record.case["documents"]) or None,
    "window": lambda record: (record.case["window_size"] or [None])[0], "D": "head_dim",
    "ms": of_median("times"), "TFLOP/s": TFLOPS, "memory, MB": MEMORY, "status": status,
}  # fmt: skip


def tables(records: Sequence[Record]) -> dict[str, Grid]:
    return {SHARES: _shares(records)} | tables_by_pass(records, COLUMNS)


def _shares(records: Sequence[Record]) -> Grid:
    rows = [["case", "pass", "implementation", "ms", "dense / this", "triton dense / this"]]
    for operation, by_name, case, record in own_times(records):
        if record.implementation in RANKS and record.times:
            wholes = (
                f"{record.framework} {name} {record.target}" for name in ("dense", "triton dense")
            )
            found = (ratio(by_name[case], record.label, whole) for whole in wholes)
            texts = ("" if x is None else f"{x:.2f}" for x in found)
            milliseconds = number(record.times.median)
            name = PASSES[operation].lower()
            rows.append([case, name, record.label, milliseconds, *texts])
    return rows
