"""Memory over a training step by category, from an allocator's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.training.case import PHASES

CATEGORIES: tuple[str, ...] = (
    "parameters",
    "optimizer state",
    "gradients",
    "saved activations",
    "other",
)
_MOST_POINTS = 300

Timeline = dict[str, list]  # "phase", and bytes by category, of each point in time
Blocks = Mapping[int, int]  # bytes by address


class Event(NamedTuple):
    address: int
    num_bytes: int


class Owned(NamedTuple):
    """Memory of known tensors by address: gradients exist after the backward, others before."""

    parameters: Blocks
    optimizer: Blocks
    gradients: Blocks


def timeline_of(start: Blocks, events: Mapping[str, Sequence[Event]], owned: Owned) -> Timeline:
    """Return the bytes of each category after each event of a step.

    What a forward leaves, its loss included, is a saved activation; unknown memory is "other". Ends
    of blocks unknown to `start` are left out.
    """
    found = empty_timeline()
    now: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    open_blocks: dict[int, tuple[str, int]] = {}

    def begin(address: int, num_bytes: int, category: str) -> None:
        open_blocks[address] = category, num_bytes
        now[category] += num_bytes

    for address, num_bytes in start.items():
        known = {"parameters": owned.parameters, "optimizer state": owned.optimizer}
        fitting = (name for name, blocks in known.items() if address in blocks)
        begin(address, num_bytes, next(fitting, "other"))
    add_point(found, PHASES[0], now)
    for phase in PHASES:
        left = _left(events[phase])
        for i, (address, num_bytes) in enumerate(events[phase]):
            if num_bytes > 0:
                category = _category(phase, address, owned) if left.get(address) == i else "other"
                begin(address, num_bytes, category)
            elif address in open_blocks:
                category, size = open_blocks.pop(address)
                now[category] -= size
            else:
                continue
            add_point(found, phase, now)
    return found


def empty_timeline() -> Timeline:
    return {name: [] for name in ("phase", *CATEGORIES)}


def add_point(timeline: Timeline, phase: str, num_bytes: Mapping[str, int]) -> None:
    timeline["phase"].append(phase)
    for category in CATEGORIES:
        timeline[category].append(num_bytes.get(category, 0))


def totals(timeline: Timeline) -> list[int]:
    return [sum(point) for point in zip(*(timeline[name] for name in CATEGORIES), strict=True)]


def peak(timeline: Timeline) -> dict[str, int]:
    total = totals(timeline)
    at = total.index(max(total))
    return {category: timeline[category][at] for category in CATEGORIES}


def shortened(timeline: Timeline, most: int = _MOST_POINTS) -> Timeline:
    total = totals(timeline)
    width = -(-len(total) // most)
    kept: dict[Any, int] = {}
    for i, phase in enumerate(timeline["phase"]):
        place = phase, i // width
        if place not in kept or total[i] > total[kept[place]]:
            kept[place] = i
    return {name: [values[i] for i in kept.values()] for name, values in timeline.items()}


def _left(events: Sequence[Event]) -> dict[int, int]:
    found: dict[int, int] = {}
    for i, (address, num_bytes) in enumerate(events):
        if num_bytes > 0:
            found[address] = i
        else:
            found.pop(address, None)
    return found


def _category(phase: str, address: int, owned: Owned) -> str:
    if phase == "forward":
        return "saved activations"
    if phase == "backward":
        return "gradients" if address in owned.gradients else "other"
    return "optimizer state" if address in owned.optimizer else "other"
