"""Calls of our attention by patterns, with the implementation that our packages choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.calls import jax_call, torch_call
from bench.dilation import jax_standard, torch_standard
from bench.job import Call, Subject
from bench.ours import for_target
from bench.suites.pattern_cases import SparseCase, dense_case
from interop.parity.cases import DilatedCase, FlashCase
from twin_attention.targets.target import use_target

if TYPE_CHECKING:
    from torch import Tensor

FRAMEWORKS = {"torch": "torch_attn", "jax": "pallas_attn"}
STANDARD = {"torch": torch_standard, "jax": jax_standard}

Factory = Callable[..., Call]


def pattern_factories(kinds: Sequence[str], target: str) -> dict[Subject, Factory]:
    """Return factories of calls of both frameworks, which take (case, operation, tensors).

    Args:
        kinds: "block-sparse", "dense", "dilated" or "standard".
        target: to compile for.
    """
    keys = product(kinds, FRAMEWORKS)
    return {Subject(f"{x} {kind}", target): partial(_call, kind, x, target) for kind, x in keys}


def _call(
    kind: str, framework: str, target: str, case: Any, operation: str, tensors: list[Tensor]
) -> Call:
    import torch

    api, (*qkv, dout) = import_module(FRAMEWORKS[framework]), tensors
    make = {
        "block-sparse": _block_sparse, "dense": _dense, "dilated": _dilated, "standard": _standard,
    }[kind]  # fmt: skip
    attend, lists = make(api, framework, case)
    operands = [*qkv, *(torch.tensor(x, device=dout.device) for x in lists), dout]
    prepare = jax_call if framework == "jax" else torch_call
    with use_target(target):
        call = prepare(attend, operation, operands)
    return for_target(call, target)


Attend = tuple[Callable[..., Any], Sequence[np.ndarray]]  # and what it takes beside q, k and v


def _block_sparse(api: Any, _: str, case: SparseCase) -> Attend:
    attention = partial(api.block_sparse_attention, **case.options)

    def attend(q, k, v, *lists):
        return attention(q, k, v, api.BlockMask(*lists))

    # Arguments: JAX would compile constants in, for each mask anew.
    return attend, case.mask


def _dense(api: Any, _: str, case: FlashCase) -> Attend:
    return partial(api.flash_attention, **dense_case(case).options), ()


def _dilated(api: Any, _: str, case: DilatedCase) -> Attend:
    return partial(api.dilated_attention, **case.options), ()


def _standard(api: Any, framework: str, case: DilatedCase) -> Attend:
    return STANDARD[framework](api.flash_attention, case), ()
