"""``python -m bench flash``: both twins beside FlashAttention-2 and cuDNN, on a GPU.

Forward and backward are timed apart, each with the L2 cache flushed. FLOPs are those of the pairs
that the mask keeps. FlashAttention-2 is SM80 code and the bar for SM80 code, cuDNN is the bar for
the device's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from bench.records import origin
from bench.runner import Call, Job, Subject, add_arguments, prepare, run_suite
from interop.contract.cases import FlashCase, flash_cases
from interop.contract.cost import backward_bytes, backward_flops, forward_bytes, forward_flops

COST = {"forward": (forward_flops, forward_bytes), "backward": (backward_flops, backward_bytes)}
PEERS = {"FA2": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}  # SDPA's names of them


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to ``python -m bench``."""
    parser = commands.add_parser(
        "flash", help="time both twins beside peers, on a GPU", description=__doc__
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Time every case, print the table; returns 130 when interrupted."""
    prepare(arguments)
    import jax

    from bench.timing import time_calls
    from interop.parity.environment import choose_targets, facts

    console = Console()
    found = facts("cuda")
    console.print(*(f"{name} {value}" for name, value in found.items()), sep=", ")
    targets = [target for target in choose_targets("cuda", None) if target is not None]
    chosen = jobs(targets, arguments.filter)
    if not chosen:
        arguments.refuse(f"--filter: expected part of a case's name, got {arguments.filter!r}")
    return run_suite(
        chosen, origin(found), time_calls, jax.block_until_ready, console, arguments.json,
        arguments.resume,
    )  # fmt: skip


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
        return forward
    out = forward()

    def backward():
        with use_target(target):
            return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return backward


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
            return lambda: forward(q, k, v)
        backward = jax.jit(
            lambda dout, *saved: flash_bwd(dout, None, *saved, spec=case.spec, backend=target)
        )
        jax.block_until_ready(backward(dout, q, k, v, out, lse))
    return lambda: backward(dout, q, k, v, out, lse)


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
        return forward
    out = forward()
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)
