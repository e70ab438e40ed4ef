"""Flash attention, dense, packed and sparse: its torch operators, and what they run.

Operators are `flash`, `flash_varlen` and `block_sparse`, each with `_fwd` and `_bwd`. Of the first
two, `_terms_fwd` also returns the `rest_of_lse` of scores with terms, `_row_max_fwd` row maxima,
and `_terms_row_max_fwd` both; `_jvp` computes tangents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_attn import vmap
from torch_attn.attention import Attention
from torch_attn.autograd import Backward, Derivative, Forward, has_gradient, run_kept, with_left_out
from torch_attn.calls import Call
from torch_attn.dispatch import choose
from torch_attn.operands import aligned, cast_inputs, operand
from torch_attn.operators import readable
from torch_attn.replay import Capture, CapturedLaunch
from twin_attention.contract.operands import (
    CONSTANTS,
    DIFFERENTIABLE,
    BlockSparseOperands,
    FlashOperands,
    VarlenOperands,
    frozen_operands,
    has_terms,
)
from twin_attention.contract.spec import FlashOptions
from twin_attention.contract.validate.attention import (
    check_flash_attention,
    check_flash_attention_varlen,
    check_saved,
)
from twin_attention.contract.validate.block_mask import check_block_sparse_attention
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.options import check_attention_options, check_flash_options

if TYPE_CHECKING:
    from torch_attn.launch import Launch


class FlashAttention(Attention):
    """Flash attention on one kind of operands, with its derivative."""

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
        super().__init__("flash_fwd", operands, FlashOptions, check_options, check)
        count, tensors, others = self.num_operands, self.tensors_schema, self.others_schema
        # An operator cannot return None: a missing gradient is an empty tensor. Names of frozen
        # operands are words, since a list would not be a key.
        gradients = ", ".join(f"Tensor d{field}" for field in operands._fields)
        backward = Backward(
            f"{name}_bwd(Tensor dout, Tensor? dlse, {tensors}, Tensor out, Tensor lse, "
            f"Tensor? rest, str frozen, {others}) -> ({gradients})",
            count + 5, self._backward_call, self._fake_backward, function,
        )  # fmt: skip

        has_all = check_options is check_attention_options
        self.with_tangents = tuple(x for x in operands._fields if x in DIFFERENTIABLE)
        jvp = None
        if has_all:
            tangents = ", ".join(f"Tensor? d{field}" for field in self.with_tangents)
            jvp = Derivative(
                f"{name}_jvp({tangents}, {tensors}, Tensor out, Tensor lse, Tensor? rest, "
                f"{others}) -> (Tensor dout, Tensor dlse)",
                len(self.with_tangents) + count + 3, self._jvp_call, self._fake_jvp, function,
            )  # fmt: skip
            jvp.register_vmap(rule)

        def forward(kind: tuple[bool, bool]) -> Forward:
            with_terms, with_row_max = kind
            full = f"{name}{'_terms' * with_terms}{'_row_max' * with_row_max}_fwd"
            results = "Tensor out, Tensor lse" + ", Tensor rest" * with_terms
            results += ", Tensor row_max" * with_row_max
            return Forward(
                f"{full}({tensors}, {others}) -> ({results})",
                count, partial(self._call_of_kind, kind), partial(self._fake_of_kind, kind),
                function, backward=backward, num_saved=2 + with_terms,
                names=operands._fields, jvp=jvp,
            )  # fmt: skip

        both = (False, True) if has_all else (False,)
        kinds = [*product(both, both)]
        self.forwards = {kind: forward(kind) for kind in kinds}
        self.operator = self.forwards[False, False]
        self.fwd, self.bwd = self.operator.op, backward.op
        for operator in (*self.forwards.values(), backward):
            operator.register_vmap(rule)

    def cast(self, operands: Any) -> Any:
        return self.operands(*cast_inputs(*operands[:3]), *operands[3:])

    def operator_of(self, operands: Any, options: FlashOptions) -> Forward:
        return self.forwards[has_terms(operands), options.row_max]

    def _call_of_kind(
        self, kind: tuple[bool, bool], tensors: tuple[Any, ...], others: tuple[Any, ...]
    ) -> Call:
        """Return the call of the operator of this kind, a key of `forwards`."""
        self._check_kind(kind, tensors, others)
        return self.call_of(tensors, others)

    def _fake_of_kind(self, kind: tuple[bool, bool], *args: Any) -> tuple[Tensor, ...]:
        self._check_kind(kind, args[: self.num_operands], args)
        out, lse = self.fake(*args)
        return out, lse, *(torch.empty_like(lse) for is_result in kind if is_result)

    def _check_kind(self, kind: tuple[bool, bool], tensors: Any, others: Any) -> None:
        found = has_terms(self.operands._make(tensors)), self.options_of(others).row_max
        if found != kind:
            name = self.forwards[found].op.name()
            fail(ValueError, "operator", name, self.forwards[kind].op.name())

    def attend(self, call: Call, operands: tuple[Any, ...], return_lse: bool) -> Any:
        spec: Any = call.spec
        operator = self.forwards[bool(spec.terms), spec.row_max]
        if call.is_new and call.is_recorded:
            from torch_attn.overlap import compiled_behind  # imports Triton

            launches = partial(self._launches_of_backward, call, operands)
            with compiled_behind(launches, operands[0].device):
                return run_kept(operator, call, operands, return_lse)
        return run_kept(operator, call, operands, return_lse)

    def _launches_of_backward(self, call: Call, operands: tuple[Any, ...]) -> list[Launch]:
        """Return what a call's backward will launch, found with tensors without values."""
        needed = (x is not None and x.requires_grad for x in operands)
        frozen = frozen_operands(self.operands._fields, operands, needed)
        spec = replace(call.spec, row_max=False, frozen=frozen)  # pyright: ignore[reportArgumentType]
        backend, _ = choose(call.others[-1], "flash_bwd", operands[0].device, spec)
        tensors = self.operands._make(
            None
            if x is None
            else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            for x in operands
        )
        out, lse = self.new_outputs(tensors, tensors[2].shape[-1])
        rest = torch.empty_like(lse) if has_terms(tensors) else None
        function = backend.family.function("flash_bwd")
        with torch.no_grad(), Capture() as found:
            self.run_backward(function, spec, backend, out, None, *tensors, out, lse, rest)
        return [x.launcher for x in found.steps if isinstance(x, CapturedLaunch)]

    def run_backward(self, function, spec, backend, dout, dlse, *tensors: Any):
        """Run a family's flash_bwd, copying tensors that its kernels cannot read.

        They read lse and rest as the forward wrote them, and out by rows. TMA needs aligned rows.
        """
        *operands, out, lse, rest = tensors
        out, lse = readable(out, lse)
        rest = None if rest is None else rest.contiguous()
        if backend.family.folder == "sm90":
            dout, out, *first = map(aligned, (dout, out, *operands[:3]))
            operands[:3] = first
        return function(dout, dlse, self.operands._make(operands), out, lse, rest, spec, backend)

    def _backward_call(self, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Call:
        """Return the call of a backward, which follows from all tensors that it reads.

        Hooks may have given saved tensors another layout. A family that is requested by name reads
        copies then.
        """
        dout, _, *operands, out, lse, rest = tensors
        operands = self.operands._make(operands)
        spec = self.check(operands, self.options_of(others), dout, out)
        q = operand("q", operands.q)
        check_saved(operand("dout", dout), q, operand("out", out), operand("lse", lse))
        if spec.terms and rest is None:
            fail(ValueError, "rest", "the forward's, as there are terms", None)
        # Only the forward has row maxima.
        spec = replace(spec, row_max=False, frozen=tuple(others[0].split()))
        if others[-1] is not None:
            spec = replace(spec, rows_aligned=True)
        return Call("flash_bwd", self.run_backward, spec, dout.device, others)

    def run_jvp(self, function, spec, backend, *tensors: Any):
        """Run a family's flash_jvp, copying results of the forward that its kernel cannot read."""
        tangents, operands, (out, lse, rest) = self._split(tensors)
        out, lse = readable(out, lse)
        rest = None if rest is None else rest.contiguous()
        return function(tangents, operands, out, lse, rest, spec, backend)

    def _split(self, tensors: Any) -> tuple[Any, Any, Any]:
        """Return the tangents, the operands, and the forward's results."""
        first = len(self.with_tangents)
        own = dict(zip(self.with_tangents, tensors, strict=False))
        tangents = self.operands._make(map(own.get, self.operands._fields))
        last = first + self.num_operands
        return tangents, self.operands._make(tensors[first:last]), tensors[last:]

    def _jvp_call(self, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Call:
        """Return the call of a forward's tangents; terms need its rest."""
        tangents, operands, (out, _, rest) = self._split(tensors)
        given = (x for x in tangents[:3] if x is not None)
        spec = replace(self.check(operands, self.options_of(others), out, *given), row_max=False)
        for name, x, dx in zip(self.operands._fields, operands, tangents, strict=True):
            if dx is not None and (dx.shape, dx.dtype) != (x.shape, x.dtype):
                fail(ValueError, f"d{name}", f"{x.dtype} {tuple(x.shape)}", tuple(dx.shape))
        if spec.terms and rest is None:
            fail(ValueError, "rest", "the forward's, as there are terms", None)
        return Call("flash_jvp", self.run_jvp, spec, out.device, others)

    def _fake_jvp(self, *args: Any) -> tuple[Tensor, Tensor]:
        _, _, (out, lse, *_) = self._split(args)
        return out.new_empty(out.shape), lse.new_empty(lse.shape)

    def _fake_backward(self, dout, dlse, *args):
        operands, frozen = args[: self.num_operands], args[self.num_operands + 3].split()
        named = zip(self.operands._fields, operands, strict=True)
        gradients = (
            x.new_empty(x.shape) if has_gradient(x) and name not in (*CONSTANTS, *frozen) else None
            for name, x in named
        )
        return with_left_out(gradients, dout)


def or_as_torch_says(deterministic: Any) -> Any:
    """Replace None by torch's own setting."""
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
