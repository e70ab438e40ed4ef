import gc
import sys
import weakref
from dataclasses import replace
from functools import reduce
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_attn
from tests import fresh
from tests.oracle import assert_within_budget, poison_padding
from tests.torch_attn.context_processes import check_on_cpu
from torch_attn.dispatch import choose
from torch_attn.distributed import (
    context,
    context_attention,
    context_plan,
    shard_sequence,
    unshard_sequence,
)
from torch_attn.distributed.context import RankCall
from torch_attn.distributed.sums import GradientSums
from torch_attn.interpreter import interpreted
from torch_attn.kernels.sum import sum_rows, sum_rows_kernel
from twin_attention.contract.context import LAYOUTS
from twin_attention.contract.spec import Window
from twin_attention.contract.transfers import EXCHANGES, Rows
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.ranks import Room, SimulatedPeers, run_ranks

CASE = FlashCase("", batch=2, seq_q=96, seq_kv=96, heads_q=4, heads_kv=2, head_dim=16, causal=True)
CASES = {
    "causal": replace(CASE, heads_q=2, heads_kv=1),
    "full": replace(CASE, batch=1, causal=False),
    "window": replace(CASE, batch=1, window_size=(11, None)),
    "both-sides": replace(CASE, causal=False, window_size=(9, 5), head_dim_v=24),
    "all-options": replace(
        CASE, batch=1, dtype="float16", softcap=4.0, sinks=True, scale=0.3, window_size=(30, None)
    ),
    "float32": replace(CASE, dtype="float32", sinks=True),
}
DOCUMENTS = (0, 13, 13, 60, 61, 90)


@pytest.fixture
def ranks():
    return run_ranks


def problem(case, plan, device):
    """The plan's documents are segment ids."""
    inputs, spec = make_inputs(case, device), case.spec
    if plan.cu_seqlens is not None:
        ids = torch.from_numpy(plan.document_ids).to(device).expand(case.batch, -1).contiguous()
        inputs |= {"q_segment_ids": ids, "kv_segment_ids": ids}
        spec = replace(spec, segmented=True)
        poison_padding(inputs)
    return inputs, spec


def attend(run, case, plan, inputs, **options):

    def on_rank(peers):
        def share(name, axis=1):
            x = shard_sequence(inputs[name], plan, peers.rank, axis).contiguous()
            return x.requires_grad_() if name in "qkv" else x

        operands = [share(name) for name in "qkv"]
        sinks = inputs.get("sinks")
        if sinks is not None:
            sinks = sinks.detach().clone().requires_grad_()
        out, lse = context_attention(
            *operands, plan=plan, mesh=peers, sinks=sinks, return_lse=True,
            **case.options | options,
        )  # fmt: skip
        gradients = torch.autograd.grad(
            (out, lse),
            [x for x in (*operands, sinks) if x is not None],
            (share("dout"), share("dlse", 2)),
        )
        return out, lse, *gradients

    results = list(zip(*run(plan.size, on_rank), strict=True))
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    whole = {
        name: unshard_sequence(xs, plan, 2 if name == "lse" else 1)
        for name, xs in zip(names, results, strict=False)
        if name != "dsinks"
    }
    if len(results) == 6:
        whole["dsinks"] = torch.stack(results[5]).sum(0)
    return {name: x.detach() for name, x in whole.items()}


# Kernels run each case once on a CPU, most on two ranks. In a ring they start from another call's
# result, on four ranks from the result of such a call.
IN_A_RING = {"causal": 2, "window": 2, "all-options": 4}
RUNS = [(*run, 4, "reference") for run in product(CASES, ("ring", "gather"))]
RUNS += [(name, "ring", size, "triton") for name, size in IN_A_RING.items()]
RUNS += [(name, "gather", 2, "triton") for name in CASES if name not in IN_A_RING]


@pytest.mark.parametrize(("name", "exchange", "size", "implementation"), RUNS)
def test_cases(ranks, name, exchange, size, implementation, torch_device):
    plan = context_plan(96, size)
    inputs, spec = problem(CASES[name], plan, torch_device)
    got = attend(ranks, CASES[name], plan, inputs, exchange=exchange, implementation=implementation)
    assert_within_budget(got, inputs, spec)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "stripe", "balanced"])
