"""One implementation on one case."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import torch

import pallas_attn
import torch_attn
from interop.exchange import to_jax, to_torch
from interop.parity.cases import Case, DecodeCase
from interop.parity.inputs import Tensors
from twin_attention.contract.explain import Explanation
from twin_attention.contract.validate import fail
from twin_attention.targets.target import use_target

IMPLEMENTATIONS = ("triton", "reference")
OUTPUTS = ("out", "lse")
GRADIENTS = ("dout", "dlse")


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


def run(runner: Runner, case: Case, inputs: Tensors) -> Run:
    """Run one implementation on the tensors of a case.

    Raises:
        ValueError: the results are not shaped and typed as the contract says; besides, whatever
            the implementation raises.
    """
    run_package = _run_torch if runner.package == "torch_attn" else _run_jax
    name = _function(case)
    with use_target(runner.target):
        start = time.perf_counter()
        results = run_package(_call(runner, case, name), inputs)
        seconds = time.perf_counter() - start
    _check(results, case, inputs)
    return Run(results, seconds, explain(runner, case, inputs))


def explain(runner: Runner, case: Case, inputs: Tensors) -> Explanation:
    """What the package says that it runs for this case."""
    operands, _ = _split(inputs)
    if runner.package == "pallas_attn":
        operands = share(operands)
    package = torch_attn if runner.package == "torch_attn" else pallas_attn
    function = getattr(package, _function(case))
    options = case.options | {"implementation": runner.implementation}
    with use_target(runner.target):
        return package.explain(function, **operands, **options)


def share(tensors: Tensors) -> dict[str, jax.Array]:
    """Tensors of a case for JAX: their own memory, but for views with strides, which JAX copies."""
    return {name: to_jax(x, copy=not x.is_contiguous()) for name, x in tensors.items()}


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


def _function(case: Case) -> str:
    """Return the name of the function, in both packages, that a case calls."""
    return "paged_decode" if isinstance(case, DecodeCase) else "flash_attention"


def _call(runner: Runner, case: Case, name: str) -> Callable[..., Any]:
    """A function of the runner's package, with all arguments of the case but its tensors."""
    package = torch_attn if runner.package == "torch_attn" else pallas_attn
    function = getattr(package, name)
    return partial(function, **case.options, implementation=runner.implementation)


def _split(inputs: Tensors) -> tuple[Tensors, Tensors]:
    """The operands of a case's call, and the gradients of its outputs if it has a backward."""
    operands = {name: x for name, x in inputs.items() if name not in GRADIENTS}
    return operands, {name: inputs[name] for name in GRADIENTS if name in inputs}


def _run_torch(call: Callable[..., Any], inputs: Tensors) -> Tensors:
    operands, gradients = _split(inputs)
    if gradients:
        operands = {name: x.detach().requires_grad_() for name, x in operands.items()}
    outputs = call(**operands, return_lse=True)
    results = {name: x.detach() for name, x in zip(OUTPUTS, outputs, strict=True)}
    if gradients:
        found = torch.autograd.grad(outputs, tuple(operands.values()), tuple(gradients.values()))
        results |= {f"d{name}": x for name, x in zip(operands, found, strict=True)}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return results


def _run_jax(call: Callable[..., Any], inputs: Tensors) -> Tensors:
    # A new function for each run, so that it is traced again under this run's target.
    @jax.jit
    def results_of(operands, gradients):
        def forward(operands):
            return call(**operands, return_lse=True)

        if not gradients:
            return forward(operands), {}
        outputs, pull_back = jax.vjp(forward, operands)
        return outputs, *pull_back(tuple(gradients[name] for name in GRADIENTS))

    operands, gradients = map(share, _split(inputs))
    outputs, found = jax.block_until_ready(results_of(operands, gradients))
    results = dict(zip(OUTPUTS, outputs, strict=True))
    results |= {f"d{name}": found[name] for name in operands if name in found}
    return {name: to_torch(x) for name, x in results.items()}


def _check(results: Tensors, case: Case, inputs: Tensors) -> None:
    q = inputs["q"]
    shapes = {
        "out": (*q.shape[:-1], case.spec.head_dim_v),
        "lse": tuple(q[..., 0].movedim(-1, 1).shape),
    }
    for name, got in results.items():
        shape = shapes[name] if name in OUTPUTS else tuple(inputs[name[1:]].shape)
        dtype = torch.float32 if name == "lse" else q.dtype
        if (tuple(got.shape), got.dtype, got.device) != (shape, dtype, q.device):
            expected = f"{shape} {dtype} on {q.device}"
            actual = f"{tuple(got.shape)} {got.dtype} on {got.device}"
            fail(ValueError, f"{case.name}: {name}", expected, actual)
