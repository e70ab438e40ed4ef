from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.without_lowering import leaves_out, name_of
from torch_attn.targets import target_of
from twin_attention.interop.exchange import to_jax
from twin_attention.interop.parity import sides
from twin_attention.interop.parity.cases import Case
from twin_attention.interop.parity.environment import BITWISE
from twin_attention.interop.parity.inputs import Tensors


class TorchSide(sides.TorchSide):
    """torch_attn. Memory that torch allocates during a call holds NaN until it is written."""

    tensor = "a torch.Tensor"  # as its messages call one

    def __init__(self, device: str, bitwise: bool = False) -> None:
        self.device = device  # an interpreted kernel has the same bits with and without `bitwise`

    def call(self, name: str, operands: Tensors, *gradients: Any, **options: Any):
        if name == "flash_attention":
            # Only without poisoned memory, whose switch is that of deterministic algorithms.
            options.setdefault("deterministic", False)
        with poisoned_memory(), _skipped_if_unsupported(options.get("implementation")):
            return super().call(name, operands, *gradients, **options)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def on_cpu(self, x: Tensor) -> Tensor:
        return x.cpu()

    def trace(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Call a function without values, so that no kernel can be launched."""
        with FakeTensorMode() as mode:
            tensors = {n: mode.from_tensor(x) for n, x in arguments.items() if torch.is_tensor(x)}
            function(**arguments | tensors)


class PallasSide(sides.PallasSide):
    """pallas_attn, under jit. Pallas's interpreter itself fills a kernel's outputs with NaN."""

    tensor = "a jax.Array"

    def __init__(self, device: str, bitwise: bool = False) -> None:
        self.device = device
        if bitwise and device == "cpu":
            self.compiler_options = BITWISE

    def share(self, tensors: Tensors) -> dict[str, Any]:
        """Copy, since a test's tensors may be views of any alignment."""
        return {name: to_jax(x, copy=True) for name, x in tensors.items()}

    def call(self, name: str, operands: Tensors, *gradients: Any, **options: Any):
        with _skipped_if_unsupported(options.get("implementation")):
            return super().call(name, operands, *gradients, **options)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        # float64 and int64 exist in JAX only where they are enabled.
        with jax.enable_x64(True):
            return jax.numpy.zeros(shape, dtype)

    def on_cpu(self, x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.devices("cpu")[0])

    def trace(self, function: Callable[..., Any], **arguments: Any) -> None:
        arrays = {n: x for n, x in arguments.items() if isinstance(x, jax.Array)}
        jax.eval_shape(lambda arrays: function(**arguments | arrays), arrays)


EXPLICIT = ("gluon", "mosaic")  # families of some problems alone


def _target() -> str | None:
    return target_of(torch.device("cuda")) if torch.cuda.is_available() else None


def _implementations() -> tuple[str, ...]:
    """Explicit kernels run only on their target."""
    subjects = sides.plan(("reference", "triton", *EXPLICIT), (_target(),))[0]
    return tuple(dict.fromkeys(subject.implementation for subject in subjects))


def takes(side: Side, implementation: str, case: Case) -> bool:
    package = side.api.__name__
    subject = sides.Ours(package, name_of(package, implementation), _target())
    return subject.supports(case) is None


IMPLEMENTATIONS = _implementations()


Side = TorchSide | PallasSide
SIDES: dict[str, type[Side]] = {"torch_attn": TorchSide, "pallas_attn": PallasSide}


def attention(side: Side, inputs: Tensors, **options: Any) -> Tensors:
    return sides.results(side, "flash_attention", inputs, **options)


def by_reference(inputs: Tensors, function: str = "flash_attention", **options: Any) -> Tensors:
    """Return torch's reference results, which XLA need not compile: what a law compares with."""
    side = TorchSide(inputs["q"].device.type)
    return sides.results(side, function, inputs, **options | {"implementation": "reference"})


@contextmanager
def _skipped_if_unsupported(implementation: str | None) -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        is_refused = implementation in EXPLICIT and str(error).startswith("implementation: ")
        if is_refused or leaves_out(error):
            pytest.skip(str(error))
        raise


@contextmanager
def strict_types() -> Iterator[None]:
    """Let JAX have numbers of 64 bits, and refuse what changes a type or a shape implicitly."""
    strict = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with jax.enable_x64(True), strict[0], strict[1]:
        yield


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let ``torch.empty`` return NaN, so that an element that nobody writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
