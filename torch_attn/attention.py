"""Take the public attention functions from a caller's arguments to a kernel.

A known call is replayed (`torch_attn.calls`). A new one is checked, then cached or run by the
operator, which is what `torch.compile` and `torch.func` see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_attn.calls import CALLS, Call, is_recorded
from torch_attn.dispatch import check_implementation
from torch_attn.operands import in_float32, operand, rows_aligned
from torch_attn.operators import Operator, schema
from twin_attention.contract.operands import CONSTANTS, WIDENED, describe_operands
from twin_attention.contract.paged_spec import DecodeOptions
from twin_attention.contract.spec import FlashOptions
from twin_attention.contract.validate.errors import not_constant


class Attention(ABC):
    """A public attention function, which returns out and lse."""

    operator: Operator
    is_differentiable = False

    def __init__(
        self,
        operation: str,
        operands: type[Any],
        options: type[FlashOptions] | type[DecodeOptions],
        check_options: Callable[..., Any],
        check: Callable[[Any, Any], Any],
    ) -> None:
        """`check` takes described operands and checked options, and returns the problem."""
        self.operation, self.operands, self._options = operation, operands, options
        self.num_operands, self.tensors_schema = len(operands._fields), schema(operands)
        self.others_schema = f"{schema(options)}, str? implementation"
        self._check_options, self._check = check_options, check
        self._widened = [i for i, name in enumerate(operands._fields) if name in WIDENED]

    @abstractmethod
    def cast(self, operands: Any) -> Any:
        """Return operands as autocast casts them."""

    def run(self, function: Any, spec: Any, backend: Any, *operands: Tensor | None) -> Any:
        return function(self.operands._make(operands), spec, backend)

    def __call__(
        self, operands: tuple[Any, ...], options: tuple[Any, ...], implementation: Any
    ) -> Any:
        """Run the public function; return_lse is the last option."""
        operands = self._widen(operands)
        if torch.is_autocast_enabled("cuda"):
            operands = self.cast(operands)
        call = CALLS.find(self, operands, (*options, implementation))
        if call is None:
            out, lse, *more = self._check_and_attend(operands, options, implementation)
        else:
            out, lse, *more = self.attend(call, operands, options[-1])
        if more:
            return (out, lse, *more) if options[-1] else (out, *more)
        return (out, lse) if options[-1] else out

    def _check_and_attend(
        self, given: tuple[Any, ...], options: tuple[Any, ...], implementation: Any
    ) -> Any:
        operands, checked = self.cast(given), self._check_options(*options)
        _refuse_gradients(operands)
        check_implementation(implementation)
        others = (*checked, implementation)
        # torch.compile: the operator's fake kernel checks the operands.
        if not torch.compiler.is_compiling():
            spec = self.check(operands, checked)
            if self.is_differentiable or not is_recorded(operands):
                call = self._call(spec, others, operands.q.device)
                if CALLS.keep(self, operands, (*options, implementation), call):
                    return self.attend(call, operands, options[-1])
        operator = self.operator_of(operands, checked)
        return operator.returned(operator.op(*operands, *others))

    def _widen(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        for i in self._widened:
            x = operands[i]
            if x is not None and (wide := in_float32(x)) is not x:
                operands = (*operands[:i], wide, *operands[i + 1 :])
        return operands

    def operator_of(self, operands: Any, options: Any) -> Operator:
        """Return the operator with the results that the call asks for."""
        return self.operator

    def attend(self, call: Call, operands: tuple[Any, ...], return_lse: bool) -> Any:
        return call(*operands)

    def check(self, operands: Any, options: Any, *read: Tensor) -> Any:
        spec = self._check(describe_operands(operands, operand), options)
        first = [x for x in operands[:3] if x is not None]
        return replace(spec, rows_aligned=rows_aligned(*first, *read))

    def problem(self, **arguments: Any) -> tuple[Any, Any]:
        given = tuple(arguments.pop(name) for name in self.operands._fields)
        operands = self.cast(self._widen(given))
        _refuse_gradients(operands)
        return operands, self.check(operands, self._check_options(**arguments))

    def options_of(self, args: Any) -> Any:
        return self._options._make(args[-1 - len(self._options._fields) : -1])

    def call_of(self, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Call:
        operands = self.operands._make(tensors)
        spec = self.check(operands, self.options_of(others))
        return self._call(spec, others, operands.q.device)

    def _call(self, spec: Any, others: tuple[Any, ...], device: torch.device) -> Call:
        return Call(self.operation, self.run, spec, device, others)

    def fake(self, *args: Any) -> tuple[Tensor, ...]:
        operands = self.operands._make(args[: self.num_operands])
        spec = self._check(describe_operands(operands, operand), self.options_of(args))
        return self.new_outputs(operands, spec.head_dim_v)

    def new_outputs(self, operands: Any, head_dim_v: int) -> tuple[Tensor, Tensor]:
        """Allocate out and lse: [B, H, S], or packed [H, T]."""
        first, *rows, heads, _ = operands.q.shape
        out = operands.q.new_empty((first, *rows, heads, head_dim_v))
        is_packed = hasattr(operands, "cu_seqlens_q")
        shape = (heads, first) if is_packed else (first, heads, *rows)
        return out, out.new_empty(shape, dtype=torch.float32)


def _refuse_gradients(operands: Any) -> None:
    for name in CONSTANTS:
        x = getattr(operands, name, None)
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            not_constant(name)