@pytest.mark.parametrize("exchange", ["ring", "gather", "heads"])
def test_layouts(ranks, exchange, layout, documents, torch_device):
    plan = context_plan(96, 2, layout, documents)
    case = replace(CASE, sinks=True)
    inputs, spec = problem(case, plan, torch_device)
    got = attend(ranks, case, plan, inputs, exchange=exchange)
    assert_within_budget(got, inputs, spec)


@st.composite
def problems(draw):
    size, exchange = draw(st.integers(1, 8)), draw(st.sampled_from(EXCHANGES))
    layout = draw(st.sampled_from(LAYOUTS))
    seq_len = 2 * size * draw(st.integers(1, 20))
    ends = draw(st.none() | st.lists(st.integers(0, seq_len), min_size=1, max_size=5))
    heads_kv = draw(st.integers(1, 2)) * (size if exchange == "heads" else 1)
    causal = draw(st.booleans())
    left, right = draw(st.none() | st.integers(0, seq_len)), None
    if not causal:
        right = draw(st.none() | st.integers(0, 30))
    case = FlashCase(
        draw(st.text("abc", min_size=8, max_size=8)), 1, seq_len, seq_len,
        heads_kv * draw(st.integers(1, 2)), heads_kv, draw(st.sampled_from([16, 24])),
        draw(st.sampled_from([None, 32])), draw(st.sampled_from(["bfloat16", "float32"])), causal,
        window_size=(left, right), softcap=draw(st.none() | st.just(3.0)),
        sinks=draw(st.booleans()),
    )  # fmt: skip
    plan = context_plan(seq_len, size, layout, None if ends is None else (0, *sorted(ends)))
    return case, plan, exchange


@given(problem_of=problems())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_problems(ranks, problem_of, torch_device):
    case, plan, exchange = problem_of
    inputs, spec = problem(case, plan, torch_device)
    got = attend(ranks, case, plan, inputs, exchange=exchange)
    assert_within_budget(got, inputs, spec)


def test_the_same_bits_every_time(ranks, torch_device):
    plan = context_plan(96, 4)
    inputs, _ = problem(CASE, plan, torch_device)
    first, second = (attend(ranks, CASE, plan, inputs, exchange="ring") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_a_rank_sends_what_is_needed_alone(ranks, monkeypatch, exchange, torch_device):
    """The next rank sees one block of a rank's 256 keys."""
    plan, routes = context_plan(1024, 4, "contiguous"), []
    original = SimulatedPeers.exchange

    def counted(self, tensors, sent, received, of_gradients=False):
        routes.append((self.rank, of_gradients, sent, received))
        return original(self, tensors, sent, received, of_gradients)

    monkeypatch.setattr(SimulatedPeers, "exchange", counted)
    sizes = {"batch": 1, "seq_q": 1024, "seq_kv": 1024, "heads_q": 1, "heads_kv": 1}
    case = replace(CASE, **sizes, window_size=(40, None))
    inputs, spec = problem(case, plan, torch_device)
    got = attend(ranks, case, plan, inputs, exchange=exchange, implementation="reference")
    assert_within_budget(got, inputs, spec)
    found = [
        (to_earlier, rank, rows.rank, rows.end - rows.start)
        for rank, to_earlier, sent, _ in routes
        for rows in sent
    ]
    keys = [(False, rank, rank + 1, 128) for rank in range(3)]
    gradients = [(True, rank + 1, rank, 128) for rank in range(3)]
    assert sorted(found) == sorted([*keys, *keys, *gradients])  # keys forward and backward


@pytest.mark.parametrize("fault", ["stale keys", "no window", "16 bits", "own gradients"])
def test_faults_are_found(ranks, monkeypatch, fault, torch_device):
    """Faults seen in ring attentions elsewhere are above the budget."""
    hops, send_back, run = RankCall.hops, RankCall.send_back, RankCall.run
    steps = context._steps

    def stale(self, operation, q, k, v):
        for *step, operands in hops(self, operation, q, k, v):
            yield *step, operands and operands._replace(k=k, v=v)

    def rounded(self, operation, *tensors):
        found = run(self, operation, *tensors)
        if operation != "partial_fwd":
            return found
        out, lse = found
        return out.bfloat16().to(out.dtype), lse

    if fault == "stale keys":
        monkeypatch.setattr(RankCall, "hops", stale)
    if fault == "no window":
        monkeypatch.setattr(
            context, "_steps", lambda plan, window, *a: steps(plan, Window(None, 0), *a)
        )
    if fault == "16 bits":
        monkeypatch.setattr(RankCall, "run", rounded)
    if fault == "own gradients":
        monkeypatch.setattr(RankCall, "send_back", lambda self, x, dx: send_back(self, x, dx[::-1]))
    plan = context_plan(96, 4)
    case = replace(CASE, window_size=(40, None), dtype="float32")
    inputs, spec = problem(case, plan, torch_device)
    got = attend(ranks, case, plan, inputs, exchange="ring")
    with pytest.raises(AssertionError):
        assert_within_budget(got, inputs, spec)


def tensors(rows=24, heads=4, heads_kv=2, dtype=torch.float32):
    shapes = ((1, rows, heads, 16), (1, rows, heads_kv, 16), (1, rows, heads_kv, 16))
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: c.update(plan=context_plan(96, 2)), ValueError, "plan: expected a plan for"),
        (lambda c: c.update(plan=3), TypeError, "plan: expected a ContextPlan"),
        (lambda c: c.update(operands=tensors(rows=20)), ValueError, "q: expected the plan's 24"),
        (lambda c: c.update(exchange="all"), ValueError, "exchange: expected None or one of"),
        (lambda c: c.update(exchange="heads"), ValueError, "k: expected heads that 4 ranks share"),
        (lambda c: c.update(softcap=-1.0), ValueError, "softcap: expected"),
        (lambda c: c.update(implementation="gluon"), NotImplementedError, "implementation: expec"),
    ],
)
@pytest.mark.parametrize("whose", [None, 2], ids=["all", "one-rank"])
def test_bad_calls(ranks, change, error, message, whose):
    """Every rank raises, before anything is exchanged."""

    def on_rank(peers):
        call = {"plan": context_plan(96, 4), "operands": tensors(), "causal": True}
        if whose in (None, peers.rank):
            change(call)
        with pytest.raises(error, match=message):
            context_attention(*call.pop("operands"), mesh=peers, **call)

    ranks(4, on_rank)


