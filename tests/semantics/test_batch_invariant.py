"""`batch_invariant`: training, prefill in chunks and decoding give the same bits.

A GPU compares bits. NumPy's products on a CPU round by shape, so the interpreter is compared
within a few ulps there, and what decides the bits is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

import pallas_attn
import torch_attn
from tests.oracle import assert_within_budget
from tests.sides import SIDES, Side
from tuning.static.gate import decode_spec, paged_spec
from tuning.static.triton_aot import compile_kernels
from twin_attention.contract.tolerances import MANTISSA_BITS, MAX_ERROR_ULPS
from twin_attention.interop.kernels import in_jax
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, PagedCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import Ours
from twin_attention.targets import invariant
from twin_attention.targets.config import HEAD_DIMS, load_table, table_path, use_configs
from twin_attention.targets.target import TARGETS

ON_GPU = torch.cuda.is_available()
TRITON = Ours("torch_attn", "triton")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window_size": (130, 0)}, {"softcap": 4.0})
LENGTHS = (1, 2, 63, 64, 65, 70, 150) if not ON_GPU else (1, 17, 64, 65, 600, 2047, 2049, 4500)
# A row's out and lse: of which sequence, from which token on.
Rows = tuple[int, int, Tensor, Tensor]


class Problem(NamedTuple):
    """Whole sequences, and what they give alone: q, k, v and out [n, H, D], lse [H, n]."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    sinks: Tensor
    options: dict[str, Any]
    outs: list[Tensor]
    lses: list[Tensor]


def make_problem(seed: int, attend: Any, device: str, **sizes: Any) -> Problem:
    """Draw sequences, and attend to each of them alone."""
    rng, random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    heads_q, heads_kv, size = (sizes.get(x, y) for x, y in (("hq", 4), ("hkv", 1), ("d", 64)))
    options = sizes.get("options", OPTIONS[seed % len(OPTIONS)])
    lengths = rng.choice(LENGTHS, rng.integers(1, 4))

    def draw(heads: int) -> list[Tensor]:
        made = (torch.randn(n, heads, size, generator=random) for n in lengths)
        return [x.to(torch.bfloat16).to(device) for x in made]

    q, k, v = draw(heads_q), draw(heads_kv), draw(heads_kv)
    sinks = torch.randn(heads_q, generator=random).to(device)
    given = {"sinks": sinks, "causal": True, **options}
    found = [
        attend("flash_attention", **dict(zip("qkv", alone, strict=True)), **given)
        for alone in zip(*([x[None] for x in xs] for xs in (q, k, v)), strict=True)
    ]
    outs, lses = [out[0] for out, _ in found], [lse[0] for _, lse in found]
    return Problem(q, k, v, sinks, options, outs, lses)


def schedule(seed: int, problem: Problem, attend: Any) -> Iterator[Rows]:
    """Attend to chunks of the sequences in a random batch of each function."""
    rng = np.random.default_rng([seed, 1])
    stops = [int(rng.integers(1, len(x) + 1)) for x in problem.q]
    starts = [int(rng.integers(0, stop)) for stop in stops]
    given: dict[str, Any] = {"sinks": problem.sinks, "causal": True, **problem.options}
    yield _dense(rng, problem, starts, stops, partial(attend, "flash_attention", **given))
    packed = partial(attend, "flash_attention_varlen", **given)
    yield from _packed(rng, problem, starts, stops, packed)
    pages = _pages(rng, problem, stops)
    splits = {"num_splits": [None, 1, 2][rng.integers(3)]}
    paged = partial(attend, "paged_attention", **given, **pages, **splits)
    yield from _chunks(problem, starts, stops, paged)
    if splits["num_splits"] is None:
        splits["cascade"] = bool(rng.integers(2))
    decode = partial(attend, "paged_decode", **given, **pages, **splits)
    yield from _tokens(rng, problem, stops, decode)


