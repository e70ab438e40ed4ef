"""Draw a random problem, and write it as one line that restores it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import count
from math import inf, lcm
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

import torch

from twin_attention.contract.context import LAYOUTS
from twin_attention.contract.paged_spec import (
    DECODE_DTYPES,
    LATENT_DIM_MAX,
    PAGE_SIZE_MAX,
    QUANTIZED_DTYPES,
    TOKENS_MAX,
)
from twin_attention.contract.spec import (
    DTYPES,
    HEAD_DIM_MAX,
    HEAD_DIM_MIN,
    HEAD_DIM_STEP,
    PRECISIONS,
    TILE_SIZES,
)
from twin_attention.contract.transfers import EXCHANGES
from twin_attention.interop.parity.cases import (
    AppendCase,
    BlockSparseCase,
    Case,
    ContextCase,
    DecodeCase,
    FlashCase,
    MergeCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.ranges import KINDS as RANGES
from twin_attention.interop.parity.subjects.subject import Subject
from twin_attention.targets import invariant
from twin_attention.targets.config import PACKAGES, load_table, table_path
from twin_attention.targets.kernels import FAMILY_KERNELS
from twin_attention.targets.sm80 import EXPLICIT_HEAD_DIM_MAX
from twin_attention.targets.target import TARGETS

# Consecutive problems that differ only in lengths and values, and so share compiled kernels.
VARIANTS = 4
MISSES = 2000  # problems that no subject claims
COMMON_HEAD_DIMS = (64, 128, 256, 80, 96, 192)
# The layouts and addresses in which saved tensors return.
HOOKS = ("contiguous", "unaligned", "heads first")
# Values that hide keys; those below a dtype's least number become that.
HIDING = (0.0, -1e4, -1e9, -1e10, -1e12, -1e30, -3.5e38, -inf)
KINDS = {
    kind.__name__: kind
    for kind in (
        FlashCase, VarlenCase, BlockSparseCase, ContextCase, DecodeCase, PagedCase, AppendCase,
        MergeCase,
    )
}  # fmt: skip


class Rows(NamedTuple):
    """The layout of a tensor's rows; `gap` and `offset` are elements of NaN behind and before."""

    heads_first: bool = False
    gap: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Problem:
    """A case, whose name seeds the values, and circumstances that must not change its results.

    rows: by operand; others are contiguous.
    spread: standard deviation of q and k.
    hiding: one of `HIDING`, put into some values of a term.
    hook: how tensors saved by autograd return: one of `HOOKS`, or "" for unchanged.
    jax: also run what JAX compiles for each shape.
    """

    case: Case
    rows: dict[str, Rows] = field(default_factory=dict)
    spread: float = 1.0
    hiding: float | None = None
    constants: tuple[str, ...] = ()
    odd_strides: bool = False
    hook: str = ""
    jax: bool = True

    @property
    def name(self) -> str:
        return self.case.name

    def to_line(self) -> str:
        own = {x.name: getattr(self.case, x.name) for x in fields(self.case)}
        case = {x.name: own[x.name] for x in fields(self.case) if own[x.name] != x.default}
        document: dict[str, Any] = {"kind": type(self.case).__name__, "case": case}
        rest = asdict(replace(self, case=MergeCase("")))
        default = asdict(Problem(MergeCase("")))
        return json.dumps(document | {x: rest[x] for x in rest if rest[x] != default[x]})

    @classmethod
    def of_line(cls, line: str) -> Problem:
        """Return the problem that `to_line` wrote; raise ValueError if it is none."""
        try:
            document = json.loads(line)
            kind = KINDS[document.pop("kind")]
            case = {name: _as_tuples(x) for name, x in document.pop("case").items()}
            rows = {name: Rows(*x) for name, x in document.pop("rows", {}).items()}
            rest = {name: _as_tuples(x) for name, x in document.items()}
            return cls(kind(**case), rows, **rest)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"expected a problem as a failure prints it, got {line!r}") from error


def _as_tuples(x: Any) -> Any:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x


