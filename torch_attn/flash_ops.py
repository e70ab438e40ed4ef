"""The torch operators of flash attention, dense, packed and sparse: what PyTorch sees of them.

`torch_attn::flash_fwd`, `::flash_bwd`, `::flash_varlen_fwd`, `::flash_varlen_bwd`,
`::block_sparse_fwd` and `::block_sparse_bwd`. Each has a
kernel for every backend, which runs a kernel family (`torch_attn.dispatch`), a fake kernel for
tracing, a batching rule for `vmap`, and a derivative: that of a forward calls its backward, that of
a backward refuses (a second derivative). They are registered with
`torch.library.Library`, which costs a quarter of the host time of `torch.library.custom_op` on
every call. Derivatives are autograd Functions on the operators' Autograd key rather than
`torch.library.register_autograd`, which gives zero tangents in forward mode without an error and
fails under `torch.func.grad`.

The dispatch guards of ``torch._C`` come from `torch_attn.private`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_attn import private
from torch_attn.calls import Call, is_recorded, keep, recall
from torch_attn.dispatch import check_implementation
from torch_attn.operands import (
    aligned,
    cast_inputs,
    dtype_name,
    operand,
    rows_aligned,
    schema,
)
from twin_attention.contract.operands import (
    BlockSparseOperands,
    FlashOperands,
    VarlenOperands,
    describe_operands,
)
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, VarlenSpec, Window
from twin_attention.contract.validate import (
    FlashOptions,
    check_block_sparse_attention,
    check_flash_attention,
    check_flash_attention_varlen,
    check_flash_options,
    check_saved,
    no_gradient,
    not_differentiable,
    not_mapped,
    not_mapped_with_sinks,
    not_mapped_with_sinks_and_mask,
)

_library = torch.library.Library("torch_attn", "DEF")
RUN: dict[str, Callable[..., Any]] = {}  # the function of each operator, by its name
OPTIONS = (
    "float? scale, SymInt? window_left, SymInt? window_right, float? softcap, bool deterministic, "
    "str precision, str? implementation"
)
# The kernels read strides: the compiler must pass tensors as the program laid them out.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def without_gradient(op: torch._ops.OpOverload, *args: Any) -> Any:
    """Run an operator that has no derivative: its kernel for the Autograd key.

    Raises:
        NotImplementedError: autograd would record the call, or it has tangents.
    """
    if is_recorded(args):
        no_gradient(op.name().removeprefix("torch_attn::"))
    return call_below_autograd(op, args)


def call_below_autograd(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> Any:
    """Call an operator's kernel below the Autograd key; without a guard for that, its function."""
    if private.below_autograd is None:
        return RUN[op.name()](*args)
    with private.below_autograd():
        return op(*args)


def pack(options: FlashOptions, implementation: Any) -> tuple[Any, ...]:
    """Return an operator's arguments after its tensors."""
    scale, window, *others = options
    return scale, window.left, window.right, *others, implementation


