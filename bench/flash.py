"""``python -m bench flash``: both twins beside FlashAttention-2 and cuDNN, on a GPU.

Forward and backward are timed apart, each with the L2 cache flushed. FLOPs are those of the pairs
that the mask keeps. FlashAttention-2 is SM80 code and the bar for SM80 code, cuDNN is the bar for
the device's own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from interop.contract.cases import FlashCase, flash_cases
from interop.contract.cost import backward_flops, forward_flops

TARGETS = ("sm90", "sm80")
Calls = dict[str, Callable[[], object]]


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to ``python -m bench``."""
    parser = commands.add_parser(
        "flash", help="time both twins beside peers, on a GPU", description=__doc__
    )
    parser.add_argument("--filter", default="", help="part of a case's name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records as JSON lines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Time every case, print the table; returns 1 without a GPU."""
    import torch

    console = Console()
    if not torch.cuda.is_available():
        console.print("python -m bench flash: expected a CUDA GPU, found none")
        return 1
    from bench.timing import time_calls
    from interop.parity.environment import facts

    origin = facts("cuda")
    console.print(*(f"{name} {value}" for name, value in origin.items()), sep=", ")
    table = Table("case", "pass", "implementation", "ms", "spread", "TFLOP/s", "of FA2", "of cuDNN")
    for case in flash_cases("large", arguments.filter):
        if "2g-elements" in case.name:
            continue
        for direction, flops in (
            ("forward", forward_flops(case.spec)),
            ("backward", backward_flops(case.spec)),
        ):
            calls, wait = _calls(case, direction)
            timings = time_calls(calls, wait)
            for name, timing in timings.items():
                spread = (timing.slowest - timing.fastest) / timing.milliseconds
                ratios = [
                    timings[peer].milliseconds / timing.milliseconds if peer in timings else None
                    for peer in ("FA2", "cuDNN")
                ]
                table.add_row(
                    case.name, direction, name, f"{timing.milliseconds:.3f}", f"{spread:.1%}",
                    f"{flops / timing.milliseconds / 1e9:.0f}",
                    *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                )  # fmt: skip
                if arguments.json:
                    record = origin | asdict(case) | {"pass": direction, "implementation": name}
                    record |= asdict(timing) | {"tflops": flops / timing.milliseconds / 1e9}
                    with arguments.json.open("a") as file:
                        file.write(json.dumps(record) + "\n")
        table.add_section()
    console.print(table)
    return 0


def _calls(case: FlashCase, direction: str) -> tuple[Calls, Callable[[object], object]]:
    """Every implementation's call on the same tensors, and how to wait for a result."""
    import jax
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    dtype = getattr(torch, case.dtype)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in case.shapes
    )
    dout = torch.randn((*q.shape[:3], v.shape[3]), generator=generator, device="cuda").to(dtype)
    calls: Calls = {}
    for make in (_torch_calls, _jax_calls, _sdpa_calls):
        calls |= dict(make(case, direction, q, k, v, dout))
    return calls, lambda result: jax.block_until_ready(result)


def _torch_calls(case: FlashCase, direction: str, q, k, v, dout) -> Iterator[tuple[str, Any]]:
    import torch

    from interop.contract.target import use_target
    from torch_attn import flash_attention

    for target in TARGETS:
        inputs = [x.detach().requires_grad_(direction == "backward") for x in (q, k, v)]

        def forward(inputs=inputs, target=target):
            with use_target(target):
                return flash_attention(*inputs, **case.options, implementation="triton")

        out = forward()

        def backward(inputs=inputs, target=target, out=out):
            with use_target(target):
                return torch.autograd.grad(out, inputs, dout, retain_graph=True)

        yield f"Triton {target}", forward if direction == "forward" else backward


def _jax_calls(case: FlashCase, direction: str, q, k, v, dout) -> Iterator[tuple[str, Any]]:
    import jax

    from interop.contract.target import use_target
    from interop.exchange import to_jax
    from pallas_attn.kernels.flash_bwd import flash_bwd
    from pallas_attn.kernels.flash_fwd import flash_fwd

    q, k, v, dout = map(to_jax, (q, k, v, dout))
    for target in TARGETS:
        with use_target(target):
            forward = jax.jit(lambda q, k, v, t=target: flash_fwd(q, k, v, case.spec, backend=t))
            backward = jax.jit(
                lambda dout, q, k, v, out, lse, t=target: flash_bwd(
                    dout, None, q, k, v, out, lse, case.spec, backend=t
                )
            )
            out, lse = forward(q, k, v)
            if direction == "backward":
                jax.block_until_ready(backward(dout, q, k, v, out, lse))
        if direction == "forward":
            yield f"Pallas {target}", lambda f=forward: f(q, k, v)
        else:
            yield f"Pallas {target}", lambda f=backward, o=out, s=lse: f(dout, q, k, v, o, s)


def _sdpa_calls(case: FlashCase, direction: str, q, k, v, dout) -> Iterator[tuple[str, Any]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    gradient = dout.transpose(1, 2)
    for name, backend in (
        ("FA2", SDPBackend.FLASH_ATTENTION),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        inputs = [x.transpose(1, 2).detach() for x in (q, k, v)]
        for x in inputs:
            x.requires_grad_(direction == "backward")

        def forward(inputs=inputs, backend=backend):
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    *inputs, is_causal=case.causal, enable_gqa=case.heads_q != case.heads_kv
                )

        try:
            out = forward()
        except RuntimeError:
            continue  # a peer that does not take the case has no row

        def backward(inputs=inputs, out=out):
            return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        yield name, forward if direction == "forward" else backward
