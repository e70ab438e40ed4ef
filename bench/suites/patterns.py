"""Attention to a part of the pairs: by block masks, and dilated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from bench.calls import PREPARE
from bench.dilation import jax_standard, torch_standard
from bench.job import Call, Entry, Job, Operation
from bench.ours import for_target
from bench.peers import SPARSE
from bench.problems import (
    Factory,
    SparseCase,
    absent,
    attention_check,
    attention_job,
    checked,
    dense_case,
)
from bench.records import Record
from bench.report.tables import by_case, by_operation, groups, ratio_text, status
from bench.suites.columns import MEMORY, PASSES, TFLOPS, of_median, tables_by_pass
from twin_attention.interop.parity.cases import DilatedCase, FlashCase
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.rendering.tables import Grid
from twin_attention.targets.target import use_target

if TYPE_CHECKING:
    from torch import Tensor

C = TypeVar("C", bound=FlashCase)
PatternCase = SparseCase | DilatedCase
Attend = Callable[..., Any]


TILE, KEPT = 128, 0.1  # share of the tiles of a random mask
DILATIONS = {2048: 1, 4096: 2, 8192: 4, 16384: 8, 32768: 16}  # LongNet's rates of segments
SHORT_DILATIONS = {128: 1, 256: 2, 512: 4}
LENGTHS, SHORTER = (32768, 65536, 131072), (4096, 16384)  # of bfloat16
FLOAT_SHAPES = ((1, 512, 8), (2, 1024, 16))  # batch, length and heads
HEADS = 2  # whose rows are checked
# Where an implementation is timed, if not everywhere: it compiles for every shape, or takes over a
# second. All of it is to take minutes.
AT_LENGTHS: Mapping[str, tuple[int, ...]] = {
    "torch dense": (1024, 16384, 32768, 65536),
    "torch module": (1024, 32768),
    "jax block-sparse": (1024, 32768),
    "jax dense": (32768,),
    "jax dilated": (1024, 65536, 131072),
    "jax standard": (1024, 65536),
    "jax module": (1024,),
    "FlexAttention": (1024, 32768),
    "jax.nn XLA": (1024, 4096),
}
OPERATIONS: tuple[Operation, ...] = ("forward", "both")

SIDES = {"torch": "torch_attn", "jax": "pallas_attn"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")

GAINS = "Speed-ups by patterns: the others' time over this"
DOUBLINGS = "The time of twice the tokens over this one"
_OWN = ("dense", "standard")  # of the same framework
_APART = (*_OWN, "module")  # whose speed-ups are not shown


def jobs(targets: Sequence[str]) -> list[Job]:
    return [job(case, operation, targets[0]) for case in cases() for operation in OPERATIONS]


def cases() -> Iterator[PatternCase]:
    for shape in _shapes():
        rates = DILATIONS if shape.dtype == "bfloat16" else SHORT_DILATIONS
        lengths = tuple(length for length in rates if length <= shape.seq_q)
        dilated = partial(_of_shape, DilatedCase, shape, segment_lengths=lengths)
        yield dilated("dilated", dilation_rates=tuple(rates[length] for length in lengths))
        if rates is SHORT_DILATIONS:
            yield dilated("undilated", dilation_rates=(1,) * len(lengths))
        for pattern in ("random", "local"):
            yield _of_shape(
                SparseCase, shape, pattern, tile_q=TILE, tile_kv=TILE, kept=KEPT, pattern=pattern,
                causal=pattern == "local",
            )  # fmt: skip


def _shapes() -> Iterator[FlashCase]:
    """Yield the shapes in order of worth, as a run may be cut off."""
    yield from map(_of_length, LENGTHS)
    for b, n, h in FLOAT_SHAPES:
        yield FlashCase(f"fp32-{b}x{n}x{h}", b, n, n, h, h, 64, dtype="float32")
    yield from map(_of_length, SHORTER)


def _of_length(n: int) -> FlashCase:
    return FlashCase(f"bf16-1x{n}x16", 1, n, n, 16, 16, 128)


def _of_shape(kind: type[C], shape: FlashCase, prefix: str, **of_pattern: Any) -> C:
    fields_of: dict[str, Any] = vars(shape) | {"name": f"{prefix}-{shape.name}"} | of_pattern
    return kind(**fields_of)


def _tokens_per_second(record: Record) -> float | None:
    tokens = record.case["batch"] * record.case["seq_q"]
    return 1e3 * tokens / record.times.median if record.times else None


COLUMNS = {
    "pattern": lambda record: record.case["name"].partition("-")[0],
    "dtype": "dtype", "batch": "batch", "length": "seq_q", "heads": "heads_q",
    "ms": of_median("times"), "memory, MB": MEMORY, "tokens/s": _tokens_per_second,
    "TFLOP/s": TFLOPS, "status": status,
}  # fmt: skip


def tables(records: Sequence[Record]) -> dict[str, Grid]:
    return {GAINS: _gains(records), DOUBLINGS: _doublings(records)} | tables_by_pass(
        records, COLUMNS
    )


def _gains(records: Sequence[Record]) -> Grid:
    ours = [r for r in records if r.times and not r.is_peer and _kind(r) not in _APART]
    peers = list(dict.fromkeys(r.label for r in records if r.is_peer))
    grid = [["case", "pass", "implementation", *(f"{x} / this" for x in (*_OWN, *peers))]]
    rows_of = {operation: by_case(group) for operation, group in by_operation(records).items()}
    for record in ours:
        row = rows_of[record.operation][record.case["name"]]
        own = {_kind(r): r.label for r in row.values() if r.framework == record.framework}
        others = [own.get(kind) for kind in _OWN] + peers
        name = PASSES[record.operation].lower()
        found = [ratio_text(row, record.label, other) for other in others]
        grid.append([record.case["name"], name, record.label, *found])
    return grid


def _doublings(records: Sequence[Record]) -> Grid:
    grid = [["pattern", "pass", "implementation", "tokens", "twice / this"]]
    single = (r for r in records if r.times and r.case["batch"] == 1 and not r.is_yardstick)
    series = groups(single, lambda r: (r.case["name"].partition("-")[0], r.operation, r.label))
    for (pattern, operation, label), group in series.items():
        times = {(r.case["dtype"], r.case["seq_q"]): r.times.median for r in group if r.times}
        for (dtype, length), own in sorted(times.items()):
            if twice := times.get((dtype, 2 * length)):
                name = PASSES[operation].lower()
                grid.append([pattern, name, label, str(length), f"{twice / own:.2f}"])
    return grid


def _kind(record: Record) -> str:
    return record.implementation.split(" ", 1)[1]


def job(case: PatternCase, operation: Operation, target: str) -> Job:
    peers = {}
    if isinstance(case, SparseCase):
        kinds = ("block-sparse", "dense", *(["module"] if case.pattern == "random" else []))
        peers = {Entry(name): factory for name, factory in SPARSE.items()}
    else:
        kinds = ("dilated", "standard", *(["module"] if set(case.dilation_rates) != {1} else []))
    keys = product(kinds, SIDES)
    ours = {Entry(f"{x} {kind}", target): partial(_call, kind, x, target) for kind, x in keys}
    factories: dict[Entry, Factory] = ours | peers
    for subject in factories:
        lengths = AT_LENGTHS.get(subject.implementation)
        if lengths is not None and case.seq_q not in lengths:
            at = ", ".join(map(str, lengths))
            factories[subject] = partial(absent, f"timed at {at} tokens only")
    return attention_job(case, operation, factories, HEADS)


def _call(
    kind: str, side: str, target: str, case: Any, operation: str, tensors: list[Tensor]
) -> Call:
    import torch

    *qkv, dout = tensors
    if kind == "module":
        return _module_call(side, target, case, operation, tensors)
    # Arguments: JAX would compile constants in, for each mask anew.
    lists = case.mask if kind == "block-sparse" else ()
    operands = [*qkv, *(torch.tensor(x, device=dout.device) for x in lists), dout]
    with use_target(target):
        call = for_target(
            PREPARE[SIDES[side]](_attend(kind, side, case), operation, operands), target
        )
    if kind != "dense":
        return call
    return checked(call, attention_check(dense_case(case), operation, tensors, HEADS))


def _attend(kind: str, side: str, case: Any) -> Attend:
    api = import_module(SIDES[side])
    if kind == "dense":
        return partial(api.flash_attention, **dense_case(case).options)
    if kind == "dilated":
        return partial(api.dilated_attention, **case.options)
    if kind == "standard":
        standard = torch_standard if side == "torch" else jax_standard
        return standard(api.flash_attention, case)
    attention = partial(api.block_sparse_attention, **case.options)
    return lambda q, k, v, *lists: attention(q, k, v, api.BlockMask(*lists))


def _module_call(
    side: str, target: str, case: PatternCase, operation: str, tensors: list[Tensor]
) -> Call:
    """A multi-head module with random weights; its output is checked with the identity."""
    import torch

    q, *_, dout = tensors
    x, dx = q.flatten(2), dout.flatten(2)
    channels = x.shape[-1]
    attend = (_torch_module if side == "torch" else _jax_module)(case)
    lists = case.mask if isinstance(case, SparseCase) else ()
    of_mask = [torch.tensor(each, device=x.device) for each in lists]
    same = torch.eye(channels, dtype=x.dtype, device=x.device)
    reverse = same.flip(0).contiguous()  # of the channels, so that q and k differ
    weights = [torch.randn_like(same) * channels**-0.5 for _ in PROJECTIONS]
    prepare = PREPARE[SIDES[side]]
    with use_target(target):
        known = prepare(attend, "forward", [x, reverse, same, same, same, *of_mask, dx])
        call = prepare(attend, operation, [x, *weights, *of_mask, dx])
        result = known.result
        assert result is not None
        known = known._replace(result=lambda found: [result(found)[0].reshape(*q.shape)])
        checked(known, attention_check(case, "forward", [x.flip(-1).view_as(q), q, q, dout], HEADS))
    return for_target(call._replace(result=None), target)


def _torch_module(case: PatternCase) -> Attend:
    """Return the module as a function of its tokens, its weights and a mask's lists."""
    import torch
    from torch.func import functional_call

    from torch_attn import BlockMask, modules

    mask = BlockMask(*map(torch.tensor, case.mask)) if isinstance(case, SparseCase) else None
    module = _module(modules, case, mask, device="meta")

    def attend(x, *operands):
        weights, lists = operands[: len(PROJECTIONS)], operands[len(PROJECTIONS) :]
        named = {f"{name}.weight": w for name, w in zip(PROJECTIONS, weights, strict=True)}
        named |= dict(zip(BlockMask._fields, lists, strict=False))
        return functional_call(module, named, (x,))

    return attend


