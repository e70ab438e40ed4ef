"""Ranks of context parallel attention: in turn on one GPU, and together on several."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.job import Absent, Call, Subject
from bench.ours import for_target
from bench.problems import attention_tensors
from bench.records import Times
from bench.timing import Run, Timing, Wait, summarize, time_calls, wait_for
from interop.parity.sides import leaves, prepare_torch
from torch_attn.distributed import (
    Peers,
    Transfer,
    context_attention,
    shard_sequence,
    unshard_sequence,
)
from twin_attention.contract.exchange import Rows
from twin_attention.targets.target import use_target

_ROUNDS, _WARMUP, _TURNS, _CALLS = 3, 1, 4, 5  # of ranks that are timed together; calls of a turn
_REST = 0.1  # seconds before a turn: a card at its power cap regains its clock
_FILLS, _FILL_BYTES = 24, 2**28  # before a turn: 2 ms on an H100, while hosts launch the first call
_PREPARED = 2  # problems of a group that are kept: those of a case
_LIMIT = 300.0  # seconds for an answer of a rank, which compiles first
_TRIES = 3  # calls of each rank, to find the slowest


class Alone(Peers):
    """A rank that runs by itself: what the others would send it is there."""

    def __init__(
        self,
        rank: int,
        shards: Sequence[tuple[Tensor, ...]],
        sent: dict[tuple[int, int, int], tuple[Tensor, ...]],
    ) -> None:
        """Take what all ranks of a problem share.

        Args:
            rank: this one.
            shards: keys and values of every rank.
            sent: the gradients that the ranks sent last, by receiver, sender and token.
        """
        self.rank, self.size, self.group = rank, len(shards), type(self)
        self._shards, self._sent = shards, sent

    def exchange(
        self,
        tensors: tuple[Tensor, ...],
        sent: Sequence[Rows],
        received: Sequence[Rows],
        of_gradients: bool = False,
    ) -> Transfer:
        if not of_gradients:
            return Transfer(self._keys(tuple(received)))
        for rank, start, end, token, _ in sent:
            self._send((rank, self.rank, token), tuple(x[:, start:end] for x in tensors))
        parts = []
        for rank, start, end, token, _ in received:
            place = self.rank, rank, token
            if place in self._sent:
                parts.append(self._arrived(place))
            else:
                rows = (x.new_zeros(x.shape[0], end - start, *x.shape[2:]) for x in tensors)
                parts.append(tuple(rows))
        return Transfer(_joined(parts))

    def _send(self, place: tuple[int, int, int], rows: tuple[Tensor, ...]) -> None:
        self._sent[place] = rows

    def _arrived(self, place: tuple[int, int, int]) -> tuple[Tensor, ...]:
        return self._sent[place]

    @cache  # noqa: B019 (as many as steps)
    def _keys(self, received: tuple[Rows, ...]) -> tuple[Tensor, ...] | None:
        """Return the keys of a step, which are there before they are asked for."""
        return _joined(
            [tuple(x[:, a:b] for x in self._shards[rank]) for rank, a, b, *_ in received]
        )

    def all_to_all(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def gather_objects(self, x: Any) -> list[Any]:
        return [x] * self.size


class FromHost(Alone):
    """A rank that runs by itself: the others' keys, and gradients of them, are in host memory."""

    def __init__(
        self,
        rank: int,
        shards: Sequence[tuple[Tensor, ...]],
        sent: dict[tuple[int, int, int], tuple[Tensor, ...]],
    ) -> None:
        super().__init__(rank, shards, sent)
        self._device = shards[0][0].device
        self._held = [tuple(map(_on_host, shard)) for shard in shards]
        self._copies = torch.cuda.Stream() if self._device.type == "cuda" else None

    def exchange(
        self,
        tensors: tuple[Tensor, ...],
        sent: Sequence[Rows],
        received: Sequence[Rows],
        of_gradients: bool = False,
    ) -> Transfer:
        if of_gradients or self._copies is None:
            return super().exchange(tensors, sent, received, of_gradients)
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            found = self._keys(tuple(received))
            arrived.record()
        return Transfer(found, (_Copied(arrived, found or ()),))

    def _send(self, place: tuple[int, int, int], rows: tuple[Tensor, ...]) -> None:
        """Copy gradients to memory of the place, which is pinned once; the host does not wait."""
        if place not in self._sent:
            self._sent[place] = tuple(
                torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) for x in rows
            )
        for held, x in zip(self._sent[place], rows, strict=True):
            held.copy_(x, non_blocking=True)

    def _arrived(self, place: tuple[int, int, int]) -> tuple[Tensor, ...]:
        return tuple(x.to(self._device, non_blocking=True) for x in self._sent[place])

    def _keys(self, received: tuple[Rows, ...]) -> tuple[Tensor, ...] | None:
        parts = [
            tuple(x[:, start:end].to(self._device, non_blocking=True) for x in self._held[rank])
            for rank, start, end, *_ in received
        ]
        return _joined(parts)