def readable(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return results, or their gradients, that the kernels can read; a copy where they cannot.

    Gradients may come expanded, and saved results in another layout.
    """
    out = out if out.stride(-1) == 1 else out.contiguous()
    return out, None if lse is None else lse.contiguous()


def _with_left_out(gradients: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Return gradients with an empty one for each operand that has none."""
    empty = (like.new_empty(0, dtype=torch.float32) if x is None else x for x in gradients)
    return tuple(empty)


def _has_gradient(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()


class FlashOperators:
    """The operators of one kind of operands, a forward and its backward.

    Attributes:
        fwd, bwd: the operators.
    """

    def __init__(
        self,
        name: str,
        operands: type[Any],
        spec: type[AttentionSpec],
        check: Callable[[Any, FlashOptions], Any],
        batch: Callable[..., Any],
    ) -> None:
        """Define and register the operators.

        Args:
            name: theirs, before "_fwd" and "_bwd".
            operands: the class of their operands.
            spec: the class of their problems.
            check: check described operands, with options.
            batch: the rule of `vmap`, from an operator and the number of its tensors.
        """
        self._operands, self._spec, self._check = operands, spec, check
        self._num_operands = count = len(operands._fields)
        tensors = schema(operands)
        # An operator cannot return None: a gradient that does not exist has no element.
        gradients = ", ".join(f"Tensor d{field}" for field in operands._fields)
        _library.define(f"{name}_fwd({tensors}, {OPTIONS}) -> (Tensor out, Tensor lse)", tags=TAGS)
        _library.define(
            f"{name}_bwd(Tensor dout, Tensor? dlse, {tensors}, Tensor out, Tensor lse, {OPTIONS}) "
            f"-> ({gradients})",
            tags=TAGS,
        )
        self.fwd: torch._ops.OpOverload = getattr(torch.ops.torch_attn, f"{name}_fwd").default
        self.bwd: torch._ops.OpOverload = getattr(torch.ops.torch_attn, f"{name}_bwd").default
        self._fwd_name, self._bwd_name = self.fwd.name(), self.bwd.name()

        class Forward(_Forward):
            operators, op, name, num_tensors = self, self.fwd, self._fwd_name, count
            function = spec.function

        class Backward(_Backward):
            op, name, num_tensors = self.bwd, self._bwd_name, count + 4
            function = spec.function

        class Kept(_Kept):
            operators = self
            function = spec.function

        # As in `Differentiable.call`.
        self._record = super(torch.autograd.Function, Kept).apply  # pyright: ignore[reportAttributeAccessIssue]
        self._register(Forward, self._run_forward, self._fake_forward, batch)
        self._register(Backward, self._run_backward, self._fake_backward, batch)

    def _register(self, function: type[Differentiable], run, fake, batch) -> None:
        op, name = function.op, function.name
        torch.library.register_fake(name, fake, lib=_library)
        _library.impl(name, run, "CompositeExplicitAutograd")  # every backend
        RUN[name] = run
        _library.impl(name, function.call, "Autograd")
        torch.library.register_vmap(name, partial(batch, op, function.num_tensors), lib=_library)

    def unpack(self, args: Sequence[Any]) -> tuple[Any, list[Any], FlashOptions, Any]:
        """Split an operator's arguments, those of a backward from its operands on.

        Returns:
            operands, the forward's results where they follow, options, implementation.
        """
        count = self._num_operands
        *results, scale, left, right, softcap, deterministic, precision, implementation = args[
            count:
        ]
        options = FlashOptions(scale, Window(left, right), softcap, deterministic, precision)
        return self._operands._make(args[:count]), results, options, implementation

    def spec_of(self, operands: Any, options: FlashOptions, *others: Tensor) -> Any:
        """Describe the problem of checked arguments; `others` are read as well."""
        spec = self._spec.of(operands, dtype_name(operands.q.dtype), *options)
        return replace(spec, rows_aligned=rows_aligned(*operands[:3], *others))

    def check(self, operands: Any, options: FlashOptions) -> Any:
        """Check the operands with checked options and return the problem."""
        self._check(describe_operands(operands, operand), options)
        return self.spec_of(operands, options)

    def forward(self, function, spec, backend, *operands: Tensor | None):
        """Run a family's flash_fwd."""
        return function(self._operands._make(operands), spec, backend)

    def backward(self, function, spec, backend, dout, dlse, *tensors: Any):
        """Run a family's flash_bwd, on copies of the tensors that its kernels cannot read.

        They read lse as the forward wrote it, and out by rows. TMA wants aligned rows.
        """
        *operands, out, lse = tensors
        out, lse = readable(out, lse)
        if backend.family.folder == "sm90":
            dout, out, *first = map(aligned, (dout, out, *operands[:3]))
            operands[:3] = first
        return function(dout, dlse, self._operands._make(operands), out, lse, spec, backend)

    def backward_call(
        self, tensors: tuple[Any, ...], options: FlashOptions, implementation: Any
    ) -> Call:
        """Return the call of a backward, which follows from all tensors that it reads.

        Tensors that autograd saved may have come back in another layout: hooks may have moved them.
        A family that is asked for by name reads copies of unaligned tensors.

        Args:
            tensors: dout, dlse, the operands, out and lse.

        Raises:
            TypeError, ValueError: one has another dtype, shape or device than the forward had.
        """
        dout, _, *operands, out, lse = tensors
        operands = self._operands._make(operands)
        described = describe_operands(operands, operand)
        self._check(described, options)
        check_saved(operand("dout", dout), described.q, operand("out", out), operand("lse", lse))
        spec = self.spec_of(operands, options, dout, out)
        if implementation is not None:
            spec = replace(spec, rows_aligned=True)
        return Call("flash_bwd", self.backward, spec, implementation, dout.device)

    def gradients(self, dout, dlse, *args) -> tuple[Tensor | None, ...]:
        """Call the backward; returns None for an operand that has no gradient."""
        gradients = self.bwd(dout, dlse, *args)
        return tuple(
            dx if _has_gradient(x) else None for dx, x in zip(gradients, args, strict=False)
        )

    def _run_forward(self, *args):
        count = self._num_operands
        known = self._fwd_name, args[:count], args[count:]
        call = recall(*known)
        if call is None:
            operands, _, options, implementation = self.unpack(args)
            spec = self.spec_of(operands, options)
            call = Call("flash_fwd", self.forward, spec, implementation, operands.q.device)
            keep(*known, call)
        return call(*args[:count])

    def _run_backward(self, dout, dlse, *args):
        dout, dlse = readable(dout, dlse)
        end = self._num_operands + 2
        tensors = dout, dlse, *args[:end]
        known = self._bwd_name, tensors, args[end:]
        call = recall(*known)
        if call is None:
            *_, options, implementation = self.unpack(args)
            call = self.backward_call(tensors, options, implementation)
            keep(*known, call)
        return _with_left_out(call(*tensors), dout)

    def _fake_forward(self, *args):
        operands, _, options, _ = self.unpack(args)
        self._check(describe_operands(operands, operand), options)
        q = operands.q
        *batch, seq_q, heads_q, _ = q.shape
        out = q.new_empty((*batch, seq_q, heads_q, operands.v.shape[-1]))
        return out, q.new_empty((*batch, heads_q, seq_q), dtype=torch.float32)

    def _fake_backward(self, dout, dlse, *args):
        operands, *_ = self.unpack(args)
        gradients = (x.new_empty(x.shape) if _has_gradient(x) else None for x in operands)
        return _with_left_out(gradients, dout)

    def __call__(self, operands: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        """Run the public function: a call that is kept, or the operator after every check.

        Args:
            operands: as the caller gave them.
            options: causal, scale, window_size, softcap, deterministic, precision, return_lse
                and implementation, as the caller gave them.

        Returns:
            out; with return_lse the pair (out, lse).
        """
        if torch.is_autocast_enabled("cuda"):
            operands = self._cast(operands)
        call = recall(self, operands, options)
        *_, return_lse, _implementation = options
        if call is None:
            out, lse = self._check_and_attend(operands, options)
        else:
            out, lse = self.attend(call, operands, return_lse)
        return (out, lse) if return_lse else out

    def _check_and_attend(
        self, given: tuple[Any, ...], options: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None]:
        causal, scale, window_size, softcap, *others, return_lse, implementation = options
        deterministic, precision = others
        operands = self._cast(given)
        checked = check_flash_options(
            causal=causal,
            scale=scale,
            window_size=window_size,
            softcap=softcap,
            deterministic=deterministic,
            precision=precision,
            return_lse=return_lse,
        )
        check_implementation(implementation)
        # The operator's fake kernel checks the operands while torch.compile traces.
        if not torch.compiler.is_compiling():
            spec = self.check(operands, checked)
            call = Call("flash_fwd", self.forward, spec, implementation, operands.q.device)
            if keep(self, operands, options, call):
                return self.attend(call, operands, return_lse)
        return self.fwd(*operands, *pack(checked, implementation))

    def _cast(self, operands: Any) -> Any:
        """Return operands as autocast has them."""
        return self._operands(*cast_inputs(*operands[:3]), *operands[3:])

    def attend(
        self, call: Call, operands: tuple[Tensor | None, ...], return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run a forward that is kept, past the dispatcher. lse may be None if it is not
        returned.
        """
        if not call.is_recorded:
            return call(*operands)
        results = self._record(call, return_lse, *operands)
        return results if return_lse else (results, None)


class Differentiable(torch.autograd.Function):
    """An operator with a derivative in reverse mode; subclasses name it and define `backward`.

    Attributes:
        function: the public function, as messages name it.
    """

    generate_vmap_rule = True
    op: torch._ops.OpOverload
    name: str
    num_tensors: int
    function: str

    @classmethod
    def call(cls, *args):
        """Run the operator so that a backward will find its way."""
        if not private.transforms_active():
            results = cls.recalled(args)
            if results is not None:
                return results
            if not is_recorded(args):
                return cls.forward(*args)
            # Function.apply binds the signature on every call, which takes longer than a launch.
            bound = super(torch.autograd.Function, cls)
            return bound.apply(*args)  # pyright: ignore[reportAttributeAccessIssue]
        # torch.func calls this below its own dispatch key, but a Function has to start above it.
        with private.above_torch_func():
            return cls.apply(*args)

    @classmethod
    def recalled(cls, args: tuple[Any, ...]) -> Any:
        """Return the results of a call that is kept, past the rest of the dispatcher, or None."""
        tensors = args[: cls.num_tensors]
        call = recall(cls.name, tensors, args[cls.num_tensors :])
        return None if call is None else call(*tensors)

    @classmethod
    def forward(cls, *args):
        return call_below_autograd(cls.op, args)

    @classmethod
    def jvp(cls, *_: Any) -> NoReturn:
        not_differentiable("forward mode", "Use torch.func.vjp or Tensor.backward.", cls.function)


class _Forward(Differentiable):
    operators: FlashOperators

    @classmethod
    def setup_context(cls, ctx, inputs, output) -> None:
        ctx.options = inputs[cls.num_tensors :]
        ctx.save_for_backward(*inputs[: cls.num_tensors], *output)
        ctx.set_materialize_grads(False)

    @classmethod
    def backward(cls, ctx, dout, dlse):
        *operands, out, lse = ctx.saved_tensors  # once: a checkpoint computes them here
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = cls.operators.gradients(dout, dlse, *operands, out, lse, *ctx.options)
        return *gradients, *(None for _ in ctx.options)


class _Backward(Differentiable):
    @classmethod
    def recalled(cls, args: tuple[Any, ...]) -> Any:
        gradients = super().recalled(args)
        return None if gradients is None else _with_left_out(gradients, args[0])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @classmethod
    def backward(cls, *_: Any) -> NoReturn:
        instead = "Compute it with torch operations."
        not_differentiable("a second derivative", instead, cls.function)


class _Kept(torch.autograd.Function):
    """A cached forward and its derivative: their kernels, past the dispatcher.

    An lse that the caller has not asked for is no output, so that autograd saves less.
    """

    operators: FlashOperators
    function: str

    @staticmethod
    def forward(ctx, call, return_lse, *operands):
        out, lse = call(*operands)
        ctx.call = call
        ctx.save_for_backward(*operands, out, lse)
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @classmethod
    def backward(cls, ctx, dout, dlse=None):
        saved = ctx.saved_tensors
        out = saved[-2]
        dout, dlse = readable(torch.zeros_like(out) if dout is None else dout, dlse)
        forward, spec = ctx.call, ctx.call.spec
        options = FlashOptions(
            spec.scale, spec.window, spec.softcap, spec.deterministic, spec.precision
        )
        tensors = dout, dlse, *saved
        # All else that the call depends on follows from its forward's.
        known = forward, tensors, ()
        call = None
        if not torch.is_grad_enabled():
            call = recall(*known)
            if call is None:
                found = cls.operators.backward_call(tensors, options, forward.implementation)
                call = found if keep(*known, found) else None
        if call is None:  # the operator refuses a second derivative, and has a rule for `vmap`
            packed = pack(options, forward.implementation)
            return None, None, *cls.operators.gradients(*tensors, *packed)
        return None, None, *call(*tensors)

    @classmethod
    def jvp(cls, *_: Any) -> NoReturn:
        not_differentiable("forward mode", "Use torch.func.vjp or Tensor.backward.", cls.function)


# The axis that a mapped dimension joins, by the number of axes: in [B, S, H, D], [B, H, S], [B, S]
# and [H]. That of the batch, or that of the heads.
_BATCH = {4: 0, 3: 0, 2: 0, 1: 0}
_HEADS = {4: 2, 3: 1, 1: 0}


def join(x: Tensor, dim: int | None, axis: int, size: int) -> Tensor:
    """Return a tensor whose dimension that `vmap` maps, of this size, has joined another axis.

    Args:
        x: a tensor, with the mapped dimension.
        dim: the mapped dimension; None expands the tensor.
        axis: the other one, without the mapped dimension.
        size: of the mapped dimension.
    """
    if dim is None:
        x = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])
    else:
        x = x.movedim(dim, axis)
    return x.flatten(axis, axis + 1)


def _batch(op, num_tensors, info, in_dims, *args):
    """Apply the rule of `vmap`: the mapped dimension joins the batch, or with sinks, which have
    none, the heads, which segment ids are the same for.

    Raises:
        NotImplementedError: segment ids that are mapped, with sinks.
    """
    tensors = list(zip(args[:num_tensors], in_dims[:num_tensors], strict=True))
    axis = _BATCH
    if any(x is not None and x.ndim - (dim is not None) == 1 for x, dim in tensors):
        axis = _HEADS

    def fold(x, dim):
        if x is None:
            return None
        if x.dtype == torch.int32 and axis is _HEADS:
            if dim is not None:
                not_mapped_with_sinks()
            return x
        return join(x, dim, axis[x.ndim - (dim is not None)], info.batch_size)

    outputs = op(*(fold(x, dim) for x, dim in tensors), *args[num_tensors:])
    dims = [axis[x.ndim] for x in outputs]
    sizes = (info.batch_size, -1)
    return tuple(x.unflatten(dim, sizes) for x, dim in zip(outputs, dims, strict=True)), tuple(dims)


def _batch_sparse(op, num_tensors, info, in_dims, *args):
    """Apply the rule of `vmap`: the mapped dimension joins the batch, where sinks have none.

    A mask of all sequences stays one, unless it is mapped.

    Raises:
        NotImplementedError: there are sinks.
    """
    batch = args[0].shape[1 if in_dims[0] == 0 else 0]

    def fold(x, dim):
        if x is None:
            return None
        if x.ndim - (dim is not None) == 1:
            not_mapped_with_sinks_and_mask()
        if x.dtype == torch.int32 and dim is None and len(x) == 1:
            return x
        if x.dtype == torch.int32 and dim is not None:
            x, dim = x.movedim(dim, 0), 0
            x = x.expand(-1, batch, *x.shape[2:])
        return join(x, dim, 0, info.batch_size)

    tensors = zip(args[:num_tensors], in_dims[:num_tensors], strict=True)
    outputs = op(*(fold(x, dim) for x, dim in tensors), *args[num_tensors:])
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0,) * len(outputs)


def _refuse_to_batch(*_: Any) -> NoReturn:
    """Refuse `vmap`: sequences of another batch are further sequences of a packed one."""
    not_mapped("flash_attention_varlen")


DENSE = FlashOperators("flash", FlashOperands, AttentionSpec, check_flash_attention, _batch)
PACKED = FlashOperators(
    "flash_varlen", VarlenOperands, VarlenSpec, check_flash_attention_varlen, _refuse_to_batch
)
SPARSE = FlashOperators(
    "block_sparse",
    BlockSparseOperands,
    BlockSparseSpec,
    check_block_sparse_attention,
    _batch_sparse,
)
