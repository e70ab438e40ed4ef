"""Registration of torch operators: a schema, and what runs for each dispatch key.

`torch.library.Library` costs far less host time on every call than `torch.library.custom_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor

from torch_attn import private
from torch_attn.calls import CALLS, Call, is_recorded
from torch_attn.operands import with_rows
from torch_attn.vmap import of_any_size
from twin_attention.contract.operands import X
from twin_attention.contract.spec import Precision
from twin_attention.contract.validate.errors import no_gradient

_library = torch.library.Library("twin_attention", "DEF")
# The kernels use strides, so the compiler must keep the program's layouts.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_KINDS = {
    X: "Tensor", X | None: "Tensor?", float: "float", float | None: "float?",
    int | None: "SymInt?",
    bool: "bool", bool | None: "bool?", Precision: "str",
}  # fmt: skip


def schema(fields: type[Any], written: tuple[str, ...] = ()) -> str:
    """Return a NamedTuple's fields as arguments; `written` names tensors it writes into."""
    kinds = {name: _KINDS[hint] for name, hint in get_type_hints(fields).items()}
    for name, alias in zip(written, "ab", strict=False):
        kinds[name] = kinds[name].replace("Tensor", f"Tensor({alias}!)")
    return ", ".join(f"{kind} {name}" for name, kind in kinds.items())


class Operator:
    """A torch operator without a derivative: a kernel for every backend, and a fake one."""

    def __init__(
        self,
        definition: str,
        num_tensors: int,
        call_of: Callable[[tuple[Any, ...], tuple[Any, ...]], Call],
        fake: Callable[..., Any],
        function: str,
    ) -> None:
        """`call_of` describes a call, `fake` is the kernel for tracing."""
        _library.define(definition, tags=_TAGS)
        name = definition.partition("(")[0]
        self.op: torch._ops.OpOverload = getattr(torch.ops.twin_attention, name).default
        self.num_tensors, self.function = num_tensors, function
        self.name, self._call_of = self.op.name(), call_of
        torch.library.register_fake(self.name, fake, lib=_library)
        _library.impl(self.name, self.run, "CompositeExplicitAutograd")  # every backend
        _library.impl(self.name, self.autograd, "Autograd")

    def register_vmap(self, rule: Callable[..., Any]) -> None:
        rule = partial(of_any_size, partial(rule, self.op, self.num_tensors))
        torch.library.register_vmap(self.name, rule, lib=_library)

    @private.uncompiled
    def run(self, *args: Any) -> Any:
        tensors, options = args[: self.num_tensors], args[self.num_tensors :]
        tensors = self.prepare(tensors)
        call = CALLS.find(self.name, tensors, options)
        if call is None:
            call = self._call_of(tensors, options)
            CALLS.keep(self.name, tensors, options, call)
        return self.finish(call, tensors, call(*tensors))

    def prepare(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return tensors

    def returned(self, results: Any) -> Any:
        """Return the results that a public function may return."""
        return results

    def finish(self, call: Call, tensors: tuple[Any, ...], results: Any) -> Any:
        """Return a call's results as the schema has them."""
        return results

    @private.uncompiled
    def autograd(self, *args: Any) -> Any:
        """Run the kernel of the Autograd key, which refuses derivatives."""
        if is_recorded(args):
            no_gradient(self.function)
        return self.below_autograd(*args)

    def below_autograd(self, *args: Any) -> Any:
        """Call the operator below the Autograd key, or its kernel if there is no guard for that."""
        if private.below_autograd is None:
            return self.run(*args)
        with private.below_autograd():
            return self.op(*args)


def readable(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return results, or their gradients, copied if the kernels cannot read them.

    Gradients may come expanded, and saved results in another layout.
    """
    return with_rows(out), None if lse is None else lse.contiguous()
