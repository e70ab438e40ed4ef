"""Context parallel attention: the ranks of a group share a sequence's tokens.

docs/context-parallel.md describes "ring" (Liu et al. 2023, Ring Attention), "gather" and "heads"
(Jacobs et al. 2023, DeepSpeed Ulysses). In a ring keys come from the rank that holds them, and
their gradients go back to it directly; in a gather gradients are summed where the keys are held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_attn.autograd import refuse_forward_mode, refuse_second_derivative
from torch_attn.calls import CALLS, Call, Kept
from torch_attn.dispatch import Implementation, check_implementation, choose
from torch_attn.distributed.copies import ALIGNMENT, Sizes
from torch_attn.distributed.peers import GroupPeers, Peers, Transfer
from torch_attn.distributed.sums import GradientSums
from torch_attn.explain import PROBLEMS
from torch_attn.flash import flash_attention
from torch_attn.flash_ops import or_as_torch_says
from torch_attn.operands import autocast_dtype, cast_inputs, in_float32, operand, rows_aligned
from torch_attn.operators import readable
from twin_attention.contract.context import ContextPlan, Intervals
from twin_attention.contract.operands import (
    FlashOperands,
    GradientCarry,
    PartialOperands,
    describe_operands,
)
from twin_attention.contract.spec import AttentionSpec, FlashOptions, PartialSpec, Precision, Window
from twin_attention.contract.transfers import (
    EXCHANGES,
    Rows,
    Step,
    choose_exchange,
    describe_exchange,
    exchange_steps,
    problem_of_rank,
)
from twin_attention.contract.validate.context import (
    check_context_attention,
    check_exchange,
    check_group,
)
from twin_attention.contract.validate.errors import fail, type_name
from twin_attention.contract.validate.options import check_flash_options
from twin_attention.targets.family import Backend

Exchange = Literal["ring", "gather", "heads"]


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: ContextPlan,
    mesh: Any,
    exchange: Exchange | None = None,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    precision: Precision = "ieee",
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention over a sequence whose tokens are spread over the ranks of a group.

    A token's result is that of `flash_attention` over the whole sequence, or of
    `flash_attention_varlen` if the plan has documents. Each rank calls it with its own tokens.
    Partial results stay in float32 until the end.

    The first call with new shapes or options compares them over the group, and every rank raises
    the same error if they differ. If a rank fails later, the others end by the group's timeout.
    Differentiable once, in reverse mode; the backward exchanges the keys again.

    Args:
        q: [B, S, Hq, D], the rank's queries in the plan's order, S = ``plan.local_len``; otherwise
            as in `flash_attention`.
        k: [B, S, Hkv, D], the rank's keys.
        v: [B, S, Hkv, Dv].
        plan: `context_plan`, the same on every rank. Padding after its last document gives 0 and
            may hold NaN.
        mesh: a one-dimensional `DeviceMesh`, a process group, or `Peers` that exchange in their own
            way, of ``plan.size`` ranks.
        exchange: "ring", "gather", or "heads", which needs query heads and kv heads that the ranks
            share evenly; None: "ring" or "gather", by an estimate of their times.
        causal, scale, window_size, softcap, precision, return_lse: as in `flash_attention`, with
            positions in the whole sequence.
        sinks: [Hq], as in `flash_attention`, the same on every rank. Its gradient is this rank's
            share of a sum over ranks.
        deterministic: True: the same number of ranks gives the same bits every time.
        implementation: as in `flash_attention`; "ring" and "gather" support "gluon" on SM90,
            "triton" and "reference".

    Returns:
        out [B, S, Hq, Dv] in q's dtype; with `return_lse` the pair (out, lse), lse [B, Hq, S].

    Raises:
        TypeError: an argument of the wrong type or dtype, on any rank.
        ValueError: shapes that contradict each other or the plan, a plan that does not fit the
            group, ranks that do not agree.
        NotImplementedError: as in `flash_attention`.

    Source: Liu et al. 2023 (Ring Attention, arXiv 2310.01889).

    Example::

        import torch
        import torch.distributed as dist
        from torch_attn.distributed import context_attention, context_plan

        # One rank. With torchrun: dist.init_process_group("nccl").
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        plan = context_plan(seq_len=64, size=dist.get_world_size())
        q, k, v = torch.randn(3, 1, plan.local_len, 4, 32)
        out = context_attention(q, k, v, plan=plan, mesh=dist.group.WORLD, causal=True)
        dist.destroy_process_group()
    """
    peers = mesh if isinstance(mesh, Peers) else GroupPeers(mesh)
    deterministic = or_as_torch_says(deterministic)
    options = causal, scale, window_size, softcap, deterministic, precision, return_lse
    call, tensors = _agree(peers, plan, (q, k, v, sinks), options, exchange, implementation)
    peers.at_once = call.exchange == "gather"
    problem = RankCall(peers, call, plan)
    attend = _attend_heads if call.exchange == "heads" else _ContextAttention.apply
    is_token = _tokens(plan, peers.rank, tensors[0].device)
    if is_token is None:
        out, lse = attend(problem, *tensors)
    else:  # padding, and the gradient of its output, may be NaN
        row = is_token[:, None, None]
        q, k, v = (torch.where(row, x, 0) for x in tensors[:3])
        out, lse = attend(problem, q, k, v, tensors[3])
        out = torch.where(row, out, 0)
    return (out, lse) if return_lse else out