def _dense(rng: Any, problem: Problem, starts: Any, stops: Any, attend: Any) -> Rows:
    """One sequence among neighbours of NaN."""
    i, row, others = int(rng.integers(len(stops))), int(rng.integers(3)), int(rng.integers(3, 5))
    parts = problem.q[i][starts[i] : stops[i]], problem.k[i][: stops[i]], problem.v[i][: stops[i]]
    batch = [
        torch.full((others, *x.shape), torch.nan, dtype=x.dtype, device=x.device) for x in parts
    ]
    for x, part in zip(batch, parts, strict=True):
        x[row] = part
    out, lse = attend(**dict(zip("qkv", batch, strict=True)))
    return i, starts[i], out[row], lse[row]


def _packed(rng: Any, problem: Problem, starts: Any, stops: Any, attend: Any) -> Iterator[Rows]:
    """All sequences in another order, one of NaN among them, and padding."""
    order, device = rng.permutation(len(stops)), problem.sinks.device
    q = [problem.q[i][starts[i] : stops[i]] for i in order]
    k, v = ([x[i][: stops[i]] for i in order] for x in (problem.k, problem.v))
    for x in (q, k, v):
        x.insert(1, torch.full_like(x[0], torch.nan))
        x.append(torch.full_like(x[0][:1], torch.nan))
    offsets = {
        f"cu_seqlens_{name}": torch.tensor(np.cumsum([0, *map(len, x[:-1])]), dtype=torch.int32)
        for name, x in (("q", q), ("kv", k))
    }
    given = {name: torch.cat(x) for name, x in zip("qkv", (q, k, v), strict=True)}
    out, lse = attend(**given, **{x: y.to(device) for x, y in offsets.items()})
    at = offsets["cu_seqlens_q"].tolist()
    places = [x + (x > 0) for x in range(len(stops))]
    for i, place in zip(order, places, strict=True):
        rows = slice(at[place], at[place + 1])
        yield int(i), starts[i], out[rows], lse[:, rows]


