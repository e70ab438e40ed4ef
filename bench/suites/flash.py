"""``python -m bench flash``: both twins beside FlashAttention-2 and cuDNN, on a GPU.

Forward and backward are timed apart. FLOPs are those of the pairs that the mask keeps.
FlashAttention-2 is SM80 code and the bar for SM80 code, cuDNN is the bar for the device's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from bench.job import Call, Job, Subject
from interop.contract.cases import FlashCase, flash_cases
from interop.contract.cost import backward_bytes, backward_flops, forward_bytes, forward_flops

TITLE = "Flash attention"
NOTE = ""
COST = {"forward": (forward_flops, forward_bytes), "backward": (backward_flops, backward_bytes)}
PEERS = {"FA2": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}  # SDPA's names of them


def jobs(targets: Sequence[str], pattern: str = "") -> list[Job]:
    """Forward and backward of every case whose name contains `pattern`."""
    chosen = [case for case in flash_cases("large", pattern) if "2g-elements" not in case.name]
    return [_job(case, operation, targets) for case in chosen for operation in COST]


def _job(case: FlashCase, operation: str, targets: Sequence[str]) -> Job:
    flops, traffic = (count(case.spec) for count in COST[operation])
    makers = {
        **{Subject("Triton", t): partial(_triton, case, operation, t) for t in targets},
        **{Subject("Pallas", t): partial(_pallas, case, operation, t) for t in targets},
        **{Subject(peer): partial(_sdpa, case, operation, peer) for peer in PEERS},
    }
    return Job(asdict(case), operation, flops, traffic, partial(_inputs, case), makers)


def _inputs(case: FlashCase) -> list[Any]:
    """q, k, v and dout, random normal torch tensors."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    q, _, v = case.shapes
    return [
        torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, case.dtype))
        for shape in (*case.shapes, (*q[:3], v[3]))
    ]


def _triton(case: FlashCase, operation: str, target: str, tensors: list[Any]) -> Call:
    import torch

    from interop.contract.target import use_target
    from torch_attn import flash_attention

    *qkv, dout = tensors
    inputs = [x.detach().requires_grad_(operation == "backward") for x in qkv]

    def forward():
        with use_target(target):
            return flash_attention(*inputs, **case.options, implementation="triton")

    if operation == "forward":
        return Call(forward, lambda out: (out,))
    out = forward()

    def backward():
        with use_target(target):
            return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return Call(backward, tuple)


def _pallas(case: FlashCase, operation: str, target: str, tensors: list[Any]) -> Call:
    import jax

    from interop.contract.target import use_target
    from interop.exchange import to_jax
    from pallas_attn.kernels.flash_bwd import flash_bwd
    from pallas_attn.kernels.flash_fwd import flash_fwd

    q, k, v, dout = map(to_jax, tensors)
    with use_target(target):
        forward = jax.jit(partial(flash_fwd, spec=case.spec, backend=target))
        out, lse = forward(q, k, v)
        if operation == "forward":
            return Call(lambda: forward(q, k, v), lambda result: result[:1])
        backward = jax.jit(
            lambda dout, *saved: flash_bwd(dout, None, *saved, spec=case.spec, backend=target)
        )
        jax.block_until_ready(backward(dout, q, k, v, out, lse))
    return Call(lambda: backward(dout, q, k, v, out, lse), tuple)


def _sdpa(case: FlashCase, operation: str, peer: str, tensors: list[Any]) -> Call:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    *inputs, gradient = (x.transpose(1, 2).detach() for x in tensors)
    for x in inputs:
        x.requires_grad_(operation == "backward")

    def forward():
        with sdpa_kernel(getattr(SDPBackend, PEERS[peer])):
            return scaled_dot_product_attention(
                *inputs, is_causal=case.causal, enable_gqa=case.heads_q != case.heads_kv
            )

    if operation == "forward":
        return Call(forward, lambda out: (out.transpose(1, 2),))
    out = forward()
    return Call(
        lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True),
        lambda gradients: [x.transpose(1, 2) for x in gradients],
    )