class _ContextCall(NamedTuple):
    options: FlashOptions
    spec: PartialSpec
    exchange: str
    implementation: Implementation | None


class _Agreed(NamedTuple):
    """The calls that all ranks of a group have agreed on.

    `said` has their descriptions, which all ranks forget together; `calls` is keyed by the
    arguments as given.
    """

    said: set[tuple[Any, ...]]
    calls: Kept


AGREED: WeakKeyDictionary[Any, _Agreed] = WeakKeyDictionary()  # by group
AGREED_MAX = 1024


def _agree(
    peers: Peers,
    plan: Any,
    tensors: tuple[Any, ...],
    options: tuple[Any, ...],
    exchange: str | None,
    implementation: Implementation | None,
) -> tuple[_ContextCall, tuple[Any, ...]]:
    """Check a call, the first time on all ranks, each of which raises the first rank's error."""
    agreed = AGREED.setdefault(peers.group, _Agreed(set(), Kept(AGREED_MAX)))
    key = None
    plain = [type(x) in (Tensor, Parameter) for x in tensors]
    if isinstance(plan, ContextPlan) and all(plain[:3]) and (plain[3] or tensors[3] is None):
        given = repr((options, exchange, implementation))  # 1 is not True
        layouts = (x if x is None else (x.shape, x.dtype, x.device) for x in tensors)
        key = plan, given, *layouts, autocast_dtype(tensors[0].device)
        if key in agreed.calls:
            return agreed.calls[key], (*cast_inputs(*tensors[:3]), in_float32(tensors[3]))
    checked, said, error = None, None, None
    try:
        checked = _check(peers, plan, tensors, options, exchange, implementation)
    except (TypeError, ValueError, NotImplementedError) as found:
        error = found
    if checked is not None:
        call, used = checked
        said = (plan, call.options, call.exchange, implementation, *map(_described, used))
        if said in agreed.said:
            if key is not None:
                agreed.calls[key] = call
            return checked
    everyone = peers.gather_objects((repr(said), error))
    for rank, (_, found) in enumerate(everyone):
        if found is not None:
            raise error or type(found)(f"rank {rank}: {found}")
    for other, _ in everyone:
        if other != everyone[0][0]:
            fail(ValueError, "context_attention", f"rank 0's call on all: {everyone[0][0]}", other)
    assert checked is not None
    assert said is not None
    call, used = checked
    if call.exchange != "heads":
        peers.prepare(used[0].device, _sizes(call, plan, peers.rank, used))
    if len(agreed.said) >= AGREED_MAX:
        agreed.said.clear()
        agreed.calls.clear()
    agreed.said.add(said)
    if key is not None:
        agreed.calls[key] = call
    return checked


