"""Record what torch allocates during a training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.training.case import PHASES
from bench.training.timeline import Blocks, Event, Owned, Timeline, timeline_of

if TYPE_CHECKING:
    from bench.training.torch_training import TorchTraining


def record_timeline(training: TorchTraining) -> Timeline:
    """Run a step, not the training's first, and return its memory by category.

    On a GPU the events are those of the allocator's history, on a CPU the profiler's, which does
    not know what else is there than parameters and the optimizer's state.
    """
    parameters = blocks_of(training.parameters)
    states = training.adamw.state.values()
    optimizer = blocks_of(x for state in states for x in state.values())
    on_gpu = training.tokens.is_cuda
    start = _active_blocks() if on_gpu else {**parameters, **optimizer}
    gradients: Blocks = {}
    events: dict[str, list[Event]] = {}
    for phase in PHASES:
        record = cuda_events if on_gpu else cpu_events
        events[phase] = record(getattr(training, phase))
        if phase == "backward":
            gradients = blocks_of(p.grad for p in training.parameters if p.grad is not None)
    return timeline_of(start, events, Owned(parameters, optimizer, gradients))


def blocks_of(tensors: Iterable[Tensor]) -> Blocks:
    """Return the memory of tensors."""
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def cuda_events(call: Any) -> list[Event]:
    """Return what CUDA's caching allocator did during a call."""
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
    """Return the allocations and frees in a device's trace of a memory snapshot."""
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
    """Return what torch's CPU allocator did during a call."""
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