def draw(seed: int, index: int, longest: int) -> Problem:
    """Draw problem `index` of a seed.

    `VARIANTS` consecutive problems have the same kernels. Of long sequences, one in ten has up to
    four times `longest` tokens.
    """
    shared = _Draw(Random(f"{seed}/{index // VARIANTS}"), longest)
    own = _Draw(Random(f"{seed}/{index // VARIANTS}/{index % VARIANTS}"), longest)
    kind = shared.weighted(
        (_flash, 8), (_varlen, 8), (_block_sparse, 2), (_context, 2), (_decode, 3), (_paged, 4),
        (_append, 3), (_merge, 1),
    )  # fmt: skip
    case = kind(f"fuzz-{seed}-{index}", shared, own)
    if shared.chance(0.15) and type(case) in (FlashCase, VarlenCase, DecodeCase, PagedCase):
        case = as_batch_invariant(case)
    differentiable = isinstance(case, FlashCase | VarlenCase)
    # Constants change the kernels, so a group shares them.
    constants = _constants(case, shared) if differentiable else ()
    return Problem(
        case,
        _rows(case, shared),
        own.weighted((1.0, 8), (3.0, 1), (0.0, 1)) if differentiable else 1.0,
        own.pick(*HIDING) if differentiable and case.spec.terms and own.chance(0.4) else None,
        constants,
        own.chance(0.25),
        own.pick(*HOOKS) if differentiable and own.chance(0.25) else "",
        index % VARIANTS == 0,
    )


def as_batch_invariant(case: Any) -> Any:
    """Return a case with `batch_invariant`, without the options that its kernels lack."""
    plain = {
        "segments": "", "tree": "", "depths": False, "ranges": "", "relative": None, "bias": None,
        "alibi": "", "dropout_rate": 0.0, "kv_dtype": None, "scale_shape": (), "latent": False,
        "precision": PRECISIONS[0], "batch_invariant": True,
    }  # fmt: skip
    changed: dict[str, Any] = {x.name: plain[x.name] for x in fields(case) if x.name in plain}
    changed |= {
        x: min(getattr(case, x) or 64, invariant.HEAD_DIM_MAX) for x in ("head_dim", "head_dim_v")
    }
    return replace(case, **changed, dtype=case.dtype if case.dtype != "float32" else "bfloat16")