def _pages(rng: Any, problem: Problem, stops: Any) -> dict[str, Tensor]:
    """All keys in shuffled pages, whose other slots hold NaN."""
    size, device = int(rng.choice((7, 16, 64))), problem.sinks.device
    most = -(-max(map(len, problem.k)) // size) + int(rng.integers(0, 4))
    order = torch.from_numpy(rng.permutation(most * len(stops) + 2))
    tables = order[: most * len(stops)].reshape(len(stops), most).to(device)
    given = {}
    for name, x in (("k_pages", problem.k), ("v_pages", problem.v)):
        pool = torch.full((len(order), size, *x[0].shape[1:]), torch.nan, dtype=x[0].dtype)
        pool = pool.to(device)
        for table, keys in zip(tables, x, strict=True):
            keys = torch.cat([keys, pool[0, :1].repeat(most * size - len(keys), 1, 1)])
            pool[table] = keys.reshape(most, *pool.shape[1:])
        given[name] = pool
    lengths = torch.tensor(stops, dtype=torch.int32, device=device)
    return {**given, "block_tables": tables.int(), "seq_lens": lengths}


def _chunks(problem: Problem, starts: Any, stops: Any, attend: Any) -> Iterator[Rows]:
    q = [x[start:stop] for x, start, stop in zip(problem.q, starts, stops, strict=True)]
    at = np.cumsum([0, *map(len, q)])
    offsets = torch.tensor(at, dtype=torch.int32, device=problem.sinks.device)
    q.append(torch.full_like(q[0], torch.nan))
    out, lse = attend(q=torch.cat(q), cu_seqlens_q=offsets)
    for i, start in enumerate(starts):
        yield i, start, out[at[i] : at[i + 1]], lse[:, at[i] : at[i + 1]]


def _tokens(rng: Any, problem: Problem, stops: Any, attend: Any) -> Iterator[Rows]:
    """As many new tokens of each sequence."""
    tokens = min(int(rng.choice((1, 1, 3, 5, 17))), *stops) if len(stops) > 1 else 1
    q = torch.stack([x[stop - tokens : stop] for x, stop in zip(problem.q, stops, strict=True)])
    out, lse = attend(q=q)
    for i, stop in enumerate(stops):
        yield i, stop - tokens, out[i], lse[i]


def differences(problem: Problem, found: Iterator[Rows]) -> tuple[int, int, float]:
    """Return how many numbers differ from the sequences alone, of how many, and by how much."""
    differing = total = 0
    worst = 0.0
    for i, start, out, lse in found:
        for x, whole, axis in ((out, problem.outs[i], 0), (lse, problem.lses[i], 1)):
            expected = whole.narrow(axis, start, x.shape[axis])
            differing += int((x.view(torch.uint8) != expected.view(torch.uint8)).sum())
            total += x.numel()
            error = (x.double() - expected.double()).abs().max() / (1 + expected.abs().max())
            worst = max(worst, float(error))
    return differing, total, worst


def attention_of(side: Any) -> Any:
    """Return what calls a function of a side in the kernels of torch_attn."""
    name = "triton" if side.api is torch_attn else "torch_triton"

    def attend(function: str, **given: Any) -> Any:
        operands = {x: y for x, y in given.items() if isinstance(y, Tensor)}
        options = {x: y for x, y in given.items() if x not in operands}
        options |= {"batch_invariant": True, "return_lse": True, "implementation": name}
        return side.call(function, operands, **options)

    return attend


def check(side: Side, seed: int, torch_device: str, **sizes: Any) -> None:
    if side.api is pallas_attn and not ON_GPU:
        pytest.skip("JAX has no interpreter of kernels in Triton")
    attend = attention_of(side)
    problem = make_problem(seed, attend, torch_device, **sizes)
    differing, total, worst = differences(problem, schedule(seed, problem, attend))
    assert total
    if ON_GPU:
        assert differing == 0, (differing, total, worst)
    assert worst <= MAX_ERROR_ULPS * 2.0 ** -MANTISSA_BITS["bfloat16"]


@pytest.mark.parametrize("seed", range(200 if ON_GPU else 6))
def test_schedules(side, seed, torch_device):
    check(side, seed, torch_device, d=(64, 128)[seed % 2], hkv=(1, 4)[seed // 2 % 2])


@pytest.mark.skipif(not ON_GPU, reason="NumPy rounds by shape")
def test_other_blocks_are_noticed(torch_device):
    attend, found = attention_of(SIDES["torch_attn"]()), 0
    with use_configs({"paged_decode": {"block_kv": 32}}):
        for seed in range(8):
            problem = make_problem(seed, attend, torch_device)
            found += differences(problem, schedule(seed, problem, attend))[0]
    assert found


CASES = [
    FlashCase("", heads_q=2, heads_kv=1, causal=True, batch_invariant=True, sinks=True),
    FlashCase("", seq_q=130, seq_kv=70, window_size=(9, 30), batch_invariant=True, row_max=True),
    FlashCase("", heads_q=3, heads_kv=1, head_dim=24, head_dim_v=136, batch_invariant=True),
    VarlenCase("", dtype="float16", window_size=(20, 0), softcap=4.0, batch_invariant=True),
    PagedCase("", (70, 0, 9), new_tokens=(20, 0, 9), padding=2, sinks=True, batch_invariant=True),
    DecodeCase("", (70, 0, 128, 1), tokens=17, scale=-0.2, batch_invariant=True),
    DecodeCase("", (100, 3), window_size=(50, 0), sinks=True, batch_invariant=True),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_results_are_within_the_budget(case, torch_device):
    inputs = make_inputs(case, torch_device)
    assert_within_budget(TRITON.start()(case, inputs), inputs, case.spec)


@pytest.mark.parametrize("options", [{}, {"window_size": (100, 0)}, {"sinks": True}])
def test_a_merge_of_spans_has_the_bits_of_a_program_over_all(options, torch_device):
    lengths, page = (2100, 40, 0, 2048, 4099), {"page_size": 128, "max_pages": 34}
    case = DecodeCase("", lengths, tokens=2, heads_q=2, head_dim=16, batch_invariant=True, **page)
    case = replace(case, **options)
    inputs = make_inputs(case, torch_device)
    one, several = (TRITON.start()(replace(case, num_splits=n), inputs) for n in (1, 2))
    assert_within_budget(one, inputs, case.spec)
    for name, x in one.items():
        assert torch.equal(x, several[name]), name


@pytest.mark.parametrize("head_dim", HEAD_DIMS[:-1])
def test_a_head_dimension_has_one_block(head_dim):
    blocks = set()
    for target, name in product(TARGETS, ("flash_fwd", "paged_decode", "paged_attention")):
        rows = load_table(table_path("torch_attn", target))[name]
        of_option = [row for row in rows if "batch invariant" in dict(row.key).get("when", "")]
        conditions = {dict(row.key)["when"] for row in of_option}
        for when in conditions:
            reached = [x for x in of_option if dict(x.key)["when"] == when]
            config: Any = next(x.config for x in reached if dict(x.key)["head_dim"] >= head_dim)
            block_rows = config.block_q if name == "flash_fwd" else config.max_rows
            blocks.add(config.block_kv)
            assert invariant.SPAN % config.block_kv == 0
            # Each warp has 16 rows, and Triton gives it all keys of a block.
            assert block_rows >= 16 * config.num_warps
            assert config.num_warps == 1 or block_rows >= config.block_kv
    assert len(blocks) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_no_two_warps_share_a_row(target):
    specs = (
        paged_spec("bfloat16", 128, max_pages=8),
        decode_spec("bfloat16", 64, 2, 4, tokens=16, max_pages=8),
    )
    for spec in specs:
        compiled = compile_kernels(replace(spec, batch_invariant=True), target)
        name, _, found = compiled[0]
        warps = re.findall(r"nvidia_mma<.*?warpsPerCTA = \[(\d+), (\d+)\]", found.asm["ttgir"])
        assert name.startswith("paged")
        assert {x for _, x in warps} == {"1"}, warps


REFUSED = {
    "segment ids": FlashCase("", segments="documents", causal=True),
    "alibi_slopes and dropout": FlashCase("", dropout_rate=0.1),
    "not float32": FlashCase("", dtype="float32"),
    "up to 256": FlashCase("", head_dim=320),
    "in 16 bits": DecodeCase("", kv_dtype="int8"),
    "takes no tree_ends": DecodeCase("", tokens=3, tree="drafts"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_kernels_lack_is_refused(reason):
    case = replace(REFUSED[reason], batch_invariant=True)
    assert reason in (TRITON.supports(case) or "")
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        TRITON.start()(case, make_inputs(case, "cpu"))


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=["flash", "decode"])
def test_no_other_kernels_run(case):
    """On a CPU None would be the reference, which rounds by shape."""
    inputs = {x: y for x, y in make_inputs(case, "cpu").items() if x not in ("dout", "dlse")}
    for side, names in (
        ("torch_attn", (None, "reference")),
        ("pallas_attn", ("triton", "reference")),
    ):
        for name in names:
            with pytest.raises(NotImplementedError, match="its rounding follows the shape"):
                Ours(side, name).start()(case, inputs)  # pyright: ignore[reportArgumentType]


def test_jax_without_torch_says_so(monkeypatch):
    monkeypatch.setattr(in_jax, "find_spec", lambda name: None)
    q = jax.ShapeDtypeStruct((1, 4, 2, 64), jnp.bfloat16)
    attend = partial(pallas_attn.flash_attention, batch_invariant=True)
    with pytest.raises(NotImplementedError, match=r"torch_triton.*is not installed"):
        jax.eval_shape(partial(attend, implementation="torch_triton"), q, q, q)
