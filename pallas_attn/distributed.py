"""Context parallel attention: the devices of a mesh axis share a sequence's tokens.

The exchanges are those of `torch_attn.distributed.context`, except that in "gather" each rank
gathers all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_attn.derivatives import once, together
from pallas_attn.dispatch import (
    Implementation,
    check_implementation,
    choose_backends,
    run_on_platform,
)
from pallas_attn.explain import PROBLEMS
from pallas_attn.flash import flash_attention
from pallas_attn.flash_ops import or_as_xla_says
from pallas_attn.kernels import reference
from pallas_attn.operands import in_float32, operand
from pallas_attn.switches import promoting
from pallas_attn.varying import alike
from twin_attention.contract.context import (
    ContextPlan,
    Intervals,
    Runs,
    context_plan,
    intervals_of,
    shard_sequence,
    unshard_sequence,
)
from twin_attention.contract.operands import (
    FlashOperands,
    GradientCarry,
    PartialOperands,
    describe_operands,
)
from twin_attention.contract.spec import AttentionSpec, FlashOptions, PartialSpec, Precision
from twin_attention.contract.transfers import (
    EXCHANGES,
    Hop,
    choose_exchange,
    describe_exchange,
    equal_hops,
    problem_of_rank,
)
from twin_attention.contract.validate.context import (
    check_context_attention,
    check_exchange,
    check_group,
    check_whole,
)
from twin_attention.contract.validate.errors import fail, type_name
from twin_attention.contract.validate.options import check_flash_options
from twin_attention.targets.config import requested_configs
from twin_attention.targets.target import requested_target

__all__ = ["ContextPlan", "context_attention", "context_plan", "shard_sequence", "unshard_sequence"]

Exchange = Literal["ring", "gather", "heads"]


def context_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    plan: ContextPlan,
    axis_name: str,
    mesh: Mesh | None = None,
    exchange: Exchange | None = None,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    deterministic: bool | None = None,
    precision: Precision = "ieee",
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    """Compute exact attention over a sequence whose tokens are spread over a mesh axis's devices.

    A token's result is that of `flash_attention` over the whole sequence, or of
    `flash_attention_varlen` if the plan has documents. Partial results stay in float32 until the
    end.

    Call it inside `shard_map`, each rank with its own tokens; or give a mesh and arrays of all
    ranks' tokens. Differentiable once, in reverse mode; the backward exchanges the keys again,
    unless XLA keeps those of a forward in the same program.

    Args:
        q: [B, S, Hq, D], the rank's queries in the plan's order, S = ``plan.local_len``; otherwise
            as in `flash_attention`. With a mesh S = ``plan.seq_len``, one rank after the other, as
            ``shard_sequence(x, plan)`` has them.
        k: [B, S, Hkv, D], the rank's keys.
        v: [B, S, Hkv, Dv].
        plan: `context_plan`. Padding after its last document gives 0 and may hold NaN.
        axis_name: the mesh axis, of ``plan.size`` devices.
        mesh: None inside `shard_map`; otherwise `shard_map` is applied over this mesh, and all axes
            but that of the tokens are replicated.
        exchange: "ring", "gather", or "heads", which needs query heads and kv heads that the ranks
            share evenly; None is "ring".
        causal, scale, window_size, softcap, precision, return_lse: as in `flash_attention`, with
            positions in the whole sequence.
        sinks: [Hq], as in `flash_attention`, the same on every rank. Inside `shard_map` with
            ``check_vma=False`` its gradient is this rank's share of a sum over ranks.
        deterministic: True: the same number of ranks gives the same bits every time, except that
            XLA chooses the order of sums over ranks in "gather".
        implementation: as in `flash_attention`; "ring" and "gather" support "triton" and
            "reference", and with PyTorch installed "gluon" on SM90 and "torch_triton".

    Returns:
        out [B, S, Hq, Dv] in q's dtype; with `return_lse` the pair (out, lse), lse [B, Hq, S].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that contradict each other or the plan, a plan that does not fit the
            axis.
        NotImplementedError: as in `flash_attention`.

    Source: Liu et al. 2023 (Ring Attention, arXiv 2310.01889).

    Example::

        import jax
        from pallas_attn.distributed import (
            context_attention, context_plan, shard_sequence, unshard_sequence,
        )

        auto = jax.sharding.AxisType.Auto
        mesh = jax.make_mesh((jax.device_count(),), ("context",), axis_types=(auto,))
        plan = context_plan(seq_len=64, size=jax.device_count())
        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 32))
        q, k, v = (shard_sequence(x, plan) for x in (q, k, v))
        out = context_attention(
            q, k, v, plan=plan, axis_name="context", mesh=mesh, causal=True
        )
        out = unshard_sequence(out, plan)
    """
    deterministic, sinks = or_as_xla_says(deterministic), in_float32(sinks)
    given = causal, scale, window_size, softcap, deterministic, precision, return_lse
    options = check_flash_options(*given)
    if not isinstance(plan, ContextPlan):
        fail(TypeError, "plan", "a ContextPlan of `context_plan`", type_name(plan))
    check_implementation(implementation)
    if mesh is not None:
        check_group(plan.size, mesh.shape[axis_name])
        return _over_mesh(
            (q, k, v, sinks), mesh, axis_name, plan, exchange, options, return_lse, implementation
        )
    check_group(plan.size, lax.axis_size(axis_name))
    described = describe_operands(FlashOperands(q, k, v, sinks), operand)
    check_context_attention(described, options, plan.local_len)
    check_exchange(exchange, EXCHANGES, (q.shape[2], k.shape[2]), plan.size)
    part = PartialOperands(*described[:3], *[None] * 4)
    spec = PartialSpec.of(part, described.q.dtype, options)
    chosen, _ = choose_exchange(exchange, plan, options.window, spec, one_program=True)
    problem = _RankCall(plan, axis_name, chosen, options, implementation)
    attend = _attend_heads if chosen == "heads" else _attend_in_hops
    q, k, v, sinks = alike((q, k, v, sinks))
    if (plan.document_ids >= 0).all():
        out, lse = attend(problem, FlashOperands(q, k, v, sinks))
    else:  # padding, and the gradient of its output, may be NaN
        own = jnp.asarray(plan.positions_by_rank)[lax.axis_index(axis_name)]
        is_token = jnp.asarray(plan.document_ids >= 0)[own]
        row = is_token[:, None, None]
        q, k, v = (jnp.where(row, x, jnp.zeros_like(x)) for x in (q, k, v))
        out, lse = attend(problem, FlashOperands(q, k, v, sinks))
        out = jnp.where(row, out, jnp.zeros_like(out))
    return (out, lse) if return_lse else out


def problem_of_context(
    q: Array,
    k: Array,
    v: Array,
    *,
    plan: Any,
    axis_name: str,
    mesh: Mesh | None,
    exchange: str | None,
    sinks: Array | None,
    **options: Any,
) -> tuple[tuple[Any, ...], AttentionSpec, str]:
    """Check a call; return its tensors, a rank's problem, and how ranks exchange keys."""
    names = "causal", "scale", "window_size", "softcap", "deterministic", "precision", "return_lse"
    checked = check_flash_options(**{name: options[name] for name in names})
    if not isinstance(plan, ContextPlan):
        fail(TypeError, "plan", "a ContextPlan of `context_plan`", type_name(plan))
    size = lax.axis_size(axis_name) if mesh is None else mesh.shape[axis_name]
    check_group(plan.size, size)
    operands = FlashOperands(q, k, v, in_float32(sinks))
    described = describe_operands(operands, operand)
    check_context_attention(described, checked, plan.local_len if mesh is None else plan.seq_len)
    check_exchange(exchange, EXCHANGES, (q.shape[2], k.shape[2]), plan.size)
    part = PartialOperands(*described[:3], *[None] * 4)
    spec = PartialSpec.of(part, described.q.dtype, checked)
    spec = replace(spec, seq_q=plan.local_len, seq_kv=plan.local_len)
    chosen, _ = choose_exchange(exchange, plan, checked.window, spec, one_program=True)
    said = describe_exchange(exchange, plan, checked.window, spec, one_program=True)
    return tuple(operands[:4]), problem_of_rank(chosen, spec, plan, checked), said