def _sizes(call: _ContextCall, plan: ContextPlan, rank: int, tensors: tuple[Any, ...]) -> Sizes:
    """Return the most that a rank receives, with room to align rows."""
    _, k, v, _ = tensors
    steps = exchange_steps(plan, call.options.window, call.exchange, rank)
    numbers = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])
    keys = max((step.num_keys for step in steps), default=0)
    gathered = max((sum(x.end - x.start for x in step.gathered) for step in steps), default=0)
    rows_of = (keys, k.dtype.itemsize), (gathered, torch.float32.itemsize)
    bytes_ = ((rows + 2 * ALIGNMENT) * numbers * size for rows, size in rows_of)
    return Sizes(*bytes_, at_once=call.exchange == "gather")


def _described(x: Tensor | None) -> Any:
    return x if x is None else (tuple(x.shape), str(x.dtype))


def _check(
    peers: Peers,
    plan: Any,
    tensors: tuple[Any, ...],
    given: tuple[Any, ...],
    exchange: str | None,
    implementation: Implementation | None,
) -> tuple[_ContextCall, tuple[Any, ...]]:
    options = check_flash_options(*given)
    if not isinstance(plan, ContextPlan):
        fail(TypeError, "plan", "a ContextPlan of `context_plan`", type_name(plan))
    check_group(plan.size, peers.size)
    check_implementation(implementation)
    q, k, v = cast_inputs(*tensors[:3])
    operands = FlashOperands(q, k, v, in_float32(tensors[3]))
    described = describe_operands(operands, operand)
    check_context_attention(described, options, plan.local_len)
    check_exchange(exchange, EXCHANGES, (q.shape[2], k.shape[2]), plan.size)
    spec = PartialSpec.of(PartialOperands(*described[:3], *[None] * 4), described.q.dtype, options)
    chosen, _ = choose_exchange(exchange, plan, options.window, spec)
    if chosen == "gather":
        (step,) = exchange_steps(plan, options.window, chosen, peers.rank)
        spec = replace(spec, seq_kv=step.num_keys)
    if chosen != "heads":
        choose(implementation, "partial_fwd", q.device, spec)
    return _ContextCall(options, spec, chosen, implementation), tuple(operands[:4])


def problem_of_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Any,
    mesh: Any,
    exchange: str | None,
    sinks: Tensor | None,
    **options: Any,
) -> tuple[tuple[Any, ...], AttentionSpec, str]:
    """Check a call on this rank; return its tensors, its problem, and how ranks exchange keys."""
    peers = mesh if isinstance(mesh, Peers) else GroupPeers(mesh)
    names = ("causal", "scale", "window_size", "softcap", "deterministic", "precision")
    given = *(options[name] for name in names), options["return_lse"]
    call, tensors = _check(peers, plan, (q, k, v, sinks), given, exchange, None)
    spec, window = call.spec, call.options.window
    said = describe_exchange(exchange, plan, window, spec)
    if call.exchange == "heads":
        spec = problem_of_rank(call.exchange, spec, plan, call.options)
    return tensors, spec, said


PROBLEMS[context_attention] = problem_of_context  # of `explain`


class _DeviceStep(NamedTuple):
    """A `Step` whose arrays are on a device.

    Attributes:
        order, inverse: of its keys, if not in the sequence's order.
        own: the rows of this rank's own keys in it.
        is_own: it has no others.
    """

    step: Step
    order: Tensor | None
    inverse: Tensor | None
    intervals: Intervals
    own: tuple[Rows, ...]
    is_own: bool