def _jax_module(case: PatternCase) -> Attend:
    try:
        from flax import nnx
    except ImportError as error:
        raise Absent(f"flax cannot be imported: {error}") from error
    import jax

    from pallas_attn import BlockMask, modules

    precision = "highest" if case.dtype == "float32" else "default"

    def attend(x, *operands):
        weights, lists = operands[: len(PROJECTIONS)], operands[len(PROJECTIONS) :]
        mask = BlockMask(*lists) if lists else None
        # Made in each trace; XLA drops the weights that it draws.
        module = _module(modules, case, mask, rngs=nnx.Rngs(0), param_dtype=x.dtype)
        for name, weight in zip(PROJECTIONS, weights, strict=True):
            getattr(module, name).kernel[...] = weight
        with jax.default_matmul_precision(precision):
            return module(x)

    return attend


def _module(modules: Any, case: PatternCase, mask: Any, **options: Any) -> Any:
    sizes, options = (case.heads_q * case.head_dim, case.heads_q), options | {"causal": case.causal}
    if isinstance(case, SparseCase):
        return modules.MultiHeadBlockSparseAttention(*sizes, mask, **options)
    pairs = case.segment_lengths, case.dilation_rates
    return modules.MultiHeadDilatedAttention(*sizes, *pairs, **options)
