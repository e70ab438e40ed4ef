from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch

from twin_attention.targets.target import NUM_SMS, SHARED_MEMORY_LIMIT, Card, resolve_target

_described: ContextVar[Card | None] = ContextVar("described", default=None)


@contextmanager
def described(card: Card) -> Iterator[None]:
    """Let operands on the "meta" device stand for operands on this card."""
    token = _described.set(card)
    try:
        yield
    finally:
        _described.reset(token)


def target_of(device: torch.device) -> str | None:
    """Return the target whose code runs on a device; None if it is no CUDA device."""
    if device.type != "cuda":
        return None
    return resolve_target(_properties(device)[0])


def num_sms(device: torch.device, target: str | None) -> int:
    """Return a CUDA device's number of SMs; elsewhere that of the target's usual card.

    Target None, the interpreter, follows SM80.
    """
    card = _described.get()
    if device.type == "meta" and card is not None:
        return card.num_sms
    if device.type != "cuda":
        return NUM_SMS[target or "sm80"]
    return _properties(device)[1]


def shared_memory(target: str, device: torch.device) -> int:
    """Return the bytes that a block may have: the target's limit, or a smaller card's own."""
    card = _described.get()
    if device.type == "meta" and card is not None:
        return min(SHARED_MEMORY_LIMIT[target], card.shared_memory)
    if device.type != "cuda":
        return SHARED_MEMORY_LIMIT[target]
    return min(SHARED_MEMORY_LIMIT[target], _properties(device)[2])


def card_of(device: torch.device) -> Card:
    (major, minor), sms, memory = _properties(device)
    return Card(10 * major + minor, sms, memory)


@lru_cache
def _properties(device: torch.device) -> tuple[tuple[int, int], int, int]:
    """Return capability, number of SMs and bytes of shared memory; queries are slow."""
    properties: Any = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return capability, properties.multi_processor_count, properties.shared_memory_per_block_optin
