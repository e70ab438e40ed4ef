"""Run one configuration on a row's case, and check its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from tuning.search.cases import TimedCase
from twin_attention.contract.block_mask import BlockMask
from twin_attention.contract.operands import (
    BlockSparseOperands,
    DecodeOperands,
    FlashOperands,
    PagedOperands,
)
from twin_attention.interop.exchange import to_torch
from twin_attention.interop.parity.check import worst
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.jax_calls import prepare_jax
from twin_attention.interop.parity.oracle import expectations, parts_of
from twin_attention.interop.parity.sides import SIDES
from twin_attention.interop.parity.torch_calls import prepare_torch
from twin_attention.targets.config import use_configs
from twin_attention.targets.family import portable_backend
from twin_attention.targets.kernels import KERNELS, KernelConfig


class Refused(Exception):
    """A configuration's results are wrong; the text says how."""


class Trials:
    """Calls of a kernel's function on a case, one per configuration.

    They call the kernels' functions: the packages keep JAX's traces with earlier configurations.
    """

    def __init__(
        self, side: str, target: str, kernel: str, case: TimedCase, device: str = "cuda"
    ) -> None:
        self._side, self._kernel, self._function = side, kernel, KERNELS[kernel].function
        backend = portable_backend(side, target if device == "cuda" else None)
        self._options = {"spec": case.spec, "backend": backend}
        inputs = make_inputs(case, device)
        self._expected = expectations(inputs, parts_of(case.spec))
        arrays = SIDES[side]().share(inputs)
        kinds = {"paged_decode": DecodeOperands, "paged_attention": PagedOperands}
        kind: Any = kinds.get(self._function, FlashOperands)
        if "block_mask" in arrays:
            kind = BlockSparseOperands
            arrays |= BlockMask.of(arrays["block_mask"])._asdict()
        operands = kind(*map(arrays.get, kind._fields))
        self._arguments: tuple[Any, ...] = (operands,)
        if self._function == "flash_bwd":
            outputs = self._prepare("flash_fwd")()
            self._arguments = (arrays["dout"], arrays["dlse"], operands, *outputs, None)

    def call(self, config: KernelConfig) -> Callable[[], Any]:
        """Return a checked call of the function with this configuration.

        Raises:
            Refused: a result is over its error budget.
            RuntimeError: the case does not run the kernel, or runs code of an earlier trace.
        """
        prepared, changes = self._prepare(self._function), {self._kernel: vars(config)}

        def run() -> Any:
            with use_configs(changes, self._side):
                return prepared()

        with use_configs({}) as read:
            results = run()
        if self._kernel not in read:
            raise RuntimeError(f"{self._kernel}: its configuration was not looked up")
        if (error := self.error(results)) > 1:
            raise Refused(f"error is {error:.3g} times its budget")
        return run

    def error(self, results: Sequence[Any]) -> float:
        results = [x for x in results if x is not None]
        if self._side == "pallas_attn":
            results = [to_torch(x) for x in results]
        names = ("dq", "dk", "dv") if self._function == "flash_bwd" else ("out", "lse")
        return worst(dict(zip(names, results, strict=True)), self._expected)

    def _prepare(self, name: str) -> Callable[[], Any]:
        function = getattr(import_module(f"{self._side}.kernels.portable.{name}"), name)
        prepare = prepare_torch if self._side == "torch_attn" else prepare_jax
        return prepare(partial(function, **self._options), "forward", self._arguments, None)
