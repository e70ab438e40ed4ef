"""Compile kernels ahead, for images and clusters: ``python -m torch_attn.warm calls.txt``.

Each call of the files (`twin_attention.targets.warm`) runs once on zeros, flash attention with its
gradients, on the GPU if there is one. Later processes find the kernels in Triton's cache.
"""

from __future__ import annotations

import sys

import torch

import torch_attn
from twin_attention.contract.validate.errors import fail
from twin_attention.targets import warm
from twin_attention.targets.warm import CallText


def compile_call(call: CallText) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {}
    for name, (shape, dtype) in call.operands.items():
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            fail(ValueError, name, "a torch dtype's name", repr(dtype))
        tensors[name] = torch.zeros(shape, dtype=kind, device=device)
        tensors[name].requires_grad_(kind.is_floating_point and name not in call.constants)
    found = getattr(torch_attn, call.function)(**tensors, **call.options)
    if call.has_gradients:
        (found[0] if isinstance(found, tuple) else found).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(warm.main("torch_attn", compile_call, sys.argv[1:]))