class _Copied:
    """Wait on the card for copies to it, whose memory no other copy takes before it was read."""

    def __init__(self, event: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        self._event, self._tensors = event, tensors

    def wait(self) -> None:
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        for x in self._tensors:
            x.record_stream(stream)


def _on_host(x: Tensor) -> Tensor:
    """Return a copy in host memory, from which copies to a card do not wait."""
    return x.cpu().pin_memory() if x.is_cuda else x.clone()


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...] | None:
    """Return rows of several ranks behind each other; one rank's without a copy."""
    if len(parts) < 2:
        return tuple(x.contiguous() for x in parts[0]) if parts else None
    return tuple(torch.cat(xs, 1) for xs in zip(*parts, strict=True))


class Ranks:
    """The calls of ranks that run in turn; `time_ranks` times the slowest one."""

    def __init__(self, calls: Sequence[Run]) -> None:
        self._calls = calls

    def __call__(self) -> list[Any]:
        return [call() for call in self._calls]

    def slowest(self, wait: Wait) -> Run:
        """Return the call of the slowest rank, by the host's clock."""

        def seconds(call: Run) -> float:
            start = time.perf_counter()
            wait(call())
            return time.perf_counter() - start

        return max(self._calls, key=lambda call: min(seconds(call) for _ in range(_TRIES)))


def shares(case: Any, tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return a rank's tokens of tensors [B, S, H, D], or [T, H, D] of packed documents."""
    batches = [x if x.ndim == 4 else x[None] for x in tensors]
    return [shard_sequence(x, case.plan, rank).contiguous() for x in batches]


def assembled(case: Any, results: Sequence[Sequence[Tensor]], is_packed: bool) -> list[Tensor]:
    """Return results of the whole sequence, from those of each rank."""
    whole = [unshard_sequence(list(xs), case.plan) for xs in zip(*results, strict=True)]
    return [x[0] if is_packed else x for x in whole]


def in_turn(
    target: str,
    case: Any,
    operation: str,
    tensors: list[Tensor],
    exchange: str = "ring",
    peers: type[Alone] = Alone,
) -> Call:
    """Return the call of all ranks in turn, which exchange nothing with each other."""
    shards = [tuple(shares(case, tensors[1:3], rank)) for rank in range(case.ranks)]
    sent: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}

    def of_rank(rank: int) -> Run:
        *inputs, dout = shares(case, tensors, rank)
        attend = partial(_attend, case, peers(rank, shards, sent), exchange)
        call = Call(prepare_torch(attend, operation, inputs, dout), None)
        return for_target(call, target).run

    with use_target(target):
        run = Ranks([of_rank(rank) for rank in range(case.ranks)])

    def result(_: Any) -> list[Tensor]:
        # Only now have all ranks sent their gradients.
        return assembled(case, [leaves(x) for x in run()], tensors[0].ndim == 3)

    return Call(run, result)


def in_turn_gathered(target: str, case: Any, operation: str, tensors: list[Tensor]) -> Call:
    """Return the call of all ranks in turn, each of which has all keys that it needs at once."""
    return in_turn(target, case, operation, tensors, "gather")


def in_turn_from_host(target: str, case: Any, operation: str, tensors: list[Tensor]) -> Call:
    """Return the call of all ranks in turn, with keys that come from host memory."""
    return in_turn(target, case, operation, tensors, peers=FromHost)