PROBLEMS[context_attention] = problem_of_context  # of `explain`


def _over_mesh(tensors, mesh, axis_name, plan, exchange, options, return_lse, implementation):
    for name, x in zip("qkv", tensors, strict=False):
        check_whole(name, operand(name, x).shape, 1, plan.seq_len)
    check_exchange(exchange, EXCHANGES, (tensors[0].shape[2], tensors[1].shape[2]), plan.size)
    placed = (
        x if x is None else jax.device_put(x, NamedSharding(mesh, placement))
        for x, placement in zip(tensors, _placements(axis_name), strict=True)
    )
    call = _RankCall(plan, axis_name, exchange, options, implementation)
    program = _program_of_mesh(call, mesh, return_lse, requested_target(), requested_configs())
    return program(*placed)


def _placements(axis_name):
    tokens = PartitionSpec(None, axis_name)
    return tokens, tokens, tokens, PartitionSpec()


@lru_cache(maxsize=256)
def _program_of_mesh(call, mesh, return_lse, *_) -> Callable[..., Any]:
    """Return a jitted call on a mesh, one for all calls that are alike: JAX keeps its programs."""
    plan, axis_name, exchange, options, implementation = call

    def on_rank(q, k, v, sinks):
        return context_attention(
            q, k, v, plan=plan, axis_name=axis_name, exchange=exchange, sinks=sinks,
            return_lse=return_lse, implementation=implementation, **options.arguments,
        )  # fmt: skip

    in_specs, rows = _placements(axis_name), PartitionSpec(None, None, axis_name)
    out_specs = (in_specs[0], rows) if return_lse else in_specs[0]
    return jax.jit(
        jax.shard_map(on_rank, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


class _RankCall(NamedTuple):
    plan: ContextPlan
    axis_name: str
    exchange: str | None  # None: not chosen yet
    options: FlashOptions
    implementation: Implementation | None

    def part(self, operands: PartialOperands[Array]) -> PartialSpec:
        return PartialSpec.of(operands, operands.q.dtype.name, self.options)

    def run(self, operation: str, spec: PartialSpec, *operands: Any) -> Any:
        """Run `pallas_attn`'s function: "partial_fwd", "partial_bwd" or "partial_dq"."""
        backends = choose_backends(self.implementation, operation, None, spec, only_own=True)
        if spec.is_empty:  # runs no kernel
            return getattr(reference, operation)(*operands, spec, backends.elsewhere)
        return run_on_platform(backends, operation, spec, *operands)

    def hops(
        self, operation: str, q: Array, k: Array, v: Array
    ) -> Iterator[tuple[Hop | None, PartialOperands]]:
        """Yield each hop and its operands, zeros if a rank needs none; None for all ranks' keys."""
        plan, window = self.plan, self.options.window
        seen = intervals_of(*plan.bounds(window), np.arange(plan.seq_len))
        # One entry past the last token, for the keys that pad all ranks to equal numbers.
        in_sequence = Intervals(*(jnp.append(x, jnp.int32(plan.seq_len)) for x in seen))
        intervals = partial(self.intervals, in_sequence, jnp.asarray(plan.positions_by_rank))
        if self.exchange == "gather":
            whole = [_in_sequence(self.gather(x), plan) for x in (k, v)]
            yield None, PartialOperands(q, whole[0], whole[1], *intervals(None))
            return
        first, *others = equal_hops(plan, window)
        for hop in [*others, first] if operation == "partial_bwd" else [first, *others]:
            keys = (k, v) if hop is first else self.fetch(hop, k, v)
            yield hop, PartialOperands(q, keys[0], keys[1], *intervals(hop))

    def intervals(self, in_sequence: Intervals, positions: Array, hop: Hop | None) -> Intervals:
        """Return which keys of a hop this rank's queries see; for None, which keys of all ranks."""
        plan, rank = self.plan, lax.axis_index(self.axis_name)
        seen = [x[positions[rank]] for x in in_sequence[:2]]
        seeing = [x[:-1] for x in in_sequence[2:]]
        if hop is not None:
            seen = [_count_before(hop.runs, rank, x) for x in seen]
            if hop.positions is None:
                of_keys = positions[(rank - hop.distance) % plan.size]
            else:
                of_keys = jnp.asarray(hop.positions)[rank]
            seeing = [x[of_keys] for x in in_sequence[2:]]
        seeing = [_count_before(plan.runs, rank, x) for x in seeing]
        return Intervals(seen[0], seen[1], seeing[0], seeing[1])

    @property
    def is_mapped(self) -> bool:
        """Return True if `vmap` makes the ranks.

        There JAX does not tell a backward the size of the axis, which gathers and scatters ask for.
        """
        return self.axis_name not in jax.sharding.get_abstract_mesh().axis_names

    def gather(self, x: Array) -> Array:
        """Return all ranks' arrays in a new first axis."""
        if not self.is_mapped:
            return lax.all_gather(x, self.axis_name)
        own = jnp.arange(self.plan.size) == lax.axis_index(self.axis_name)
        return lax.psum(jnp.where(own.reshape(-1, *[1] * x.ndim), x[None], 0), self.axis_name)

    def sum_and_scatter(self, x: Array) -> Array:
        """Return this rank's part, along the first axis, of the sum of all ranks' arrays."""
        if not self.is_mapped:
            return lax.psum_scatter(x, self.axis_name)
        return lax.psum(x, self.axis_name)[lax.axis_index(self.axis_name)]

    def permute(self, xs: tuple[Array, ...], routes: Sequence[tuple[int, int]]) -> Any:
        """Send arrays from rank to rank; a rank that receives none gets zeros."""
        if not self.is_mapped:
            return lax.ppermute(xs, self.axis_name, routes)
        used = [{route[end] for route in routes} for end in (0, 1)]
        idle = ([x for x in range(self.plan.size) if x not in ranks] for ranks in used)
        arrived = lax.ppermute(xs, self.axis_name, [*routes, *zip(*idle, strict=True)])
        receives = jnp.asarray([x in used[1] for x in range(self.plan.size)])
        own = receives[lax.axis_index(self.axis_name)]
        return tuple(jnp.where(own, x, 0) for x in arrived)

    def fetch(self, hop: Hop, k: Array, v: Array) -> tuple[Array, Array]:
        """Send the keys that other ranks need; return those received, or zeros."""
        keys = k, v
        if hop.sent is not None:
            rows = jnp.asarray(hop.sent)[lax.axis_index(self.axis_name)]
            keys = tuple(jnp.take(x, rows, 1, mode="fill", fill_value=0) for x in keys)
        return self.permute(keys, hop.routes)

    def send_back(self, hop: Hop, gradients: Sequence[Array]) -> Sequence[Array]:
        """Send gradients of keys to the rank that holds them; return those of its own keys."""
        routes = [(to, rank) for rank, to in hop.routes]
        arrived = self.permute(tuple(gradients), routes)
        if hop.places is None:
            return arrived
        places = jnp.asarray(hop.places)[lax.axis_index(self.axis_name)]
        return [jnp.take(x, places, 1, mode="fill", fill_value=0) for x in arrived]


def _count_before(runs: Runs, rank: Array, positions: Array) -> Array:
    """Return how many tokens of a rank's runs come before each position, [S] int32."""
    starts, counts = (jnp.asarray(x)[rank] for x in runs[:2])
    before = -(-(positions[:, None] - starts) // runs.step)
    return jnp.sum(jnp.clip(before, 0, counts), 1, dtype=jnp.int32)


def _attend_in_hops(problem: _RankCall, operands: FlashOperands[Array]) -> tuple[Array, Array]:
    """Attend by "ring" or "gather", differentiable once, in reverse mode."""
    q, k, v, sinks = operands[:4]
    q, k, v, sinks = once((q, k, v, sinks), PartialSpec.function)
    return once(_attention(problem, q, k, v, sinks), PartialSpec.function)


def _on_each_platform(
    function: Callable[..., Any], operation: str, problem: _RankCall, *operands: Any
) -> Any:
    """Run all hops; for None, use `torch_attn`'s kernels on CUDA where they are faster.

    All share one choice, because a family's backward reads what its last hop left. Not for ranks
    made by `vmap`: JAX does not differentiate an exchange among them in a branch.
    """
    if problem.implementation is None and not problem.is_mapped:
        q, k, v = jax.tree.leaves(operands)[:3]
        spec = problem.part(PartialOperands(q, k, v, *[None] * 4))
        cuda = choose_backends(None, operation, None, spec).cuda.family
        if cuda.is_foreign:
            of_cuda = problem._replace(implementation=cuda.name)
            return lax.platform_dependent(
                *operands, cuda=partial(function, of_cuda), default=partial(function, problem)
            )
    return function(problem, *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(problem, q, k, v, sinks):
    return _on_each_platform(_forward, "partial_fwd", problem, q, k, v, sinks)


@promoting
def _forward(problem, q, k, v, sinks):
    out: Any = None
    lse: Any = None
    hops = [*problem.hops("partial_fwd", q, k, v)]
    for number, (_, operands) in enumerate(hops):
        first, last = number == 0, number == len(hops) - 1
        operands = operands._replace(sinks=sinks if first else None)
        spec = replace(problem.part(operands), first=first, last=last)
        out, lse = problem.run("partial_fwd", spec, operands, out, lse)
    return together(out, lse)


def _attention_fwd(problem, q, k, v, sinks):
    out, lse = _on_each_platform(_forward, "partial_fwd", problem, q, k, v, sinks)
    return (out, lse), (q, k, v, sinks, out, lse)


def _attention_bwd(problem, residuals, gradients):
    return _on_each_platform(_backward, "partial_bwd", problem, residuals, gradients)


@promoting
def _backward(problem, residuals, gradients):
    (q, k, v, sinks, out, lse), (dout, dlse) = residuals, gradients
    carry: GradientCarry[Array] | None = None
    of_others: Sequence[Array] = ()
    own: Sequence[Array] = ()
    for hop, operands in problem.hops("partial_bwd", q, k, v):
        spec = problem.part(operands)
        carry, *own = problem.run("partial_bwd", spec, dout, dlse, operands, out, lse, carry)
        if hop is not None and hop.distance:
            of_others = _sum(of_others, problem.send_back(hop, own))
    assert carry is not None
    of_keys = _sum(of_others, own)  # own keys are the last hop
    dq = problem.run("partial_dq", spec, q, carry)
    if problem.exchange == "gather":
        parts = (_by_rank(x, problem.plan) for x in of_keys)
        of_keys = [problem.sum_and_scatter(x) for x in parts]
    dk, dv = (dx.astype(k.dtype) for dx in of_keys)
    dsinks = None
    if sinks is not None:
        p = jnp.exp(sinks[:, None] - lse)
        dsinks = -jnp.sum(p * carry.delta[..., : lse.shape[-1]], (0, 2))
    return dq, dk, dv, dsinks


def _sum(xs: Sequence[Array], ys: Sequence[Array]) -> Sequence[Array]:
    """Return the sums of arrays; if there are none so far, the others."""
    return [x + y for x, y in zip(xs, ys, strict=True)] if xs else ys


_attention.defvjp(_attention_fwd, _attention_bwd)


def _in_sequence(x: Array, plan: ContextPlan) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return unshard_sequence(x.reshape(x.shape[0], plan.seq_len, *x.shape[3:]), plan)


def _by_rank(x: Array, plan: ContextPlan) -> Array:
    x = shard_sequence(x, plan)
    return jnp.moveaxis(x.reshape(x.shape[0], plan.size, -1, *x.shape[2:]), 1, 0)


def _to_heads(problem: _RankCall, x: Array) -> Array:
    x = jnp.moveaxis(x.reshape(*x.shape[:2], problem.plan.size, -1, *x.shape[3:]), 2, 0)
    return _in_sequence(lax.all_to_all(x, problem.axis_name, 0, 0, tiled=True), problem.plan)


def _to_tokens(problem: _RankCall, x: Array) -> Array:
    x = lax.all_to_all(_by_rank(x, problem.plan), problem.axis_name, 0, 0, tiled=True)
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


@promoting
def _attend_heads(problem: _RankCall, operands: FlashOperands[Array]) -> tuple[Array, Array]:
    plan, sinks = problem.plan, operands.sinks
    q, k, v = (_to_heads(problem, x) for x in operands[:3])
    if sinks is not None:
        sinks = sinks.reshape(plan.size, -1)[lax.axis_index(problem.axis_name)]
    ids = None
    if plan.cu_seqlens is not None:
        ids = jnp.broadcast_to(jnp.asarray(plan.document_ids), q.shape[:2])
    out, lse = flash_attention(
        q, k, v, sinks=sinks, q_segment_ids=ids, kv_segment_ids=ids, return_lse=True,
        implementation=problem.implementation, **problem.options.arguments,
    )  # fmt: skip
    lse = _to_tokens(problem, jnp.swapaxes(lse, 1, 2)[..., None])
    return _to_tokens(problem, out), jnp.swapaxes(lse[..., 0], 1, 2)
