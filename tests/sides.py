"""`torch_attn` and `pallas_attn` behind one interface, for tests that hold both to the same.

Inputs and results are torch tensors, whichever side computes: they keep bfloat16 and strides.
A side's framework is imported when the side is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tests.oracle import Inputs, Results

# dtypes that numpy has not by itself, and integers of their size
BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


class Side(Protocol):
    """One of the two implementations of the contract."""

    api: ModuleType
    tensor: str  # what its messages call a tensor
    flash_attention: Callable[..., Any]

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Zeros as an array of the side's own framework."""
        ...

    def from_torch(self, x: Tensor) -> Any:
        """The tensor as an array of the side's own framework."""
        ...

    def on_cpu(self, x: Any) -> Any:
        """A copy of the side's array in the CPU's memory."""
        ...

    def trace(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Call a function of the side without values, so that no kernel can be launched."""
        ...

    def call(self, name: str, operands: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
        """What a function of the side returns; of `append_kv`, new pools."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """out and lse."""
        ...

    def gradients(self, inputs: Inputs, **options: Any) -> Results:
        """out, lse, and the gradients of ``sum(out * dout) + sum(lse * dlse)``."""
        ...

    def gradients_of_out(self, inputs: Inputs, **options: Any) -> tuple[Tensor, ...]:
        """dq, dk and dv of ``sum(out * dout)``, by a call that does not return the lse."""
        ...


class TorchSide:
    """torch_attn. Memory that torch allocates during a call holds NaN until it is written."""

    tensor = "a torch.Tensor"

    def __init__(self, device: str) -> None:
        import torch_attn

        self.device = device
        self.api = torch_attn
        self.flash_attention = torch_attn.flash_attention

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def from_torch(self, x: Tensor) -> Tensor:
        return x.to(self.device)

    def on_cpu(self, x: Tensor) -> Tensor:
        return x.cpu()

    def trace(self, function: Callable[..., Any], **arguments: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            tensors = {n: mode.from_tensor(x) for n, x in arguments.items() if torch.is_tensor(x)}
            function(**arguments | tensors)

    def call(self, name: str, operands: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
        if name == "append_kv":
            pools = {pool: operands[pool].clone() for pool in ("k_pages", "v_pages")}
            operands = operands | pools
        with poisoned_memory():
            return getattr(self.api, name)(**operands, **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        with poisoned_memory():
            return self.flash_attention(q, k, v, return_lse=True, **options)

    def gradients(self, inputs: Inputs, **options: Any) -> Results:
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        with poisoned_memory():
            results = self.flash_attention(q, k, v, return_lse=True, **options)
            gradients = torch.autograd.grad(results, (q, k, v), inputs[3:])
        return Results(*(x.detach() for x in results), *gradients)

    def gradients_of_out(self, inputs: Inputs, **options: Any) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        with poisoned_memory():
            out = self.flash_attention(q, k, v, **options)
            return torch.autograd.grad(out, (q, k, v), inputs.dout)


class PallasSide:
    """pallas_attn, under jit. Pallas's interpreter fills a kernel's outputs with NaN by itself."""

    tensor = "a jax.Array"

    def __init__(self, device: str) -> None:
        import jax

        import pallas_attn

        self.device = device
        self.api = pallas_attn
        self.flash_attention = pallas_attn.flash_attention
        self._jax = jax

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        # float64 and int64 exist in JAX only where they are enabled.
        with self._jax.enable_x64(True):
            return self._jax.numpy.zeros(shape, dtype)

    def on_cpu(self, x: Any) -> Any:
        return self._jax.device_put(x, self._jax.devices("cpu")[0])

    def trace(self, function: Callable[..., Any], **arguments: Any) -> None:
        arrays = {n: x for n, x in arguments.items() if isinstance(x, self._jax.Array)}
        self._jax.eval_shape(lambda arrays: function(**arguments | arrays), arrays)

    def call(self, name: str, operands: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
        run = self._compiled(name, tuple(sorted(options.items())))
        arrays = {name: self.from_torch(x) for name, x in operands.items()}
        return tuple(map(self._to_torch, run(**arrays)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        run = self._compiled("forward", tuple(sorted(options.items())))
        out, lse = run(*map(self.from_torch, (q, k, v)))
        return self._to_torch(out), self._to_torch(lse)

    def gradients(self, inputs: Inputs, **options: Any) -> Results:
        run = self._compiled("gradients", tuple(sorted(options.items())))
        return Results(*map(self._to_torch, run(*map(self.from_torch, inputs))))

    def gradients_of_out(self, inputs: Inputs, **options: Any) -> tuple[Tensor, ...]:
        run = self._compiled("gradients_of_out", tuple(sorted(options.items())))
        return tuple(map(self._to_torch, run(*map(self.from_torch, inputs[:4]))))

    @cache  # noqa: B019 - one side lives as long as the session
    def _compiled(self, what: str, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        """A jitted function that keeps its compilations, one for each set of shapes."""
        jax = self._jax
        attention = partial(self.flash_attention, **dict(options))
        with_lse = partial(attention, return_lse=True)

        def gradients(q, k, v, dout, dlse):
            results, pullback = jax.vjp(with_lse, q, k, v)
            return *results, *pullback((dout, dlse))

        def gradients_of_out(q, k, v, dout):
            _, pullback = jax.vjp(attention, q, k, v)
            return pullback(dout)

        functions = {
            "forward": with_lse, "gradients": gradients, "gradients_of_out": gradients_of_out,
        }  # fmt: skip
        return jax.jit(functions.get(what) or partial(getattr(self.api, what), **dict(options)))

    def from_torch(self, x: Tensor) -> Any:
        array = x.detach().contiguous().cpu().view(BITS.get(x.dtype, x.dtype)).numpy()
        return self._jax.numpy.asarray(array.view(str(x.dtype).removeprefix("torch.")))

    def _to_torch(self, x: Any) -> Tensor:
        dtype = getattr(torch, x.dtype.name)
        bits = str(BITS.get(dtype, dtype)).removeprefix("torch.")
        return torch.from_numpy(np.array(x).view(bits)).view(dtype).to(self.device)


SIDES = {"torch_attn": TorchSide, "pallas_attn": PallasSide}


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