def _attend(case: Any, mesh: Any, exchange: str, q: Tensor, k: Tensor, v: Tensor) -> Any:
    options = case.options | {"plan": case.plan, "mesh": mesh, "exchange": exchange}
    return context_attention(q, k, v, **options)


class Group:
    """Ranks that run together, each in a process and on a device of its own."""

    def __init__(self, size: int, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = there, rank, size, store, device
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(here)
            self.processes.append(process)
        self._end = weakref.finalize(self, _end, self._pipes, self.processes)

    def ask(self, question: str, problem: _Problem) -> list[Any]:
        """Return the answer of each rank to "run", "results" or "time".

        Raises:
            RuntimeError: a rank failed, or did not answer in time. That ends the group.
        """
        for pipe in self._pipes:
            pipe.send((question, problem))
        found = []
        for rank, pipe in enumerate(self._pipes):
            answer = pipe.recv() if pipe.poll(_LIMIT) else f"no answer in {_LIMIT:.0f} s"
            if isinstance(answer, str):
                group_of.cache_clear()
                self._end()
                raise RuntimeError(f"rank {rank}: {answer}")
            found.append(answer)
        return found


@cache
def group_of(size: int, device: str) -> Group:
    """Return processes that stay for the next problem."""
    return Group(size, device)


def _end(pipes: Sequence[Any], processes: Sequence[Any]) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(10)
        process.kill()


class _Problem(NamedTuple):
    """Name what a rank of a group computes."""

    target: str
    case: Any
    operation: str
    exchange: str

    def prepare(self, rank: int, device: str) -> Run:
        """Return the call of a rank."""
        tensors = attention_tensors(self.case.whole, device)
        *inputs, dout = shares(self.case, tensors, rank)
        attend = partial(_attend, self.case, dist.group.WORLD, self.exchange)
        with use_target(self.target):
            call = Call(prepare_torch(attend, self.operation, inputs, dout), None)
        return for_target(call, self.target).run


class Together:
    """A call of the ranks of a group."""

    def __init__(self, group: Group, problem: _Problem) -> None:
        self._group, self._problem = group, problem

    def __call__(self) -> None:
        self.ask("run")

    def ask(self, question: str) -> list[Any]:
        """Return the answer of each rank; see `Group.ask`."""
        return self._group.ask(question, self._problem)


def _serve(pipe: Any, rank: int, size: int, store: str, device: str) -> None:
    """Answer what `Group.ask` asks, until it hangs up."""
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    prepare = lru_cache(maxsize=_PREPARED)(partial(_Problem.prepare, rank=rank, device=device))
    answers: dict[str, Callable[[Run], Any]] = {
        "run": lambda run: len(leaves(run())),
        "results": lambda run: [x.detach().cpu() for x in leaves(run())],
        "time": lambda run: list(_rounds(run, device)),
    }
    while True:
        try:
            question, problem = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(answers[question](prepare(problem)))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _rounds(run: Run, device: str) -> Iterator[list[float]]:
    """Yield the milliseconds of calls of each round, those of the slowest rank."""
    for _ in range(_ROUNDS):
        found = [_together(run, device) for _ in range(_WARMUP + _TURNS)]
        yield found[_WARMUP:]


def _together(run: Run, device: str) -> float:
    """Return the milliseconds of a call on the slowest rank, of several one after the other.

    All ranks begin together. The calls are queued behind fills, and the host may run ahead, as it
    does in training.
    """
    time.sleep(_REST)
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
        filled = torch.empty(_FILL_BYTES, dtype=torch.int8, device=device)
        for _ in range(_FILLS):
            filled.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    begin = time.perf_counter()
    for _ in range(_CALLS):
        run()
    milliseconds = 1e3 * (time.perf_counter() - begin)
    if device == "cuda":
        end.record()
        end.synchronize()
        milliseconds = start.elapsed_time(end)
    longest = torch.tensor(milliseconds / _CALLS, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def together(
    target: str, case: Any, operation: str, tensors: list[Tensor], exchange: str = "ring"
) -> Call:
    """Return the call of ranks on as many GPUs, in a process each.

    Raises:
        Absent: there are fewer GPUs.
    """
    device = tensors[0].device.type
    if device == "cuda" and torch.cuda.device_count() < case.ranks:
        raise Absent(f"needs {case.ranks} GPUs")
    call = Together(group_of(case.ranks, device), _Problem(target, case, operation, exchange))

    def result(_: Any) -> list[Tensor]:
        found = assembled(case, call.ask("results"), tensors[0].ndim == 3)
        return [x.to(tensors[0].device) for x in found]

    return Call(call, result)


def together_gathered(target: str, case: Any, operation: str, tensors: list[Tensor]) -> Call:
    """Return the call of ranks on as many GPUs, each of which gets all its keys at once."""
    return together(target, case, operation, tensors, "gather")


def need_devices(size: int) -> None:
    """Raise `Absent` if JAX has fewer devices than ranks."""
    import jax

    if jax.device_count() < size:
        raise Absent(f"needs {size} GPUs")


def over_devices(
    target: str, case: Any, operation: str, tensors: list[Tensor], exchange: str = "ring"
) -> Call:
    """Return the call of ranks on as many devices of JAX, in this process.

    Raises:
        Absent: there are fewer devices.
    """
    import jax

    from interop.exchange import to_jax
    from interop.parity.sides import prepare_jax
    from pallas_attn.distributed import context_attention

    need_devices(case.ranks)
    devices = jax.devices()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((case.ranks,), ("context",), auto, devices=devices[: case.ranks])
    placement = jax.NamedSharding(mesh, jax.P(None, "context"))
    options = {"plan": case.plan, "mesh": mesh, "axis_name": "context", "exchange": exchange}
    attend = partial(context_attention, **case.options | options)

    def place(x: Tensor) -> Any:
        batch = to_jax(x if x.ndim == 4 else x[None])
        return jax.device_put(shard_sequence(batch, case.plan), placement)

    here = tensors[0].device

    def come_back() -> None:
        if here.type == "cuda":  # JAX leaves another device current
            torch.cuda.set_device(here)

    def result(found: Any) -> list[Any]:
        whole = [jax.device_put(unshard_sequence(x, case.plan), devices[0]) for x in leaves(found)]
        results = jax.block_until_ready([x[0] if tensors[0].ndim == 3 else x for x in whole])
        come_back()
        return results

    *inputs, dout = map(place, tensors)
    with use_target(target):
        prepared = prepare_jax(attend, operation, inputs, dout)

    def run() -> Any:
        found = prepared()
        come_back()
        return found

    return for_target(Call(run, result), target)


def over_devices_gathered(target: str, case: Any, operation: str, tensors: list[Tensor]) -> Call:
    """Return the call of `over_devices` with exchange "gather"."""
    return over_devices(target, case, operation, tensors, "gather")


def time_ranks(
    size: int, calls: Mapping[Subject, Run], wait: Wait = wait_for
) -> dict[Subject, Timing]:
    """Time the slowest rank, groups by their own clocks, and the whole sequence, by ranks.

    Args:
        size: ranks that share the whole sequence.
        calls: of "dense" the whole sequence, whose times are divided by `size`.
        wait: blocks until a call's result is there.
    """
    groups = {s: run for s, run in calls.items() if isinstance(run, Together)}
    others = {
        s: run.slowest(wait) if isinstance(run, Ranks) else run
        for s, run in calls.items()
        if s not in groups
    }
    found = time_calls(others, wait) if others else {}
    for subject in found:
        if subject.implementation.endswith("dense"):
            found[subject] = _divided(found[subject], size)
    for subject, group in groups.items():
        times = summarize(group.ask("time")[0])
        found[subject] = Timing(busy=times, span=None, host=times, kernels=())
    return found


def _divided(timing: Timing, size: int) -> Timing:
    def part(x: float | None) -> Any:
        return None if x is None else x / size

    def times(x: Times | None) -> Any:
        return x and Times(*(part(value) for value in vars(x).values()))

    return replace(
        timing, busy=times(timing.busy), span=times(timing.span), events=part(timing.events)
    )
