"""Flash attention, dense, packed and sparse: its torch operators, and what they run.

The operators are `torch_attn::flash_fwd`, `::flash_bwd`, `::flash_varlen_fwd`,
`::flash_varlen_bwd`, `::block_sparse_fwd` and `::block_sparse_bwd`. `::flash_row_max_fwd` and
`::flash_varlen_row_max_fwd` return row maxima as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_attn import vmap
from torch_attn.attention import Attention
from torch_attn.autograd import Backward, Forward, has_gradient, run_kept, with_left_out
from torch_attn.calls import Call
from torch_attn.dispatch import choose
from torch_attn.operands import aligned, cast_inputs, operand
from torch_attn.operators import readable
from torch_attn.replay import Capture
from twin_attention.contract.operands import (
    CONSTANTS,
    BlockSparseOperands,
    FlashOperands,
    VarlenOperands,
)
from twin_attention.contract.spec import FlashOptions
from twin_attention.contract.validate.attention import (
    check_flash_attention,
    check_flash_attention_varlen,
    check_saved,
)
from twin_attention.contract.validate.block_mask import check_block_sparse_attention
from twin_attention.contract.validate.options import check_attention_options, check_flash_options

if TYPE_CHECKING:
    from torch_attn.launch import Launch


class FlashAttention(Attention):
    """A function of flash attention on one kind of operands, with its derivative.

    Attributes:
        fwd, bwd: the operators.
        row_max_fwd: the operator that also returns row maxima; fwd for a function without them.
    """

    operator: Forward
    is_differentiable = True

    def __init__(
        self,
        function: str,
        name: str,
        operands: type[Any],
        check: Callable[[Any, FlashOptions], Any],
        rule: Callable[..., Any],
        check_options: Callable[..., FlashOptions] = check_flash_options,
    ) -> None:
        """Define and register the operators.

        Args:
            function: the public function.
            name: the operators' name, before "_fwd" and "_bwd".
            operands: the class of their operands.
            check: check described operands against options.
            rule: the `vmap` rule.
            check_options: check options as the caller gave them.
        """
        super().__init__("flash_fwd", operands, FlashOptions, check_options, check)
        count, tensors, others = self.num_operands, self.tensors_schema, self.others_schema
        # An operator cannot return None: a missing gradient is an empty tensor.
        gradients = ", ".join(f"Tensor d{field}" for field in operands._fields)
        backward = Backward(
            f"{name}_bwd(Tensor dout, Tensor? dlse, {tensors}, Tensor out, Tensor lse, {others}) "
            f"-> ({gradients})",
            count + 4, self._backward_call, self._fake_backward, function,
        )  # fmt: skip

        def forward(name: str, results: str) -> Forward:
            return Forward(
                f"{name}_fwd({tensors}, {others}) -> ({results})",
                count, self.call_of, self.fake, function, backward=backward,
            )  # fmt: skip

        self.operator = self._with_row_max = forward(name, "Tensor out, Tensor lse")
        self.fwd, self.bwd = self.operator.op, backward.op
        operators = [self.operator, backward]
        if check_options is check_attention_options:
            results = "Tensor out, Tensor lse, Tensor row_max"
            self._with_row_max = forward(f"{name}_row_max", results)
            operators.append(self._with_row_max)
        self.row_max_fwd = self._with_row_max.op
        for operator in operators:
            operator.register_vmap(rule)

    def cast(self, operands: Any) -> Any:
        return self.operands(*cast_inputs(*operands[:3]), *operands[3:])

    def operator_of(self, options: FlashOptions) -> Forward:
        return self._with_row_max if options.row_max else self.operator

    def attend(self, call: Call, operands: tuple[Any, ...], return_lse: bool) -> Any:
        spec: Any = call.spec
        operator = self._with_row_max if spec.row_max else self.operator
        if call.is_new and call.is_recorded:
            from torch_attn.overlap import compiled_behind  # imports Triton

            launches = partial(self._launches_of_backward, call, operands)
            with compiled_behind(launches, operands[0].device):
                return run_kept(operator, call, operands, return_lse)
        return run_kept(operator, call, operands, return_lse)

    def _launches_of_backward(self, call: Call, operands: tuple[Any, ...]) -> list[Launch]:
        """Return what a call's backward will launch, found with tensors that hold no values."""
        spec = replace(call.spec, row_max=False)  # pyright: ignore[reportArgumentType]
        backend, _ = choose(call.others[-1], "flash_bwd", operands[0].device, spec)
        tensors = self.operands._make(
            None
            if x is None
            else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            for x in operands
        )
        out, lse = self.new_outputs(tensors)
        function = backend.family.function("flash_bwd")
        with torch.no_grad(), Capture() as found:
            self.run_backward(function, spec, backend, out, None, *tensors, out, lse)
        return [step.launcher for step in found.steps if hasattr(step, "launcher")]

    def fake(self, *args: Any) -> tuple[Tensor, ...]:
        out, lse = super().fake(*args)
        return (out, lse, torch.empty_like(lse)) if self.options_of(args).row_max else (out, lse)

    def run_backward(self, function, spec, backend, dout, dlse, *tensors: Any):
        """Run a family's flash_bwd, copying the tensors that its kernels cannot read.

        They read lse as the forward wrote it, and out by rows. TMA needs aligned rows.
        """
        *operands, out, lse = tensors
        out, lse = readable(out, lse)
        if backend.family.folder == "sm90":
            dout, out, *first = map(aligned, (dout, out, *operands[:3]))
            operands[:3] = first
        return function(dout, dlse, self.operands._make(operands), out, lse, spec, backend)

    def _backward_call(self, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Call:
        """Return the call of a backward, which follows from all tensors that it reads.

        Saved tensors may come back in another layout, because hooks may have moved them. A family
        that is requested by name reads copies of tensors that its kernels cannot read.

        Raises:
            TypeError, ValueError: a tensor's dtype, shape or device differs from the forward's.
        """
        dout, _, *operands, out, lse = tensors
        operands = self.operands._make(operands)
        spec = self.check(operands, self.options_of(others), dout, out)
        q = operand("q", operands.q)
        check_saved(operand("dout", dout), q, operand("out", out), operand("lse", lse))
        spec = replace(spec, row_max=False)  # the forward's alone
        if others[-1] is not None:
            spec = replace(spec, rows_aligned=True, compact=True)
        return Call("flash_bwd", self.run_backward, spec, dout.device, others)

    def _fake_backward(self, dout, dlse, *args):
        operands = args[: self.num_operands]
        named = zip(self.operands._fields, operands, strict=True)
        gradients = (
            x.new_empty(x.shape) if has_gradient(x) and name not in CONSTANTS else None
            for name, x in named
        )
        return with_left_out(gradients, dout)


def or_as_torch_says(deterministic: Any) -> Any:
    """Return the option, with torch's own setting in place of None."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    return deterministic


DENSE = FlashAttention(
    "flash_attention",
    "flash",
    FlashOperands,
    check_flash_attention,
    partial(vmap.join_batch_or_heads, FlashOperands._fields),
    check_attention_options,
)
PACKED = FlashAttention(
    "flash_attention_varlen",
    "flash_varlen",
    VarlenOperands,
    check_flash_attention_varlen,
    partial(vmap.refuse, "flash_attention_varlen"),
    check_attention_options,
)
SPARSE = FlashAttention(
    "block_sparse_attention",
    "block_sparse",
    BlockSparseOperands,
    check_block_sparse_attention,
    vmap.join_batch_of_mask,
)