@lru_cache(maxsize=256)
def _steps(
    plan: ContextPlan, window: Window, exchange: str, rank: int, device: torch.device
) -> tuple[_DeviceStep, ...]:
    found = []
    for step in exchange_steps(plan, window, exchange, rank):
        order = step.order if step.order is None else torch.from_numpy(step.order).to(device)
        intervals = Intervals(*(torch.from_numpy(x).to(device) for x in step.intervals))
        inverse = None if order is None else order.argsort()
        own = tuple(rows for rows in step.received if rows.rank == rank)
        is_own = (step.received == own and len(own) == 1) or not plan.seq_len
        found.append(_DeviceStep(step, order, inverse, intervals, own, is_own))
    return tuple(found)


class _Numbered(NamedTuple):
    """A problem and its number, which is faster to look up."""

    spec: PartialSpec
    number: int


_numbers = count()


@lru_cache(maxsize=4096)
def _part(spec: PartialSpec) -> _Numbered:
    return _Numbered(spec, next(_numbers))


@lru_cache(maxsize=1024)
def _parts(
    call: _ContextCall, plan: ContextPlan, rank: int, aligned: bool, operation: str
) -> tuple[_Numbered, ...]:
    steps = exchange_steps(plan, call.options.window, call.exchange, rank)
    with_keys = [step for step in steps if step.received] or steps
    found = []
    for step in steps:
        spec = replace(call.spec, seq_kv=step.num_keys, rows_aligned=aligned)
        if operation == "partial_fwd":
            spec = replace(spec, first=step is with_keys[0], last=step is with_keys[-1])
        found.append(_part(spec))
    return tuple(found)


