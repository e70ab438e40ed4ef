"""The cuDNN frontend's own kernels for Hopper, in CUTLASS's DSL."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.parity.subjects.library import load, mask_of
from twin_attention.interop.parity.torch_calls import Attend

Tensors = dict[str, Any]


def wide(case: FlashCase, tensors: Tensors, *, lse: bool = False) -> Attend:
    """The forward with tiles of head dimension 512: [B, H, Sq, D], and [B, H, Sq]."""
    window = case.spec.window
    if window.right not in (None, 0) or (window.right is None and window.left is not None):
        raise Absent("its windows are causal")
    is_causal = window.right == 0
    attend = partial(
        _load("sdpa.fwd.api_dsl").sdpa_fwd_wrapper_dsl_sm90, is_causal=is_causal,
        causal_bottom_right=is_causal, window_size_left=window.left, scale_softmax=case.scale,
    )  # fmt: skip

    def forward(q, k, v):
        found = attend(q, k, v)
        return (found["o_tensor"], found["lse_tensor"]) if lse else found["o_tensor"]

    return forward


def flex(
    case: FlashCase, tensors: Tensors, *, makes_plan: bool = False, lse: bool = False
) -> Attend:
    """Attention on intervals of keys; the first call plans, or every call if it `makes_plan`."""
    module, ends = _load("flex_attention"), _ends(case, tensors)
    plans: dict[bool, Any] = {}

    def attend(q, k, v):
        has_gradients = any(x.requires_grad for x in (q, k, v))
        if makes_plan or has_gradients not in plans:
            plans[has_gradients] = module.create_mask_plan(ends, q, k, v)
        options = {"mask_plan": plans[has_gradients], "return_lse": lse}
        return module.flex_attn_func(q, k, v, softmax_scale=case.scale, **options)

    return attend


def _load(module: str) -> ModuleType:
    too_old = load("cudnn.frost.buffers").cutedsl_requirement_error("cudnn")
    if too_old:
        raise Absent(too_old)
    return load(f"cudnn.{module}")


def _ends(case: FlashCase, tensors: Tensors) -> torch.Tensor:
    """Return where intervals of keys end and begin in turn, [1, odd, B · Sq] int32.

    The first interval of a row begins at key 0; those that a row lacks are empty.
    """
    rows, mask = case.batch * case.seq_q, mask_of(case, tensors)
    seen = np.ones((1, 1, 1, 1), bool) if mask is None else mask
    seen = np.broadcast_to(seen[:, 0], (case.batch, case.seq_q, case.seq_kv))
    turns = np.diff(seen, prepend=True, append=False).reshape(rows, -1)
    row, key = np.nonzero(turns)
    count = turns.sum(axis=1)
    ends = np.full((count.max(), rows), case.seq_kv, np.int32)
    ends[np.arange(len(row)) - (np.cumsum(count) - count)[row], row] = key
    return torch.from_numpy(ends)[None].to(tensors["q"].device)