@pytest.mark.parametrize("option", ["causal", "softcap", "dtype", "plan"])
def test_ranks_that_disagree(ranks, option):
    def on_rank(peers):
        call = {"plan": context_plan(96, 4), "causal": False}
        dtype = torch.float32
        if peers.rank == 1:
            dtype = torch.bfloat16 if option == "dtype" else dtype
            other = {"causal": True, "softcap": 2.0, "plan": context_plan(96, 4, "stripe")}
            call |= {option: other[option]} if option in other else {}
        with pytest.raises(ValueError, match="context_attention: expected rank 0's call on all"):
            context_attention(*tensors(dtype=dtype), mesh=peers, **call)

    ranks(4, on_rank)


def test_a_call_that_was_agreed_on_is_not_checked_again(ranks, monkeypatch):
    peers = SimulatedPeers(Room(1), 0)
    call = {"plan": context_plan(24, 1), "mesh": peers, "causal": True}
    first = context_attention(*tensors(), **call)
    check, checked = context._check, []
    monkeypatch.setattr(context, "_check", lambda *a: checked.append(1) or check(*a))
    assert torch.equal(context_attention(*tensors(), **call), first)
    assert not checked
    with pytest.raises(TypeError, match="causal: expected"):
        context_attention(*tensors(), **call | {"causal": 1})
    with torch.autocast("cpu", torch.bfloat16):
        assert context_attention(*tensors(), **call).dtype == torch.bfloat16
    context_attention(*tensors(dtype=torch.float16), **call)
    assert len(checked) == 3
    for exchange in ("ring", "ring", "gather", "gather"):  # one of them was chosen before
        context_attention(*tensors(), **call, exchange=exchange)
    assert len(checked) == 5


def test_processes(tmp_path):
    fresh.run(check_on_cpu, tmp_path / "store")


def test_derivatives_that_are_refused(ranks):
    def on_rank(peers):
        q, k, v = (x.requires_grad_() for x in tensors())
        out = context_attention(q, k, v, plan=context_plan(24, 1), mesh=peers)
        with pytest.raises(NotImplementedError, match="context_attention: a second derivative"):
            torch.autograd.grad(out.sum(), q, create_graph=True)

    ranks(1, on_rank)


