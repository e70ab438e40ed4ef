"""One implementation on one case."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import product

import jax
import torch

import pallas_attn
import torch_attn
from interop.contract.cases import FlashCase
from interop.contract.explain import Explanation
from interop.contract.target import use_target
from interop.contract.validate import fail
from interop.exchange import to_jax, to_torch
from interop.parity.inputs import Tensors

IMPLEMENTATIONS = ("triton", "reference")


@dataclass(frozen=True)
class Runner:
    """An implementation of one package, and the target that its kernels are compiled for.

    Attributes:
        package: "torch_attn" or "pallas_attn".
        implementation: one of `IMPLEMENTATIONS`.
        target: "sm80" or "sm90"; None where nothing is compiled.
    """

    package: str
    implementation: str
    target: str | None = None

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.package, self.implementation, self.target)))


@dataclass(frozen=True)
class Run:
    """What one runner made of one case.

    Attributes:
        results: out and lse, with gradients also dq, dk and dv, as torch tensors.
        seconds: wall-clock time of forward and backward, compilation included.
        explanation: which implementation ran, where and why.
    """

    results: Tensors
    seconds: float
    explanation: Explanation


def run(runner: Runner, case: FlashCase, inputs: Tensors) -> Run:
    """Run one implementation on the tensors of a case.

    Raises:
        ValueError: the results are not shaped and typed as the contract says; besides, whatever
            the implementation raises.
    """
    attend = _run_torch if runner.package == "torch_attn" else _run_jax
    with use_target(runner.target):
        start = time.perf_counter()
        results = attend(runner.implementation, case, inputs)
        seconds = time.perf_counter() - start
    _check(results, case, inputs)
    return Run(results, seconds, explain(runner, case, inputs))


def explain(runner: Runner, case: FlashCase, inputs: Tensors) -> Explanation:
    """What the package says that it runs for this case."""
    qkv = [inputs[name] for name in "qkv"]
    with use_target(runner.target):
        if runner.package == "torch_attn":
            return torch_attn.explain(*qkv, **case.options, implementation=runner.implementation)
        arrays = [_to_jax(x, case) for x in qkv]
        return pallas_attn.explain(*arrays, **case.options, implementation=runner.implementation)


def plan(implementations: tuple[str, ...], targets: tuple[str | None, ...]) -> list[list[Runner]]:
    """The runners, grouped by target; the reference compiles nothing and goes with the first."""
    return [
        [
            Runner(package, implementation, target if implementation != "reference" else None)
            for implementation in implementations
            for package in ("torch_attn", "pallas_attn")
            if implementation != "reference" or target == targets[0]
        ]
        for target in targets
    ]


def twins(group: list[Runner]) -> list[tuple[Runner, Runner]]:
    """Every torch_attn runner of a group with every pallas_attn runner of it."""
    pairs = product(group, group)
    return [(a, b) for a, b in pairs if (a.package, b.package) == ("torch_attn", "pallas_attn")]


def _run_torch(implementation: str, case: FlashCase, inputs: Tensors) -> Tensors:
    qkv = [inputs[name].detach().requires_grad_(case.gradients) for name in "qkv"]
    out, lse = torch_attn.flash_attention(
        *qkv, **case.options, return_lse=True, implementation=implementation
    )
    results = {"out": out.detach(), "lse": lse.detach()}
    if case.gradients:
        grads = torch.autograd.grad((out, lse), qkv, (inputs["dout"], inputs["dlse"]))
        results |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    if out.is_cuda:
        torch.cuda.synchronize()
    return results


def _run_jax(implementation: str, case: FlashCase, inputs: Tensors) -> Tensors:
    def attend(q, k, v):
        return pallas_attn.flash_attention(
            q, k, v, **case.options, return_lse=True, implementation=implementation
        )

    # A new function for each run, so that it is traced again under this run's target.
    @jax.jit
    def results_of(q, k, v, dout, dlse):
        if not case.gradients:
            return attend(q, k, v)
        outputs, pull_back = jax.vjp(attend, q, k, v)
        return *outputs, *pull_back((dout, dlse))

    arrays = {name: _to_jax(x, case) for name, x in inputs.items()}
    results = jax.block_until_ready(results_of(**arrays))
    names = ("out", "lse", "dq", "dk", "dv")
    return {name: to_torch(x) for name, x in zip(names, results, strict=False)}


def _to_jax(x: torch.Tensor, case: FlashCase) -> jax.Array:
    # JAX arrays have no strides: a strided case is copied, every other shares its memory.
    return to_jax(x, copy=case.layout == "strided")


def _check(results: Tensors, case: FlashCase, inputs: Tensors) -> None:
    like = {"out": "dout", "lse": "dlse", "dq": "q", "dk": "k", "dv": "v"}
    for name, got in results.items():
        want = inputs[like[name]]
        if (got.shape, got.dtype, got.device) != (want.shape, want.dtype, want.device):
            expected, actual = (f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (want, got))
            fail(ValueError, f"{case.name}: {name}", expected, actual)
