from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.training.timeline import Blocks, Event, Owned, Timeline, timeline_of


def record_timeline(
    phases: Mapping[str, Callable[[], None]],
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
) -> Timeline:
    """Run the phases of a step, not the first one, and return its memory by category.

    On a GPU the events come from the allocator's history, on a CPU from the profiler, which only
    knows parameters and the optimizer's state.
    """
    weights = blocks_of(parameters)
    states = blocks_of(x for state in optimizer.state.values() for x in state.values())
    on_gpu = parameters[0].is_cuda
    record = cuda_events if on_gpu else cpu_events
    start = _active_blocks() if on_gpu else {**weights, **states}
    gradients: Blocks = {}
    events: dict[str, list[Event]] = {}
    for phase, run in phases.items():
        events[phase] = record(run)
        if phase == "backward":
            gradients = blocks_of(p.grad for p in parameters if p.grad is not None)
    return timeline_of(start, events, Owned(weights, states, gradients))


def blocks_of(tensors: Iterable[Tensor]) -> Blocks:
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def cuda_events(call: Any) -> list[Event]:
    memory: Any = torch.cuda.memory
    memory._record_memory_history(context=None, clear_history=True)
    try:
        call()
        torch.cuda.synchronize()
        trace = memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        memory._record_memory_history(enabled=None)
    return events_of(trace)


def events_of(trace: Iterable[dict[str, Any]]) -> list[Event]:
    signs = {"alloc": 1, "free_completed": -1}
    return [
        Event(entry["addr"], signs[entry["action"]] * entry["size"])
        for entry in trace
        if entry["action"] in signs and entry["size"]
    ]


def _active_blocks() -> Blocks:
    memory: Any = torch.cuda.memory
    segments = memory._snapshot()["segments"]
    device = torch.cuda.current_device()
    return {
        block["address"]: block["requested_size"]
        for segment in segments
        if segment.get("device", device) == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def cpu_events(call: Any) -> list[Event]:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        call()
    results: Any = profiler.profiler
    tree = results.kineto_results.experimental_event_tree()
    found = [event for event in _walk(tree) if event.tag.name == "Allocation"]
    found.sort(key=lambda event: event.start_time_ns)
    fields = (event.extra_fields for event in found)
    return [Event(x.ptr, x.alloc_size) for x in fields if x.alloc_size]


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)