@pytest.mark.parametrize(
    ("options", "kernel_heads", "exchange"),
    [
        ({"exchange": "ring"}, 4, "ring: it was asked for; keys of other ranks come in 3 of up to"),
        ({"exchange": "ring", "window_size": (3, None)}, 4, "keys of other ranks come in 2 of up"),
        (
            {},
            4,
            "gather: by estimate a forward takes 0.54 ms in a ring, and 0.41 ms after a gather",
        ),
        ({"exchange": "heads"}, 1, "heads: it was asked for"),
    ],
)
def test_explain(monkeypatch, options, kernel_heads, exchange):
    seen = []
    monkeypatch.setattr(
        sys.modules["torch_attn.dispatch"], "choose", lambda *a: seen.append(a[1::2]) or choose(*a)
    )
    plan, (q, k, v) = context_plan(96, 4), tensors(heads_kv=4)
    peers = SimulatedPeers(Room(4), 1)  # which would wait for the others
    call = {"plan": plan, "mesh": peers, "causal": True, "implementation": "triton"}
    said = torch_attn.explain(context_attention, q, k, v, **call | options)
    assert exchange in str(said)
    assert {"flash_fwd", "flash_bwd_preprocess", "flash_bwd_dq"} <= said.configs.keys()
    (operation, spec), _ = seen
    whole = exchange.startswith("heads")
    assert operation == ("flash_fwd" if whole else "partial_fwd")
    assert (spec.heads_q, spec.seq_q) == (kernel_heads, 96 if whole else 24)
    assert spec.seq_kv == (24 if "ring" in options.values() else 96)


@pytest.mark.parametrize("count", [0, 1, 3, 5, 12])
def test_sums_of_gradients(count, torch_device):
    """In float32, in the order in which they come, a few in a pass."""
    whole = torch.randn(count, 2, 2, 500, 3, 8, device=torch_device)
    every, sums = (Rows(0, 0, 500, 0),), GradientSums(500)
    for x in whole:
        sums.add(tuple(x), every)
        sums.add(None, ())
    part = torch.randn(2, 2, 50, 3, 8, device=torch_device)
    of_two = Rows(1, 5, 25, 100, 0), Rows(1, 25, 35, 400, 20), Rows(2, 0, 20, 405, 30)
    sums.add(tuple(part), of_two)
    expected = reduce(torch.add, whole, torch.zeros(2, 2, 500, 3, 8, device=torch_device))
    expected[:, :, 100:120] += part[:, :, :20]
    expected[:, :, 400:410] += part[:, :, 20:30]
    expected[:, :, 405:425] += part[:, :, 30:]
    assert torch.equal(torch.stack(sums.total(torch.float32)), expected)


def test_sum_kernel():
    """Some rows are not read."""
    xs = tuple(torch.randn(2, rows, 5, 24) for rows in (4, 9))
    xs[1][:, 3] = torch.nan
    places = torch.tensor([2, -1, 0]).int(), torch.tensor([8, 0, -1]).int()
    out = torch.full((2, 3, 5, 24), torch.nan, dtype=torch.bfloat16)
    strides = tuple(x.stride(0) for x in xs)
    interpreted(sum_rows_kernel)[(6,)](out, xs, places, strides, 3, 120, 64)
    assert torch.equal(out, sum_rows(xs, places, torch.bfloat16))
    assert torch.equal(out[:, 0], (xs[0][:, 2] + xs[1][:, 8]).bfloat16())


def test_what_ranks_agreed_on_is_bounded_and_ends_with_them(ranks, monkeypatch):
    """Two shapes at most; all ranks forget them together, or they would wait for each other."""
    monkeypatch.setattr(context, "AGREED_MAX", 2)

    def on_rank(peers):
        for tokens in (4, 8, 4, 12, 8, 16, 4):
            plan = context_plan(2 * tokens, 2)
            q, k, v = torch.randn(3, 1, tokens, 2, 16)
            context_attention(q, k, v, plan=plan, mesh=peers, implementation="reference")
        agreed = context.AGREED[peers.group]
        return weakref.ref(peers.group), len(agreed.said), len(agreed.calls)

    for group, *sizes in ranks(2, on_rank):
        assert max(sizes) <= 2
        gc.collect()
        assert group() is None