def draw_claimed(subjects: Sequence[Subject], seed: int, longest: int) -> Iterator[Problem]:
    """Draw problems that a subject claims, until none is found in `MISSES`.

    Each subject in turn chooses the options.
    """
    last = 0
    for index in count():
        if index > last + MISSES:
            return
        problem = draw(seed, index, longest)
        if not any(x.is_guarded for x in subjects):  # no family of ours
            problem = for_libraries(problem)
        subject = subjects[index // VARIANTS % len(subjects)]
        problem = replace(problem, case=subject.fit(problem.case))
        if any(x.supports(problem.case) is None for x in subjects):
            last = index
            yield problem


def for_libraries(problem: Problem) -> Problem:
    """Return a problem with circumstances that any library has: aligned rows, finite terms."""
    aligned = {x: y for x, y in problem.rows.items() if not (y.gap % 16 or y.offset % 16)}
    return replace(problem, rows=aligned, hiding=None, constants=(), odd_strides=False, jax=True)


def _constants(case: FlashCase | VarlenCase, draw: _Draw) -> tuple[str, ...]:
    if isinstance(case, ContextCase) or not draw.chance(0.3):
        return ()
    names = ["q", "k", "v", *(["sinks"] if case.sinks else [])]
    names += [x for x in ("bias", "relative_bias") if x in case.spec.terms]
    kept = draw.pick(*names)
    return tuple(x for x in names if x != kept and draw.chance(0.5))


@cache
def tile_sizes() -> tuple[int, ...]:
    """Return the shipped tables' tile sizes of queries and of keys."""
    paths = {
        (table_path(package, target, folder), folder)
        for package in PACKAGES for target in TARGETS for folder in FAMILY_KERNELS
    }  # fmt: skip
    tables = [load_table(path, folder) for path, folder in paths if path.exists()]
    sizes = {
        getattr(row.config, name, 0)
        for table in tables for rows in table.values() for row in rows
        for name in ("block_q", "block_kv")
    }  # fmt: skip
    return tuple(sorted(sizes - {0}))


def hidden_values(name: str, x: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Return a term with `problem.hiding` in some values, and in all of some rows of a bias.

    Slopes stay finite, but large.
    """
    generator = torch.Generator().manual_seed(crc32(problem.name.encode()))

    def some(shape: tuple[int, ...], share: float) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) < share).to(x.device)

    assert problem.hiding is not None
    if name == "alibi_slopes":
        return x.masked_fill(some(x.shape, 0.5), min(-problem.hiding, 1e30))
    least = max(problem.hiding, torch.finfo(x.dtype).min) if problem.hiding > -inf else -inf
    hidden = some(x.shape[-1:], 0.5)
    if x.ndim == 4:
        hidden = hidden & some((*x.shape[:3], 1), 0.8) | some((*x.shape[:3], 1), 0.1)
    return x.masked_fill(hidden, least)


class _Draw:
    def __init__(self, random: Random, longest: int) -> None:
        self._random, self._longest = random, longest

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def pick(self, *values: Any) -> Any:
        return self._random.choice(values)

    def weighted(self, *pairs: tuple[Any, float]) -> Any:
        values, weights = zip(*pairs, strict=True)
        return self._random.choices(values, weights)[0]

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def real(self, low: float, high: float) -> float:
        return float(f"{self._random.uniform(low, high):.3g}")

    def edge(self, *more: int) -> int:
        """Return a multiple of a tile's size or of one of `more`, less 1 or plus 1 or neither."""
        size = self.pick(*(x for x in (*tile_sizes(), *more) if 0 < x <= max(64, self._longest)))
        return size * self.integer(1, max(1, self._longest // size)) + self.integer(-1, 1)

    def length(self, *more: int) -> int:
        """Return a number of tokens: few, near an edge, or any."""
        longest = self._longest * (4 if self.chance(0.1) else 1)
        return self.weighted(
            (self.integer(0, 3), 1), (self.integer(1, 40), 2), (self.edge(*more), 5),
            (self.integer(1, longest), 4),
        )  # fmt: skip

    def other_length(self, length: int) -> int:
        """Return a number of keys: equal, about a tile more or less, or any."""
        return self.weighted(
            (length, 4), (max(0, length + self.pick(-1, 1) * self.edge()), 2), (self.length(), 4)
        )

    def lengths(self, most: int, *more: int) -> tuple[int, ...]:
        """Return up to `most` lengths that sum to about one sequence."""
        count = self.integer(0, most)
        share = max(1, count // 3)
        return tuple(
            self.length(*more) if self.chance(0.3) else self.length() // share for _ in range(count)
        )

    def long(self) -> int:
        """Return so many tokens that kernels add up dq on a GPU."""
        return self.integer(3 * self._longest, 4 * self._longest)

    def head_dim(self) -> int:
        largest = HEAD_DIM_MAX if self.chance(0.1) else EXPLICIT_HEAD_DIM_MAX
        any_size = HEAD_DIM_STEP * self.integer(
            HEAD_DIM_MIN // HEAD_DIM_STEP, largest // HEAD_DIM_STEP
        )
        return self.pick(*COMMON_HEAD_DIMS) if self.chance(0.5) else any_size

    def heads(self) -> dict[str, int]:
        heads_kv = self.weighted((1, 3), (2, 3), (3, 1), (4, 1))
        return {"heads_q": heads_kv * self.weighted(*((n, 6 - n) for n in range(1, 6))),
                "heads_kv": heads_kv}  # fmt: skip

    def head_dims(self) -> dict[str, Any]:
        head_dim_v = self.head_dim() if self.chance(0.4) else None
        return {"head_dim": self.head_dim(), "head_dim_v": head_dim_v}

    def side(self, reach: int) -> int | None:
        return self.pick(
            None, 0, 1, self.integer(0, 70), self.edge(reach), self.integer(0, reach + 9), 2**31
        )

    def window(self, reach: int) -> tuple[int | None, int | None]:
        return self.side(reach), self.side(reach)

    def scale(self) -> float | None:
        return self.weighted((None, 6), (self.real(-1, 1), 2), (0.0, 0.3), (self.real(0, 1e-3), 1))

    def softcap(self) -> float:
        return self.weighted(
            (self.real(0.5, 60), 6), (self.real(60, 500), 1), (self.real(1e-3, 0.5), 1), (1e9, 1)
        )


def _options(shared: _Draw, own: _Draw, reach: int) -> dict[str, Any]:
    dtype = shared.weighted((DTYPES[0], 3), (DTYPES[1], 3), (DTYPES[2], 2))
    return {
        **shared.heads(),
        **shared.head_dims(),
        "dtype": dtype,
        "precision": shared.pick(*PRECISIONS) if dtype == "float32" else PRECISIONS[0],
        "causal": shared.chance(0.5),
        "window_size": own.window(reach) if shared.chance(0.3) else None,
        "softcap": shared.softcap() if shared.chance(0.25) else None,
        "sinks": shared.chance(0.3),
        "scale": own.scale() if shared.chance(0.4) else None,
        "deterministic": shared.chance(0.5),
    }


def _flash(name: str, shared: _Draw, own: _Draw) -> FlashCase:
    seq_q = own.length()
    seq_kv = own.other_length(seq_q)
    segments = shared.pick("documents", "shuffled") if shared.chance(0.25) else ""
    terms = _terms(shared)
    options = _options(shared, own, seq_kv) | _tree(shared) | terms
    if shared.chance(0.5 if terms else 0.15):
        options["bias"] = "".join(axis for axis in "bhqk" if shared.chance(0.6))
    return FlashCase(
        name, own.integer(1, 3), seq_q, seq_kv, **options, segments=segments,
        gradients=shared.chance(0.85), row_max=shared.chance(0.15), **_ranges(shared),
        tangents=shared.chance(0.1),
    )  # fmt: skip


def _tree(shared: _Draw) -> dict[str, Any]:
    if not shared.chance(0.25):
        return {}
    return {"causal": True, "tree": shared.pick("nested", "any"), "depths": shared.chance(0.5)}


def _ranges(shared: _Draw) -> dict[str, Any]:
    kinds = [kind for kind in RANGES if kind]
    return {"ranges": shared.pick(*kinds)} if shared.chance(0.2) else {}


def _terms(shared: _Draw) -> dict[str, Any]:
    dropout = {"dropout_rate": shared.pick(0.1, 0.5, 0.9)} if shared.chance(0.2) else {}
    if not shared.chance(0.3):
        return dropout
    radius = shared.weighted(
        (0, 1), (shared.integer(1, 3), 2), (shared.edge(), 3), (shared.integer(1, 70), 3),
        (shared.integer(70, 3000), 2),
    )  # fmt: skip
    return dropout | {
        "relative": shared.weighted((None, 1), (radius, 2)),
        "terms_in_q_dtype": shared.chance(0.3),
        "alibi": shared.pick("", "heads", "all"),
    }


def _varlen(name: str, shared: _Draw, own: _Draw) -> VarlenCase:
    is_long = shared.chance(0.15)
    queries = tuple(own.long() for _ in range(own.integer(1, 2))) if is_long else own.lengths(12)
    if own.chance(0.5):
        lengths = tuple((n, n) for n in queries)
    elif is_long:
        lengths = tuple((n, own.long()) for n in queries)
    else:
        lengths = tuple((n, own.length() // max(1, len(queries) // 3)) for n in queries)
    padding = own.integer(0, 70) * own.pick(0, 1), own.integer(0, 70) * own.pick(0, 1)
    options = _options(shared, own, max((n for _, n in lengths), default=0))
    options |= _tree(shared) | _terms(shared)
    if is_long:
        options |= {"heads_q": shared.integer(1, 3), "heads_kv": 1}
    options |= {"row_max": shared.chance(0.15)} | _ranges(shared)
    options["tangents"] = shared.chance(0.1)
    return VarlenCase(name, lengths, padding, **options)


def _block_sparse(name: str, shared: _Draw, own: _Draw) -> BlockSparseCase:
    seq_q, seq_kv = own.length(*TILE_SIZES), own.length(*TILE_SIZES)
    return BlockSparseCase(
        name, own.integer(1, 3), seq_q, seq_kv, **_options(shared, own, seq_kv),
        gradients=shared.chance(0.85), tile_q=shared.pick(*TILE_SIZES),
        tile_kv=shared.pick(*TILE_SIZES), own_masks=shared.pick("", "heads", "all"),
        kept=own.pick(0.0, 0.2, 0.5, 1.0),
    )  # fmt: skip


def _context(name: str, shared: _Draw, own: _Draw) -> ContextCase:
    ranks, exchange = shared.integer(1, 5), shared.pick(None, *EXCHANGES)
    tokens = 2 * ranks * max(1, own.length() // (2 * ranks))
    options = _options(shared, own, tokens)
    if exchange == "heads":
        options |= {x: ranks * options[x] for x in ("heads_q", "heads_kv")}
    documents, rest = [], tokens
    for length in own.lengths(6) if shared.chance(0.5) else ():
        documents.append(min(length, rest))
        rest -= documents[-1]
    return ContextCase(
        name, 1, tokens, tokens, **options, ranks=ranks, sharding=shared.pick(*LAYOUTS),
        documents=tuple(documents), exchange=exchange, gradients=shared.chance(0.85),
    )  # fmt: skip


def _cache(shared: _Draw, own: _Draw) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Draw lengths, and a paged cache; splits and cascades end at edges of pages and tiles."""
    page_size = shared.weighted((16, 4), (64, 2), (128, 1), (shared.integer(1, PAGE_SIZE_MAX), 3))
    lengths = own.lengths(9, page_size, lcm(page_size, 64))
    heads, head_dims = shared.heads(), shared.head_dims()
    if shared.chance(0.15):
        steps = (HEAD_DIM_MIN // HEAD_DIM_STEP, LATENT_DIM_MAX // HEAD_DIM_STEP)
        wide = shared.weighted((head_dims["head_dim"], 3), (LATENT_DIM_MAX, 1),
                               (HEAD_DIM_STEP * shared.integer(*steps), 1))  # fmt: skip
        value_dim = HEAD_DIM_STEP * shared.integer(steps[0], wide // HEAD_DIM_STEP)
        value_dim = shared.pick(value_dim, max(HEAD_DIM_MIN, wide - 64))
        head_dims = {"head_dim": wide, "head_dim_v": min(value_dim, HEAD_DIM_MAX), "latent": True}
    is_quantized = shared.chance(0.3)
    return lengths, {
        **heads,
        **head_dims,
        "dtype": shared.pick(*DECODE_DTYPES),
        "page_size": page_size,
        "max_pages": max(1, -(-max(lengths, default=0) // page_size) + shared.integer(-1, 2)),
        "kv_dtype": shared.pick(*QUANTIZED_DTYPES) if is_quantized else None,
        "scale_shape": shared.pick((), (heads["heads_kv"],)) if is_quantized else (),
    }


def _decode_options(shared: _Draw, own: _Draw, reach: int) -> dict[str, Any]:
    tree = shared.pick("drafts", "any") if shared.chance(0.25) else ""
    return {
        "sinks": shared.chance(0.3),
        "tree": tree,
        "scale": own.scale() if shared.chance(0.4) else None,
        "window_size": own.window(reach) if shared.chance(0.3) and not tree else None,
        "softcap": shared.softcap() if shared.chance(0.25) else None,
        "num_splits": shared.pick(1, 2, 3, 7, 256) if shared.chance(0.3) else None,
        "alibi": shared.pick("heads", "all") if shared.chance(0.15) and not tree else "",
    }


def _fitting(lengths: tuple[int, ...], cache: dict[str, Any]) -> tuple[int, ...]:
    return tuple(min(n, cache["page_size"] * cache["max_pages"]) for n in lengths)


def _decode(name: str, shared: _Draw, own: _Draw) -> DecodeCase:
    lengths, cache = _cache(shared, own)
    tokens = shared.weighted((None, 3), (1, 1), (shared.integer(1, TOKENS_MAX), 3))
    options = _decode_options(shared, own, max(lengths, default=0))
    if options["num_splits"] is None and shared.chance(0.3):
        options |= {"cascade": True, "common_pages": own.integer(0, cache["max_pages"])}
    return DecodeCase(name, _fitting(lengths, cache), tokens, **cache, **options)


def _paged(name: str, shared: _Draw, own: _Draw) -> PagedCase:
    lengths, cache = _cache(shared, own)
    lengths = _fitting(lengths, cache)
    most = own.weighted((1, 1), (20, 2), (10**9, 3))
    new = tuple(min(n + own.integer(0, 2), own.integer(0, most)) for n in lengths)
    return PagedCase(
        name, lengths, **cache, **_decode_options(shared, own, max(lengths, default=0)),
        new_tokens=new, padding=own.pick(0, own.integer(0, 70)), **_ranges(shared),
    )  # fmt: skip


def _append(name: str, shared: _Draw, own: _Draw) -> AppendCase:
    lengths, cache = _cache(shared, own)
    lengths = _fitting(lengths, cache)
    heads_q = cache.pop("heads_q")
    is_rotated = shared.chance(0.5)
    # Either equally many tokens per sequence, perhaps at negative positions, or packed ones.
    is_packed = shared.chance(0.5)
    new = tuple(own.integer(0, n + 2) for n in lengths) if is_packed else None
    return AppendCase(
        name, lengths, 0 if is_packed else shared.integer(1, TOKENS_MAX), new,
        own.integer(0, 20) if is_packed else 0,
        heads_q if is_rotated and shared.chance(0.5) else 0, **cache,
        rotary_dim=2 * shared.integer(1, cache["head_dim"] // 2) if is_rotated else 0,
        positions=own.pick(8, 128, 8192), rotary_interleaved=shared.chance(0.5),
    )  # fmt: skip


def _merge(name: str, shared: _Draw, own: _Draw) -> MergeCase:
    return MergeCase(
        name, own.integer(0, 12), own.integer(0, 4), own.integer(0, 40), shared.integer(1, 9),
        shared.head_dim(), shared.pick(*DTYPES),
    )  # fmt: skip


Rowed = Callable[[], Rows]


def _rows(case: Case, draw: _Draw) -> dict[str, Rows]:
    """Draw each operand's layout: contiguous, aligned gaps, or anywhere."""
    names = {
        FlashCase: ("q", "k", "v", "dout"), BlockSparseCase: ("q", "k", "v", "dout"),
        VarlenCase: ("q", "k", "v", "dout"), DecodeCase: ("q", "k_pages", "v_pages"),
        PagedCase: ("q", "k_pages", "v_pages"), AppendCase: ("k_new", "v_new"), MergeCase: (),
        ContextCase: (),
    }[type(case)]  # fmt: skip

    def aligned() -> Rows:
        return Rows(draw.chance(0.5), draw.pick(0, 16, 48), draw.pick(0, 16))

    def anyhow() -> Rows:
        even = 2 if getattr(case, "kv_dtype", None) else 1  # rows of 8 bits begin at even offsets
        return Rows(draw.chance(0.5), even * draw.integer(0, 9), even * draw.integer(0, 9))

    chosen: Rowed | None = draw.weighted((None, 5), (aligned, 3), (anyhow, 2))
    return {} if chosen is None else {name: chosen() for name in names if draw.chance(0.7)}
