"""`batch_invariant`: training, prefill in chunks and decoding give the same bits.

A GPU compares bits. NumPy's products on a CPU round by shape, so there the interpreter is compared
within a few ulps, and what decides the bits is looked at.
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
from tests.sides import SIDES
from tuning.static.gate import decode_spec, paged_spec
from tuning.static.triton_aot import compile_kernels
from twin_attention.contract.tolerances import MANTISSA_BITS, MAX_ERROR_ULPS
from twin_attention.interop.kernels import in_jax
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, PagedCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import Ours
from twin_attention.targets.config import load_table, table_path, use_configs
from twin_attention.targets.invariant import SPAN
from twin_attention.targets.target import TARGETS

ON_GPU = torch.cuda.is_available()
TRITON = Ours("torch_attn", "triton")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window_size": (130, 0)}, {"softcap": 4.0})
LENGTHS = (1, 17, 64, 65, 600, 2047, 2049, 4500) if ON_GPU else (1, 2, 63, 64, 65, 70, 150)
# Out and lse of a sequence, from a token on.
Rows = tuple[int, int, Tensor, Tensor]


class Problem(NamedTuple):
    """Whole sequences, each with q, k, v, and what it gives alone: out [n, H, D], lse [H, n]."""

    sequences: list[tuple[Tensor, ...]]
    given: dict[str, Any]
    expected: list[tuple[Tensor, Tensor]]


def make_problem(
    seed: int, attend: Any, device: str, size: int = 64, heads_kv: int = 1, option: int = 0
) -> Problem:
    rng, random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(torch.bfloat16).to(device)

    lengths = rng.choice(LENGTHS, rng.integers(1, 4)).tolist()
    sequences = [tuple(draw(n, h, size) for h in (4, heads_kv, heads_kv)) for n in lengths]
    given = {"sinks": draw(4).float(), "causal": True, **OPTIONS[option]}
    alone = (dict(zip("qkv", (x[None] for x in xs), strict=True)) for xs in sequences)
    found = [attend("flash_attention", **x, **given) for x in alone]
    return Problem(sequences, given, [(out[0], lse[0]) for out, lse in found])


def schedule(
    seed: int, problem: Problem, attend: Any, page_size: int | None = None
) -> Iterator[Rows]:
    """Attend to a chunk of each sequence in every function, with NaN around them."""
    sequences, given, _ = problem
    rng, device = np.random.default_rng([seed, 1]), given["sinks"].device
    stops = [int(rng.integers(1, len(q) + 1)) for q, *_ in sequences]
    starts = [int(rng.integers(0, stop)) for stop in stops]
    chunks = [
        (q[start:stop], k[:stop], v[:stop])
        for (q, k, v), start, stop in zip(sequences, starts, stops, strict=True)
    ]

    def nothing(x: Tensor, *shape: int) -> Tensor:
        return x.new_full((*shape, *x.shape[1:]), torch.nan)

    def offsets_of(parts: Any) -> Tensor:
        return torch.tensor([0, *np.cumsum([*map(len, parts)])], dtype=torch.int32, device=device)

    # One sequence of a dense batch.
    i, row = int(rng.integers(len(stops))), int(rng.integers(3))
    dense = {name: nothing(x, 3, len(x)) for name, x in zip("qkv", chunks[i], strict=True)}
    for x, part in zip(dense.values(), chunks[i], strict=True):
        x[row] = part
    out, lse = attend("flash_attention", **dense, **given)
    yield i, starts[i], out[row], lse[row]

    # All in another order, behind a sequence of NaN and before padding.
    order = rng.permutation(len(stops)).tolist()
    parts = [[nothing(x[0], 70), *(x[i] for i in order)] for x in zip(*chunks, strict=True)]
    offsets = [*map(offsets_of, parts)]
    packed = {name: torch.cat([*x, nothing(x[0], 9)]) for name, x in zip("qkv", parts, strict=True)}
    packed |= {"cu_seqlens_q": offsets[0], "cu_seqlens_kv": offsets[1]}
    out, lse = attend("flash_attention_varlen", **packed, **given)
    for i, at, end in zip(order, offsets[0][1:-1].tolist(), offsets[0][2:].tolist(), strict=True):
        yield i, starts[i], out[at:end], lse[:, at:end]

    # Keys in shuffled pages.
    size = page_size or int(rng.choice((7, 16, 64)))
    most = -(-max(stops) // size) + int(rng.integers(0, 4))
    tables = torch.from_numpy(rng.permutation(most * len(stops) + 2)[: most * len(stops)])
    tables = tables.reshape(-1, most).to(device)
    pools = [nothing(sequences[0][x], tables.numel() + 2, size) for x in (1, 2)]
    for table, (_, *keys) in zip(tables, chunks, strict=True):
        for pool, x in zip(pools, keys, strict=True):
            slots = torch.cat([x, nothing(x, most * size - len(x))])
            pool[table] = slots.reshape(most, size, *x.shape[1:])
    lengths = torch.tensor(stops, dtype=torch.int32, device=device)
    given = given | {"num_splits": [None, 1, 2][rng.integers(3)]}
    given |= dict(zip(("k_pages", "v_pages"), pools, strict=True))
    given |= {"block_tables": tables.int(), "seq_lens": lengths}
    q = [x for x, *_ in chunks]
    new = {"q": torch.cat([*q, nothing(q[0], 5)]), "cu_seqlens_q": offsets_of(q)}
    out, lse = attend("paged_attention", **new, **given)
    for i, at in enumerate(new["cu_seqlens_q"][:-1].tolist()):
        yield i, starts[i], out[at : at + len(q[i])], lse[:, at : at + len(q[i])]

    # As many new tokens of each.
    tokens = min(int(rng.choice((1, 1, 3, 5, 17))), *stops, 64)
    q = torch.stack(
        [x[stop - tokens : stop] for (x, *_), stop in zip(sequences, stops, strict=True)]
    )
    cascade = given["num_splits"] is None and bool(rng.integers(2))
    out, lse = attend("paged_decode", q=q, cascade=cascade, **given)
    for i, stop in enumerate(stops):
        yield i, stop - tokens, out[i], lse[i]


def differences(problem: Problem, found: Iterator[Rows]) -> tuple[int, int, float]:
    """Return how many bytes differ from the sequences alone, of how many, and by how much."""
    differing, total, worst = 0, 0, 0.0
    for i, start, *rows in found:
        for x, whole, axis in zip(rows, problem.expected[i], (0, 1), strict=True):
            expected = whole.narrow(axis, start, x.shape[axis])
            different = x.view(torch.uint8) != expected.view(torch.uint8)
            differing, total = differing + int(different.sum()), total + different.numel()
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


@pytest.mark.parametrize("seed", range(200 if ON_GPU else 6))
@pytest.mark.parametrize("name", SIDES if ON_GPU else ["torch_attn"])
def test_schedules(name, seed, torch_device):
    attend, alone = (attention_of(SIDES[x](torch_device)) for x in (name, "torch_attn"))
    problem = make_problem(
        seed, alone, torch_device, (64, 128)[seed % 2], (1, 4)[seed // 2 % 2], seed % 3
    )
    differing, total, worst = differences(problem, schedule(seed, problem, attend))
    assert differing == 0, f"{differing} of {total} differ"


@pytest.mark.skipif(not ON_GPU, reason="NumPy rounds by shape")
def test_other_blocks_are_noticed(torch_device):
    attend, found = attention_of(SIDES["torch_attn"](torch_device)), 0
    with use_configs({"paged_decode": {"block_kv": 32}}):
        for seed in range(8):
            problem = make_problem(seed, attend, torch_device)
            found += differences(problem, schedule(seed, problem, attend))[0]
    assert found


CASES = {
    "dense": FlashCase("", heads_q=2, heads_kv=1, causal=True, batch_invariant=True, sinks=True),
    "cross": FlashCase("", 1, 70, 130, window_size=(9, 30), batch_invariant=True, row_max=True),
    "wide": FlashCase("", heads_q=3, heads_kv=1, head_dim=24, head_dim_v=88, batch_invariant=True),
    "packed": VarlenCase("", dtype="float16", window_size=(20, 0), batch_invariant=True),
    "chunks": PagedCase("", (70, 0, 9), new_tokens=(20, 0, 9), padding=2, batch_invariant=True),
    "spans": DecodeCase(
        "", (2100,), tokens=2, page_size=64, max_pages=40, num_splits=2, sinks=True,
        batch_invariant=True,
    ),
    "scale": DecodeCase("", (70, 0, 128, 1), tokens=17, scale=-0.2, batch_invariant=True),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
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


def test_all_configurations_have_the_same_blocks():
    found = []
    for target, name in product(TARGETS, ("flash_fwd", "paged_decode", "paged_attention")):
        rows = load_table(table_path("torch_attn", target))[name]
        found += [vars(x.config) for x in rows if "batch invariant" in dict(x.key)["when"]]
    assert {x["block_kv"] for x in found} == {64}
    assert SPAN % 64 == 0
    for (
        config
    ) in found:  # then Triton gives a warp 16 rows, all keys of a block and all of v's columns
        rows = config.get("block_q") or config["max_rows"]
        assert config["num_warps"] == rows // 16
        assert rows in (16, 64, 128)


@pytest.mark.parametrize("target", TARGETS)
def test_no_two_warps_share_a_row(target):
    for spec in (
        paged_spec("bfloat16", 128, max_pages=8),
        decode_spec("bfloat16", 64, 2, 4, tokens=16, max_pages=8),
        decode_spec("bfloat16", 128, 2, 4, tokens=32, max_pages=8),
    ):
        _, _, found = compile_kernels(replace(spec, batch_invariant=True), target)[0]
        warps = re.findall(r"nvidia_mma<.*?warpsPerCTA = \[\d+, (\d+)\]", found.asm["ttgir"])
        assert {*warps} == {"1"}


REFUSED = {
    "takes no segment ids": FlashCase("", segments="documents", causal=True),
    "alibi_slopes and dropout": FlashCase("", dropout_rate=0.1),
    "head dimensions up to 128": FlashCase("", head_dim=136),
    "values in float16 and bfloat16": DecodeCase("", kv_dtype="int8"),
    "takes no tree_ends": DecodeCase("", tokens=3, tree="drafts"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_kernels_lack_is_refused(reason):
    case = replace(REFUSED[reason], batch_invariant=True)
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        TRITON.start()(case, make_inputs(case, "cpu"))


@pytest.mark.parametrize("name", ["dense", "chunks"])
def test_no_other_kernels_run(name):
    """None would be the reference."""
    inputs = make_inputs(CASES[name], "cpu")
    for side, other in product(("torch_attn", "pallas_attn"), (None, "reference")):
        with pytest.raises(NotImplementedError, match="its rounding follows the shape"):
            Ours(side, other).start()(CASES[name], inputs)  # pyright: ignore[reportArgumentType]


def test_jax_without_torch_says_so(monkeypatch):
    monkeypatch.setattr(in_jax, "find_spec", lambda name: None)
    q = jax.ShapeDtypeStruct((1, 4, 2, 64), jnp.bfloat16)
    attend = partial(pallas_attn.flash_attention, batch_invariant=True)
    with pytest.raises(NotImplementedError, match=r"torch_triton.*is not installed"):
        jax.eval_shape(partial(attend, implementation="torch_triton"), q, q, q)