@lru_cache(maxsize=256)
def _order(plan: ContextPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each token's row in the order rank after rank, and the inverse."""
    order = torch.from_numpy(plan.order).to(device)
    return order, order.argsort()


class RankCall(NamedTuple):
    """Hold what a call's hops have in common; a fixed `aligned` lets one family run all hops."""

    peers: Peers
    call: _ContextCall
    plan: ContextPlan
    aligned: bool = True

    @property
    def window(self) -> Window:
        return self.call.options.window

    def run(self, operation: str, part: _Numbered, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Run "partial_fwd", "partial_bwd" or "partial_dq"; replay a known call."""
        # Each part has its own calls, so that a call is found at once.
        options = part.number, tuple([x is None for x in tensors]), self.call.implementation
        call = CALLS.find(operation, tensors, options)
        if call is None:
            first = tensors[0]
            assert first is not None
            call = Call(operation, _RUN[operation], part.spec, first.device, options)
            CALLS.keep(operation, tensors, options, call)
        return call(*tensors)

    def hops(
        self, operation: str, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[_DeviceStep, _Numbered, PartialOperands[Tensor] | None]]:
        """Yield each step, the operation on its keys, and its operands, None if it has no keys.

        The next keys travel meanwhile. A backward ends with its own, while the last gradients go
        back.
        """
        call, peers = self.call, self.peers
        steps = _steps(self.plan, self.window, call.exchange, peers.rank, q.device)
        parts = _parts(call, self.plan, peers.rank, self.aligned, operation)
        if operation == "partial_bwd":
            steps, parts = (*steps[1:], steps[0]), (*parts[1:], parts[0])
        transfer = self._fetch(steps[0], k, v)
        for step, part, following in zip(steps, parts, (*steps[1:], None), strict=True):
            arrived = transfer.wait()
            if following is not None:
                transfer = self._fetch(following, k, v)
            if arrived is not None and step.order is not None:
                arrived = tuple(x.index_select(1, step.order) for x in arrived)
            yield step, part, None if arrived is None else _operands(q, arrived, step.intervals)

    def _fetch(self, step: _DeviceStep, k: Tensor, v: Tensor) -> Transfer:
        keys, sent, received = (k, v), step.step.sent, step.step.received
        if not step.is_own and (sent or received):
            return self.peers.exchange(keys, sent, received)
        arrived = keys if step.is_own else None
        if not sent:
            self.peers.skip(k.device)
            return Transfer(arrived)
        return self.peers.exchange(keys, sent, ())._replace(received=arrived)

    def send_back(self, step: _DeviceStep, gradients: tuple[Tensor, ...]) -> Transfer:
        """Begin to send gradients of a step's keys to their holders, and to receive."""
        _, _, _, _, returned, gathered = step.step
        if not returned and not gathered:
            self.peers.skip(gradients[0].device, of_gradients=True)
            return Transfer(None)
        return self.peers.exchange(gradients, returned, gathered, of_gradients=True)


def _operands(q: Tensor, keys: tuple[Tensor, ...], bounds: Intervals) -> PartialOperands[Tensor]:
    k, v = keys
    return PartialOperands(q, k, v, *bounds)


def _run_forward(
    function: Any, spec: PartialSpec, backend: Backend, *tensors: Any
) -> tuple[Tensor, ...]:
    *operands, carry, lse = tensors
    return function(PartialOperands(*operands), carry, lse, spec, backend)


def _run_backward(
    function: Any,
    spec: PartialSpec,
    backend: Backend,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *others: Any,
) -> tuple[Tensor, ...]:
    """Return the new carry's tensors, dk and dv; `others` holds the last carry, then operands."""
    operands = PartialOperands(*others[len(_NO_CARRY) :])
    carry = None if others[0] is None else GradientCarry(*others[: len(_NO_CARRY)])
    carry, dk, dv = function(dout, dlse, operands, out, lse, carry, spec, backend)
    return *carry, dk, dv


def _run_dq(
    function: Any, spec: PartialSpec, backend: Backend, like: Tensor, *carry: Tensor
) -> tuple[Tensor]:
    return (function(like, GradientCarry(*carry), spec, backend),)


_NO_CARRY = (None,) * len(GradientCarry._fields)
_RUN = {"partial_fwd": _run_forward, "partial_bwd": _run_backward, "partial_dq": _run_dq}


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem, q, k, v, sinks):
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        saved = q, k, v, sinks
        # This rank's keys need the same layout as other ranks', so that the last call is found at
        # once.
        q, k, v = q.detach(), k.detach().contiguous(), v.detach().contiguous()
        problem = problem._replace(aligned=rows_aligned(q, k, v))
        out = lse = None
        for _, part, operands in problem.hops("partial_fwd", q, k, v):
            if operands is not None:
                operands = operands._replace(sinks=sinks if part.spec.first else None)
                out, lse = problem.run("partial_fwd", part, *operands, out, lse)
        ctx.save_for_backward(*saved, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if torch.is_grad_enabled():
            refuse_second_derivative("context_attention")
        problem: RankCall = ctx.problem
        q, k, v, sinks, out, lse = ctx.saved_tensors
        q, k, v = q.detach(), k.detach().contiguous(), v.detach().contiguous()
        dout, dlse = readable(torch.zeros_like(out) if dout is None else dout, dlse)
        out, lse = readable(out, lse)
        problem = problem._replace(aligned=rows_aligned(q, k, v, dout, out))
        carry, of_keys = _NO_CARRY, GradientSums(k.shape[1])
        arriving, rows = Transfer(None), ()
        for step, part, operands in problem.hops("partial_bwd", q, k, v):
            if operands is None:
                gradients = tuple(x[:, :0].float() for x in (k, v))
            else:
                tensors = (dout, dlse, out, lse, *carry, *operands)
                *carry, dk, dv = problem.run("partial_bwd", part, *tensors)
                gradients = dk, dv
            if step.inverse is not None:
                gradients = tuple(x.index_select(1, step.inverse) for x in gradients)
            following = problem.send_back(step, gradients)
            of_keys.add(arriving.wait(), rows)
            of_keys.add(gradients if step.own else None, step.own)
            arriving, rows = following, step.step.gathered
        of_keys.add(arriving.wait(), rows)
        *_, delta = carry
        assert delta is not None  # own keys are the last hop
        assert lse is not None
        (dq,) = problem.run("partial_dq", part, q, *carry)
        dk, dv = of_keys.total(k.dtype)
        dsinks = None
        if sinks is not None:
            p = torch.exp(sinks[:, None] - lse)
            dsinks = -(p * delta[..., : lse.shape[-1]]).sum((0, 2))
        return None, dq, dk, dv, dsinks

    @staticmethod
    def jvp(ctx, *_):
        refuse_forward_mode("context_attention")


def _in_sequence(x: Tensor, plan: ContextPlan) -> Tensor:
    """Return [size, B, S, ...] of all ranks as [B, size · S, ...], in sequence order."""
    order, _ = _order(plan, x.device)
    return x.movedim(0, 1).flatten(1, 2).index_select(1, order)


def _by_rank(x: Tensor, plan: ContextPlan) -> Tensor:
    _, inverse = _order(plan, x.device)
    x = x.index_select(1, inverse).unflatten(1, (plan.size, plan.local_len))
    return x.movedim(1, 0).contiguous()


class _Exchange(torch.autograd.Function):
    """Swap tokens of all heads for all tokens of some heads, or back: mutual derivatives."""

    @staticmethod
    def forward(ctx, problem, x, to_heads):
        ctx.problem, ctx.to_heads = problem, to_heads
        return (_to_heads if to_heads else _to_tokens)(problem, x)

    @staticmethod
    def backward(ctx, gradient):
        return None, (_to_tokens if ctx.to_heads else _to_heads)(ctx.problem, gradient), None


def _to_heads(problem: RankCall, x: Tensor) -> Tensor:
    """Turn [B, S, H, ...] into [B, size · S, H / size, ...], in sequence order."""
    x = x.unflatten(2, (problem.plan.size, -1)).movedim(2, 0).contiguous()
    return _in_sequence(problem.peers.all_to_all(x), problem.plan)


def _to_tokens(problem: RankCall, x: Tensor) -> Tensor:
    x = problem.peers.all_to_all(_by_rank(x, problem.plan))
    return x.movedim(0, 2).flatten(2, 3).contiguous()


def _attend_heads(problem: RankCall, q, k, v, sinks) -> tuple[Tensor, ...]:
    """Attend to all tokens with this rank's share of the heads."""
    plan, peers = problem.plan, problem.peers
    q, k, v = (_Exchange.apply(problem, x, True) for x in (q, k, v))
    if sinks is not None:
        sinks = sinks.unflatten(0, (plan.size, -1))[peers.rank]
    named = problem.call.options.arguments | {
        "sinks": sinks, "return_lse": True, "implementation": problem.call.implementation,
    }  # fmt: skip
    if plan.cu_seqlens is None:
        out, lse = flash_attention(q, k, v, **named)
    else:
        ids = _document_ids(plan, q.device).expand(q.shape[0], -1)
        out, lse = flash_attention(q, k, v, q_segment_ids=ids, kv_segment_ids=ids, **named)
    out = _Exchange.apply(problem, out, False)
    lse = _Exchange.apply(problem, lse.mT[..., None], False)
    return out, lse[..., 0].mT


@lru_cache(maxsize=256)
def _tokens(plan: ContextPlan, rank: int, device: torch.device) -> Tensor | None:
    """Return which of a rank's tokens are no padding, [S]; None if all are."""
    is_token = plan.document_ids[plan.positions(rank)] >= 0
    return None if is_token.all() else torch.from_numpy(is_token).to(device)


@lru_cache(maxsize=256)
def _document_ids(plan: ContextPlan, device: torch.device) -> Tensor:
    """Return the document of each token, -1 for padding, [seq_len] int32."""
    return torch.from_numpy(plan.document_ids).to(device)
