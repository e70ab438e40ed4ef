"""One configuration at work on a row's case: its call, and how wrong its results are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from interop.parity.cases import Case, DecodeCase
from twin_attention.contract.tolerances import compare_lse, compare_to_reference
from twin_attention.targets.config import use_configs
from twin_attention.targets.kernels import KERNELS, KernelConfig
from twin_attention.targets.target import use_target

_DECODE = ("k_pages", "v_pages", "block_tables", "seq_lens", "sinks", "k_scale", "v_scale")
_RESULTS = {
    "flash_fwd": ("out", "lse"),
    "flash_bwd": ("dq", "dk", "dv"),
    "paged_decode": ("out", "lse"),
}


class Refused(Exception):
    """A configuration's results are wrong; the text says how."""


class Trials:
    """Calls of a kernel's function on a case, one configuration each.

    The kernels' own functions are called, not the packages': those keep what JAX traced, and with
    it the configuration of an earlier call.
    """

    def __init__(
        self, package: str, target: str, kernel: str, case: Case, device: str = "cuda"
    ) -> None:
        """Make the case's tensors on the device, and what the oracle says of them."""
        from interop.parity.inputs import make_inputs
        from interop.parity.oracle import expectations
        from interop.parity.run import share

        self._package, self._target, self._kernel = package, target, kernel
        self._case = case
        self._backend = target if device == "cuda" else "interpret"
        inputs = make_inputs(case, device)
        (self._expected,) = expectations(inputs, case.spec)
        arrays = share(inputs) if package == "pallas_attn" else inputs
        self._operands = self._arrange(arrays)

    def call(self, config: KernelConfig) -> Callable[[], Any]:
        """A call of the function with this configuration, checked.

        Raises:
            Refused: a result is over its error budget.
            RuntimeError: the case does not run the kernel, or runs code of an earlier trace.
        """
        function = self._function(KERNELS[self._kernel].function)
        changes = {self._kernel: vars(config)}

        def run() -> Any:
            with use_target(self._target), use_configs(changes, self._package):
                return function(*self._operands)

        with use_configs({}) as read:
            results = run()
        if self._kernel not in read:
            raise RuntimeError(f"{self._kernel}: its configuration was not looked up")
        if (error := self.error(results)) > 1:
            raise Refused(f"error is {error:.3g} times its budget")
        return run

    def error(self, results: Sequence[Any]) -> float:
        """The worst error of the function's results over its budget."""
        from interop.exchange import to_torch

        names = _RESULTS[KERNELS[self._kernel].function]
        if self._package == "pallas_attn":
            results = [to_torch(x) for x in results]
        return max(self._error(name, x) for name, x in zip(names, results, strict=True))

    def _error(self, name: str, got: Any) -> float:
        ref, dtype = self._expected.ref[name], self._case.dtype
        if name == "lse":
            return compare_lse(got, ref).ratio
        kind = "output" if name == "out" else "gradient"
        return compare_to_reference(got, ref, self._expected.lp[name], dtype, kind).ratio

    def _function(self, name: str) -> Callable[..., Any]:
        function = getattr(import_module(f"{self._package}.kernels.portable.{name}"), name)
        function = partial(function, spec=self._case.spec)
        if self._package == "torch_attn":
            return function
        import jax

        return jax.jit(partial(function, backend=self._backend))

    def _arrange(self, arrays: dict[str, Any]) -> tuple[Any, ...]:
        """The function's operands."""
        if isinstance(self._case, DecodeCase):
            return arrays["q"], *(arrays.get(name) for name in _DECODE)
        qkv = tuple(arrays[name] for name in "qkv")
        if KERNELS[self._kernel].function == "flash_fwd":
            return qkv
        with use_target(self._target):
            outputs = self._function("flash_fwd")(*qkv)
        return arrays["dout"], arrays["dlse"], *qkv, *outputs
